"""Each family of the table of verified models, by name: its form of calls and of thoughts."""

import re
from pathlib import Path

import pytest
from support.serving.tagged import tagged_tokenizer
from support.text.family_forms import CALLING, FAMILY_FORMS, THINKING, UNREAD

from medusa_kit.data.template import render_text
from medusa_kit.serve.calls.call_form import HERMES
from medusa_kit.serve.calls.reading import Reading, reader_of
from medusa_kit.serve.calls.reasoning import reasoning_of
from medusa_kit.serve.calls.template_calls import form_of
from medusa_kit.serve.calls.tool_calls import read_answer

ROOT = Path(__file__).parents[3]
QUESTION = {"role": "user", "content": "ab?"}


def verified() -> list[str]:
    section = (ROOT / "docs" / "models.md").read_text().split("## Verified")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return sorted({name for row in rows for name in re.findall("`([a-z0-9_]+)`", row)})


def test_the_table_names_these_families() -> None:
    assert verified() == sorted(FAMILY_FORMS)


@pytest.mark.parametrize("family", verified())
def test_calls_of_a_verified_family(family: str) -> None:
    forms = FAMILY_FORMS[family]
    if forms.calls is None:
        template = UNREAD[forms.unread or "none"]
        assert form_of(tagged_tokenizer(template=template)) == HERMES
        return
    form = form_of(tagged_tokenizer(template=CALLING[forms.calls]))
    assert form.taken is not None
    if form.channels is not None:
        text = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>" + '{"x": "a"}'
    else:
        text = form.written([("f", '{"x": "a"}')])
    reasoning = form.channels and reasoning_of(tagged_tokenizer(template=CALLING[forms.calls]), "")
    told = read_answer(text, "stop", reader_of(Reading(True, reasoning, form)))
    assert told.finish_reason == "tool_calls"
    (call,) = told.tool_calls
    assert call["function"] == {"name": "f", "arguments": '{"x": "a"}'}


@pytest.mark.parametrize("family", [name for name in verified() if FAMILY_FORMS[name].thoughts])
def test_thoughts_of_a_verified_family(family: str) -> None:
    thinking = THINKING[FAMILY_FORMS[family].thoughts or ""]
    tokenizer = tagged_tokenizer(special=thinking.added, template=thinking.template)
    prompt = render_text(tokenizer, [QUESTION])
    reader = reader_of(Reading(False, reasoning_of(tokenizer, prompt)))
    told = read_answer(thinking.writes, "stop", reader)
    assert (told.reasoning, told.content) == ("Let me see.", "It is.")
