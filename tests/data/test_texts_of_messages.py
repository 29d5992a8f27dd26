"""Where a message should have text, nothing else is written into what the model reads."""

from typing import Any

import pytest

from medusa_kit.base.gguf import CHATML_TEMPLATE, byte_tokenizer
from medusa_kit.data.chat import encode_conversation, encode_prompt
from medusa_kit.data.template import render_text
from medusa_kit.errors import DataError

# Writes whatever it is given, as Jinja does: null as None, lists and objects as Python has them.
WRITES_ALL = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m['role'] ~ '\n' ~ m['content'] ~ '<|im_end|>\n' }}"
    "{% endfor %}"
)
NO_TEXT: dict[str, tuple[Any, str]] = {
    "null": ({"role": "user", "content": None}, "message 2: content is null, expected text"),
    "nothing": ({"role": "user"}, "message 2: content is null, expected text"),
    "a number": ({"role": "user", "content": 5}, "content is a number, expected text"),
    "truth": ({"role": "user", "content": True}, "content is a boolean, expected text"),
    "an object": ({"role": "user", "content": {"text": "x"}}, "content is an object"),
    "bytes": ({"role": "user", "content": b"x"}, "content is bytes, expected text"),
    "a part of null": ({"role": "user", "content": [None]}, "a part that is null"),
    "a picture": ({"role": "user", "content": [{"type": "image"}]}, "a part of type 'image'"),
    "a part without text": ({"role": "user", "content": [{"type": "text"}]}, "part is null"),
    "a role of null": ({"role": None, "content": "x"}, "message 2: role is null, expected text"),
    "a name of a number": ({"role": "user", "content": "x", "name": 5}, "name is a number"),
    "no object": ("x", "message 2: it is text, expected an object"),
    "no object but null": (None, "message 2: it is null, expected an object"),
}


@pytest.mark.parametrize("case", NO_TEXT)
@pytest.mark.parametrize("template", [WRITES_ALL, None])
def test_what_is_no_text_is_refused(template: str | None, case: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    message, reason = NO_TEXT[case]
    with pytest.raises(DataError, match=reason):
        encode_prompt(tokenizer, [{"role": "system", "content": "s"}, message])


def test_parts_of_text_are_joined_whatever_the_template_takes() -> None:
    tokenizer = byte_tokenizer()
    parts = [{"type": "text", "text": "Why"}, {"type": "text", "text": "?"}]
    for template in (CHATML_TEMPLATE, WRITES_ALL, None):
        tokenizer.chat_template = template
        same = [encode_prompt(tokenizer, [{"role": "user", "content": content}])
                for content in ("Why?", parts)]  # fmt: skip
        assert same[0] == same[1]


def test_calls_and_thoughts_may_stand_alone() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] or '-' }}{% endfor %}"
    for alone in ({"tool_calls": []}, {"reasoning_content": "Hm."}):
        message = {"role": "assistant", "content": None, **alone}
        assert render_text(tokenizer, [message]) == "-"


def test_a_template_with_marks_refuses_them_too() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = WRITES_ALL.replace(
        "{{ '<|im_start|>'", "{% generation %}{% endgeneration %}{{ '<|im_start|>'"
    )
    messages = [{"role": "user", "content": 5}, {"role": "assistant", "content": "x"}]
    with pytest.raises(DataError, match="content is a number, expected text"):
        encode_conversation(tokenizer, messages)
