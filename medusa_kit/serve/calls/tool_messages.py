"""Earlier calls and their results in a conversation, as a chat template takes them."""

import json
from collections.abc import Sequence
from typing import Any

from medusa_kit.errors import ConfigError
from medusa_kit.files import parse_json
from medusa_kit.serve.calls.tool_calls import CALL, END

Message = dict[str, Any]


def for_template(messages: Sequence[Message]) -> list[Message]:
    """Messages for a template that writes calls: arguments as objects, which OpenAI's API has as
    text."""
    given = []
    for index, message in enumerate(messages):
        message = {**message, "content": message.get("content") or ""}
        if calls := message.pop("tool_calls", None):
            message["tool_calls"] = [
                {**call, "function": _function(f"messages[{index}].tool_calls[{number}]", call)}
                for number, call in enumerate(calls)
            ]
        given.append(message)
    return given


def as_text(messages: Sequence[Message]) -> list[Message]:
    """Messages for other templates: calls in the text of the assistant, results in that of the
    user."""
    given: list[Message] = []
    before = ""
    for message in for_template(messages):
        content = message["content"]
        if message["role"] == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            if before == "tool":  # results of one turn's calls, together
                content = f"{given.pop()['content']}\n{content}"
            given.append({"role": "user", "content": content})
            before = "tool"
            continue
        before = message["role"]
        written = [
            f"{CALL}\n{json.dumps(call['function'], ensure_ascii=False)}\n{END}"
            for call in message.get("tool_calls", ())
        ]
        lines = "\n".join([content, *written] if content else written or [""])
        kept: Message = {k: message[k] for k in ("name", "reasoning_content") if k in message}
        given.append({"role": message["role"], "content": lines, **kept})
    return given


def with_system(
    messages: Sequence[Message], instructions: str, role: str = "system"
) -> list[Message]:
    """The messages with instructions in the first one, which is added where it is not of `role`."""
    if messages and messages[0]["role"] == role:
        first, *others = messages
        return [{**first, "content": f"{first['content']}\n\n{instructions}"}, *others]
    return [{"role": role, "content": instructions}, *messages]


def _function(field: str, call: Any) -> dict[str, Any]:
    try:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        parsed = parse_json(arguments) if isinstance(arguments, str) else arguments
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{field} is no call: {error!r}",
            hint='expected {"id", "type", "function": {"name", "arguments"}}, the last one JSON',
        ) from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"{field}.function.arguments {arguments!r}: expected a JSON object")
    return {"name": name, "arguments": parsed}
