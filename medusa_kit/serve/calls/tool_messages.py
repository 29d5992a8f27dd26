"""Earlier calls and their results in a conversation, as a chat template takes them."""

import json
from collections.abc import Sequence
from typing import Any

from medusa_kit.errors import half_pair
from medusa_kit.files import parse_json
from medusa_kit.serve.calls.tool_calls import CALL, END

Message = dict[str, Any]


def for_template(messages: Sequence[Message]) -> list[Message]:
    """Messages for a template that writes calls: arguments as objects, which OpenAI's API has as
    text. Calls with other arguments, such as one that was cut, are given as the template would
    write them, in the message's text."""
    given = []
    for message in messages:
        message = {**message, "content": message.get("content") or ""}
        calls = [{**call, "function": _function(call)} for call in message.pop("tool_calls", ())]
        if all(isinstance(call["function"]["arguments"], dict) for call in calls):
            message |= {"tool_calls": calls} if calls else {}
        else:
            message["content"] = _with_calls(message["content"], calls)
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
        lines = _with_calls(content, message.get("tool_calls", ()))
        kept: Message = {k: message[k] for k in ("name", "reasoning_content") if k in message}
        given.append({"role": message["role"], "content": lines, **kept})
    return given


def _with_calls(content: str, calls: Sequence[Any]) -> str:
    """A message's text with its calls behind it."""
    return "\n".join([*filter(None, [content]), *map(_written, calls)])


def _written(call: Any) -> str:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    called = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}'
    return f"{CALL}\n{called}\n{END}"


def with_system(
    messages: Sequence[Message], instructions: str, role: str = "system"
) -> list[Message]:
    """The messages with instructions in the first one, which is added where it is not of `role`."""
    if messages and messages[0]["role"] == role:
        first, *others = messages
        return [{**first, "content": f"{first['content']}\n\n{instructions}"}, *others]
    return [{"role": role, "content": instructions}, *messages]


def _function(call: Any) -> dict[str, Any]:
    """A call's name and arguments: an object, where they are one or there are none; else as they
    came. Clients send back what they got, so nothing is refused."""
    name, arguments = call["function"].get("name") or "", call["function"].get("arguments")
    if isinstance(arguments, str):
        arguments = _read(arguments)
    return {"name": name, "arguments": {} if arguments is None else arguments}


def _read(arguments: str) -> Any:
    """The object that a text is JSON of, None where it is empty or null; else the text."""
    try:
        read = parse_json(arguments.strip() or "null")
        wrong = half_pair(json.dumps(read, ensure_ascii=False))
    except (ValueError, RecursionError):
        return arguments
    return read if isinstance(read, dict | None) and not wrong else arguments
