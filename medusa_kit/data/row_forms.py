"""What an item of a data set says, as a row. Its form is recognised by its keys:

    messages, conversations, conversation    turns of role and content, or from and value
    turns                                    MT-bench's and Arena-Hard's, texts or objects with
                                             content: the first is asked; or messages with roles
    prompt, question, instruction, query     what is asked, text or messages; with input or context
      with completion, answer, output,       the answer to it, text or messages
      response; history                      earlier [question, answer] pairs
    text                                     a prompt
    prompt_ids, response_ids                 an answer of the base, as `data generate` writes it

row_keys.py has the other keys.
"""

import json
from collections.abc import Mapping
from typing import Any

from medusa_kit.data.row_keys import (
    ANSWER_KEYS,
    CONTEXT_KEYS,
    EXTRA_KEYS,
    PROMPT_KEYS,
    REASONING_KEYS,
    SYSTEM_KEYS,
    TURN_KEYS,
    check_message,
    is_empty,
    refuse_extras,
    unused,
)
from medusa_kit.data.rows import (
    EXAMPLES,
    AnswerRow,
    BadRow,
    Conversation,
    Message,
    Row,
    kind_of,
    text_of,
)
from medusa_kit.errors import DataError, unknown_value
from medusa_kit.files import parse_json

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
         "model": "assistant", "system": "system", "developer": "system",
         "tool": "tool"}  # fmt: skip
LAYOUTS = ("###", "[INST]", "<|", "Instruction:", "Question:")  # of prompts made of a row's columns
FINISH_REASONS = ("stop", "length")
FORMS = (
    "messages or conversations (role and content, or from and value), prompt, question, query or "
    "instruction (with completion, answer, response or output), text, turns, or prompt_ids and "
    f"response_ids; {EXAMPLES}"
)


def read_item(item: Any, number: int, source: str, extras: bool = False) -> Row | BadRow:
    """The row that an item describes. `extras`: it may have tools, and messages may have tool
    calls, names and reasoning, which the caller checks (shown.py); else such a row is a BadRow, as
    nothing would show them."""
    try:
        return _row(item, number, source, extras)
    except DataError as error:
        return BadRow(error.message, number, source, error.hint or EXAMPLES)


def _row(item: Any, number: int, source: str, extras: bool) -> Row:
    if isinstance(item, str):
        return Conversation([_plain_message("user", item)], number, None, source)
    if not isinstance(item, dict):
        raise DataError(
            f"it holds {kind_of(item)}, expected an object or a string",
            hint=f"expected {FORMS}",
        )
    identity = item.get("id", item.get("question_id"))
    identity = None if identity is None else str(identity)
    if "response_ids" in item:
        return _answer(item, identity, number, source)
    messages, used = _messages(item)
    messages, system_keys = _with_system(messages, item)
    tools = _tools(item.get("tools"))
    known = {*used, *system_keys, "tools"}  # "[]" and "null" as JSON text name none
    repeated = [
        key
        for key in PROMPT_KEYS
        if key not in known and _repeats_prompt(item, key, used, messages)
    ]
    unused_keys = unused(item, {*known, *repeated})
    if not extras:
        refuse_extras(messages, tools)
    category = item.get("category")
    category = category if isinstance(category, str) else None
    return Conversation(messages, number, identity, source, category, tools, unused_keys)


def _messages(item: dict[str, Any]) -> tuple[list[Message], list[str]]:
    """The turns, and the keys that they are from."""
    for key in TURN_KEYS:
        if not is_empty(item.get(key)):
            return _turns(_listed(item, key)), [key]
    if item.get("turns"):
        return _asked_turns(_listed(item, "turns")), ["turns"]
    for key in PROMPT_KEYS:
        if not is_empty(item.get(key)):
            return _question_and_answer(item, key)
    if not is_empty(text := item.get("text")):
        if not isinstance(text, str):
            raise DataError(f"text is {kind_of(text)}, expected text")
        return [_plain_message("user", text)], ["text"]
    for key in PROMPT_KEYS:
        if item.get(key) == "":  # a tokenizer may begin texts with a token of its own
            return [_plain_message("user", "")], [key]
    empty = [key for key in (*TURN_KEYS, "turns", *PROMPT_KEYS, "text")
             if key in item and is_empty(item[key])]  # fmt: skip
    problem = f"its format is unknown; its keys are {', '.join(map(repr, item))}"
    if empty or not item:
        problem = f"{' and '.join(map(repr, empty)) or 'the row'} is empty"
    raise DataError(problem, hint=f"expected {FORMS}")


