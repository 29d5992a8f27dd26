"""Whether a chat template writes calls as the grammar does, found by rendering one."""

import json
import re
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from medusa_kit.data.template import chat_template, render_text
from medusa_kit.errors import DataError
from medusa_kit.serve.calls.tool_calls import CALL, END

OTHERS = ("<function=", "<arg_key>")  # of templates that write other things between the same tags
NAME, ARGUMENTS = "zucalled", {"zukey": "Zuvalue"}  # which no template writes of its own
BETWEEN = re.compile(rf"{CALL}\s*(.*?)\s*{END}", re.DOTALL)
_known: WeakKeyDictionary[Any, tuple[str, tuple[str, str]]] = WeakKeyDictionary()


def shows_calls(tokenizer: Any) -> bool:
    """Whether the template writes anything for the calls of a message."""
    with_call, without = _rendered(tokenizer)
    return bool(with_call) and with_call != without


def writes_calls(tokenizer: Any) -> bool:
    """Whether the template shows tools, and writes calls of them as the grammar does. One that
    does not show a call's name and arguments may still tell the model how to write them."""
    template = chat_template(tokenizer) or ""
    if CALL not in template or "tools" not in template:
        return False
    text = _rendered(tokenizer)[0]
    if NAME not in text or not all(word in text for word in ARGUMENTS.values()):
        return not any(mark in template for mark in OTHERS)
    match = BETWEEN.search(text, max(0, text.rfind(CALL)))
    with suppress(ValueError):
        return match is not None and json.loads(match[1]) == {"name": NAME, "arguments": ARGUMENTS}
    return False


def _rendered(tokenizer: Any) -> tuple[str, str]:
    """The texts of a question and an answer, with a call and without; empty where the template
    refuses them."""
    template = chat_template(tokenizer) or ""
    known = _known.get(tokenizer)
    if known is None or known[0] != template:
        called = {"id": "zucall000", "type": "function",
                  "function": {"name": NAME, "arguments": ARGUMENTS}}  # fmt: skip
        texts = _text(tokenizer, {"tool_calls": [called]}), _text(tokenizer, {})
        known = _known[tokenizer] = template, texts
    return known[1]


def _text(tokenizer: Any, calls: dict[str, Any]) -> str:
    parameters = {"type": "object", "properties": {}, "required": []}
    function = {"name": "zutool", "description": "", "parameters": parameters}
    question = {"role": "user", "content": "Zuquestion"}
    answer = {"role": "assistant", "content": "", **calls}
    with suppress(DataError):
        tools = [{"type": "function", "function": function}]
        return render_text(tokenizer, [question, answer], tools, ask=False)
    return ""
