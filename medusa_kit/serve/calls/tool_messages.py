"""Earlier calls and their results in a conversation, as a chat template takes them."""

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from medusa_kit.errors import half_pair
from medusa_kit.files import parse_json
from medusa_kit.serve.calls.call_form import HERMES, CallForm, Taken

Message = dict[str, Any]
SHORT_ID = re.compile("[a-zA-Z0-9]{9}")


def for_template(
    messages: Sequence[Message], taken: Taken | None = None, form: CallForm = HERMES
) -> list[Message]:
    """Messages for a template that writes calls: arguments as objects, unless it takes the text
    that OpenAI's API has. Calls with other arguments, such as one that was cut, are given as the
    template would write them, in the message's text."""
    if taken is not None and form.is_of_one:
        messages = one_by_one(messages)
    given, taken = list[Message](), taken or Taken()
    for message in messages:
        message = {**message, "content": message.get("content") or ""}
        calls = [_taken(call, taken) for call in message.pop("tool_calls", ())]
        if taken.short_ids and "tool_call_id" in message:
            message["tool_call_id"] = _short(message["tool_call_id"])
        if not all(_is_object(call) for call in calls):
            message["content"] = _with_calls(message["content"], calls, form)
        elif calls:
            message["tool_calls"] = calls
        given.append(message)
    return given


def one_by_one(messages: Sequence[Message]) -> list[Message]:
    """Each call in a message of its own, its result behind it: templates that write one call of a
    message pass over others, and give all results to that one."""
    given, place = list[Message](), 0
    while place < len(messages):
        message, place = messages[place], place + 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            given.append(message)
            continue
        results: list[Message] = []
        while place < len(messages) and messages[place]["role"] == "tool":
            results.append(messages[place])
            place += 1
        for number, (call, own) in enumerate(zip(calls, _by_call(calls, results), strict=True)):
            before = message if number == 0 else {"role": message["role"], "content": ""}
            given += [{**before, "tool_calls": [call]}, *own]
    return given


def _by_call(calls: Sequence[Any], results: Sequence[Message]) -> list[list[Message]]:
    """The results of each call. Calls of one id have one each, in their order, and the last of them
    what is left; what names no call of these is behind the last one."""
    by_call: list[list[Message]] = [[] for _ in calls]
    waiting = dict[Any, list[list[Message]]]()
    for call, own in zip(calls, by_call, strict=True):
        waiting.setdefault(call.get("id"), []).insert(0, own)
    for result in results:
        places = waiting.get(result.get("tool_call_id"), by_call[-1:])
        (places.pop() if len(places) > 1 else places[0]).append(result)
    return by_call


def as_text(messages: Sequence[Message], form: CallForm = HERMES) -> list[Message]:
    """Messages for other templates: calls in the text of the assistant, results in that of the
    user."""
    given: list[Message] = []
    before = ""
    for message in for_template(messages, form=form):
        content = message["content"]
        if message["role"] == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            if before == "tool":  # results of one turn's calls, together
                content = f"{given.pop()['content']}\n{content}"
            given.append({"role": "user", "content": content})
            before = "tool"
            continue
        before = message["role"]
        lines = _with_calls(content, message.get("tool_calls", ()), form)
        kept: Message = {k: message[k] for k in ("name", "reasoning_content") if k in message}
        given.append({"role": message["role"], "content": lines, **kept})
    return given


def _with_calls(content: str, calls: Sequence[Any], form: CallForm) -> str:
    """A message's text with its calls behind it."""
    called = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    written = [
        (_json(name)[1:-1], one if isinstance(one, str) else _json(one)) for name, one in called
    ]
    return "\n".join(filter(None, [content, form.written(written) if calls else ""]))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def with_system(
    messages: Sequence[Message], instructions: str, role: str = "system"
) -> list[Message]:
    """The messages with instructions in the first one, which is added where it is not of `role`."""
    if messages and messages[0]["role"] == role:
        first, *others = messages
        return [{**first, "content": f"{first['content']}\n\n{instructions}"}, *others]
    return [{"role": role, "content": instructions}, *messages]


def _taken(call: Any, taken: Taken) -> Message:
    """A call as a template takes it."""
    function = _function(call)
    if taken.as_text and isinstance(function["arguments"], dict):
        function["arguments"] = _json(function["arguments"])
    return {
        **call,
        "function": function,
        **({"id": _short(call.get("id"))} if taken.short_ids else {}),
    }


def _is_object(call: Any) -> bool:
    """Whether a call's arguments are an object, or the text of one."""
    arguments = call["function"]["arguments"]
    return isinstance(_read(arguments) if isinstance(arguments, str) else arguments, dict)


def _short(number: Any) -> str:
    """An id of nine letters and digits, the same for the same one."""
    number = str(number)
    return number if SHORT_ID.fullmatch(number) else hashlib.sha256(number.encode()).hexdigest()[:9]


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