def _question_and_answer(item: dict[str, Any], prompt_key: str) -> tuple[list[Message], list[str]]:
    further = [key for key in CONTEXT_KEYS if not is_empty(item.get(key))]
    answers = [key for key in ANSWER_KEYS if not is_empty(item.get(key))]
    if len(answers) > 1:
        raise DataError(f"it has {' and '.join(map(repr, answers))}; expected one answer")
    messages = _messages_of(item, prompt_key, "user")
    for key in further:
        text = item[key]
        if not isinstance(text, str) or isinstance(item[prompt_key], list):
            raise DataError(f"{key} is {kind_of(text)} alongside {prompt_key}, expected texts")
        messages[-1]["content"] += f"\n\n{text}"
    for key in answers:
        messages += _messages_of(item, key, "assistant")
    history = [] if is_empty(item.get("history")) else _listed(item, "history")
    used = [prompt_key, *further, *answers, *(["history"] if history else [])]
    return [*_history_messages(history), *messages], used


def _repeats_prompt(
    item: dict[str, Any], key: str, used: list[str], messages: list[Message]
) -> bool:
    """Whether a column repeats what is asked: as a message has it, or in another layout."""
    text = item.get(key)
    if not isinstance(text, str):
        return False
    prompts = [item[name] for name in used if name in (*PROMPT_KEYS, *CONTEXT_KEYS)]
    has_prompts = bool(prompts) and all(
        isinstance(prompt, str) and prompt in text for prompt in prompts
    )
    return (has_prompts and any(mark in text for mark in LAYOUTS)) or any(
        text.strip() in message["content"] for message in messages
    )


def _history_messages(history: list[Any]) -> list[Message]:
    for pair in history:
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not all(isinstance(t, str) for t in pair)
        ):
            raise DataError("history holds something else than pairs of a question and its answer")
    return [_plain_message(role, text) for pair in history
            for role, text in zip(("user", "assistant"), pair, strict=True)]  # fmt: skip


def _messages_of(item: dict[str, Any], key: str, role: str) -> list[Message]:
    value = item[key]
    if isinstance(value, str):
        return [_plain_message(role, value)]
    if isinstance(value, list):
        return _turns(value)
    raise DataError(f"{key} is {kind_of(value)}, expected text or messages")


def _plain_message(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _with_system(messages: list[Message], item: dict[str, Any]) -> tuple[list[Message], list[str]]:
    """(messages with the row's own system text before them, the keys of that text)."""
    keys = [key for key in SYSTEM_KEYS if not is_empty(item.get(key))]
    for key in keys:
        text = item[key]
        if not isinstance(text, str):
            raise DataError(f"{key} is {kind_of(text)}, expected text")
        system_texts = [message["content"] for message in messages if message["role"] == "system"]
        if not system_texts:
            messages = [_plain_message("system", text), *messages]
        elif system_texts != [text]:
            raise DataError(f"its {key!r} differs from its system message; expected one of them")
    return messages, keys


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    """The tools of a row, None without any; many data sets have them as JSON text."""
    if isinstance(tools, str) and tools.strip():
        try:
            tools = parse_json(tools)
        except json.JSONDecodeError as error:
            raise DataError(f"tools is text that is not JSON: {error.msg}") from error
    if is_empty(tools) or (isinstance(tools, str) and not tools.strip()):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError("tools is no list of objects")
    return tools


def _listed(item: dict[str, Any], key: str) -> list[Any]:
    if not isinstance(item[key], list):
        raise DataError(f"{key} is {kind_of(item[key])}, expected a list")
    return item[key]


def _asked_turns(turns: list[Any]) -> list[Message]:
    """What a user says turn by turn, of which the first is asked; where all turns have roles, they
    are messages."""
    if all(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in turns):
        return _turns(turns)
    texts = [_turn_text(number, turn) for number, turn in enumerate(turns, start=1)]
    return [_plain_message("user", texts[0])]


def _turn_text(number: int, turn: Any) -> str:
    if isinstance(turn, str):
        return turn
    if not isinstance(turn, dict) or "content" not in turn:
        given = "an object without content" if isinstance(turn, dict) else kind_of(turn)
        raise DataError(f"turn {number} is {given}, expected text or an object with content")
    check_message(turn, {"content"})
    return text_of(turn["content"])


def _turns(turns: list[Any]) -> list[Message]:
    return [_message(turn) for turn in turns]


def _message(turn: Any) -> Message:
    is_shared = (
        isinstance(turn, dict) and "role" not in turn and ("from" in turn or "value" in turn)
    )
    role_key, content_key = ("from", "value") if is_shared else ("role", "content")
    extras = _extras(turn) if isinstance(turn, dict) else {}
    try:
        role = turn[role_key]
        silent = "tool_calls" in extras or "reasoning_content" in extras
        content = turn.get(content_key, "") if silent else turn[content_key]
    except (KeyError, TypeError) as error:
        given = "" if isinstance(turn, dict) else f": it is {kind_of(turn)}, expected an object"
        raise DataError(f"a turn lacks {role_key!r} or {content_key!r}{given}") from error
    if not isinstance(role, str) or role not in ROLES:
        raise unknown_value("role", role, ROLES, kind=DataError)
    check_message(turn, {role_key, content_key, *EXTRA_KEYS, *REASONING_KEYS, "weight"})
    text = "" if content is None and silent else text_of(content)
    weight = _weight(turn.get("weight"), ROLES[role])
    return {"role": ROLES[role], "content": text, **extras, **weight}


def _extras(turn: Mapping[str, Any]) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    reasoning = [turn[key] for key in REASONING_KEYS if not is_empty(turn.get(key))]
    if reasoning:
        if any(text != reasoning[0] or not isinstance(text, str) for text in reasoning):
            raise DataError("reasoning of a message is something else than one text")
        extras[REASONING_KEYS[0]] = reasoning[0]
    if not is_empty(calls := turn.get("tool_calls")):
        extras["tool_calls"] = _calls(calls)
    for key in ("name", "tool_call_id"):
        if not is_empty(value := turn.get(key)):
            if not isinstance(value, str):
                raise DataError(f"{key} of a message is {kind_of(value)}, expected text")
            extras[key] = value
    return extras


def _calls(calls: Any) -> list[dict[str, Any]]:
    """Tool calls with arguments as objects; OpenAI's API has them as text, and templates write
    them as JSON."""
    if isinstance(calls, str):
        try:
            calls = parse_json(calls)
        except json.JSONDecodeError as error:
            raise DataError(f"tool_calls is text that is not JSON: {error.msg}") from error
    try:
        _expect("it", calls, list)
        return [{**_expect("a call", call, dict), "function": _function(call["function"])}
                for call in calls]  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"tool_calls holds no call: {_in_words(error)}",
            hint='expected {"id", "type", "function": {"name", "arguments"}}, the last one JSON',
        ) from error


def _in_words(error: Exception) -> str:
    return f"it lacks {error}" if isinstance(error, KeyError) else str(error)


def _expect(what: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        expected = "a list" if kind is list else "an object"
        raise TypeError(f"{what} is {kind_of(value)}, expected {expected}")
    return value


def _function(function: dict[str, Any]) -> dict[str, Any]:
    _expect("its function", function, dict)
    name, arguments = function["name"], function["arguments"]
    parsed = parse_json(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(name, str) or not isinstance(parsed, dict):
        given = f"its name is {kind_of(name)} and its arguments are {kind_of(parsed)}"
        raise TypeError(f"{given}, expected text and an object")
    return {**function, "name": name, "arguments": parsed}


def _weight(weight: Any, role: str) -> dict[str, Any]:
    """The key `weight`, as OpenAI defines it: 0 leaves an answer out of training, 1 does not."""
    if weight is None:
        return {}
    if isinstance(weight, str) or weight not in (0, 1):
        raise DataError(f"weight is {weight!r}, expected 0 or 1")
    if role != "assistant" and weight:
        raise DataError(f"weight is 1 in a message of the {role}; only answers are trained on")
    return {"weight": 0} if role == "assistant" and not weight else {}


def _answer(item: dict[str, Any], identity: str | None, number: int, source: str) -> AnswerRow:
    prompt_ids, response_ids = item.get("prompt_ids"), item["response_ids"]
    for name, ids in (("prompt_ids", prompt_ids), ("response_ids", response_ids)):
        if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
            raise DataError(f"{name} must be a list of token ids")
    reason = item.get("finish_reason")
    if reason not in FINISH_REASONS:
        raise DataError(f"finish_reason is {reason!r}; expected one of {FINISH_REASONS}")
    assert isinstance(prompt_ids, list)
    return AnswerRow(
        prompt_ids, response_ids, reason, identity, number, item.get("sampling"), source
    )
