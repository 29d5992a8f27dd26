"""Chat templates that show a list of parts alone get text so; others get text."""

import json
from pathlib import Path
from typing import Any

import pytest

from medusa_kit.base.gguf import CHATML_TEMPLATE, byte_tokenizer
from medusa_kit.base.remembered_configs import read_tokenizer
from medusa_kit.base.tokenizer.content_parts import takes_parts_alone
from medusa_kit.base.tokenizer.turn_end import end_of_turn
from medusa_kit.data.chat import encode_conversation
from medusa_kit.data.template import render_text
from medusa_kit.errors import CheckpointError

HEAD = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
TAIL = (
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PARTS = (
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<image>' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
)
FIRST = "{% if message['content'][0]['type'] == 'image' %}{{ '<image>' }}{% endif %}"
CHOSEN = (
    "{{ message['content'] | selectattr('type', 'equalto', 'text')"
    " | map(attribute='text') | join('') }}"
)
EITHER = "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
# As SmolVLM's, as Llava's, as Gemma 3's and Qwen2.5-VL's, and ones of text.
TEMPLATES = {
    "parts": (HEAD + FIRST + PARTS + TAIL, True),
    "filtered parts": (HEAD + CHOSEN + TAIL, True),
    "either": (HEAD + EITHER + PARTS + "{% endif %}" + TAIL, False),
    "text": (CHATML_TEMPLATE, False),
    "none": (None, False),
}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is it?"},
    {"role": "assistant", "content": "A cloud."},
]


def tokenizer_with(template: str | None) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_takes(name: str) -> None:
    template, alone = TEMPLATES[name]
    assert takes_parts_alone(tokenizer_with(template)) == alone


@pytest.mark.parametrize("name", [name for name, (text, _) in TEMPLATES.items() if text])
def test_all_show_the_same_text(name: str) -> None:
    tokenizer, plain = tokenizer_with(TEMPLATES[name][0]), tokenizer_with(CHATML_TEMPLATE)
    assert render_text(tokenizer, TALK) == render_text(plain, TALK)
    assert end_of_turn(tokenizer) == end_of_turn(plain)
    assert encode_conversation(tokenizer, TALK) == encode_conversation(plain, TALK)


def test_another_template_is_looked_at_anew() -> None:
    tokenizer = tokenizer_with(TEMPLATES["parts"][0])
    assert takes_parts_alone(tokenizer)
    tokenizer.chat_template = CHATML_TEMPLATE
    assert not takes_parts_alone(tokenizer)


def test_a_template_that_only_the_processor_has(tmp_path: Path) -> None:
    tokenizer_with(None).save_pretrained(tmp_path)
    assert not read_tokenizer(str(tmp_path)).chat_template
    template = TEMPLATES["parts"][0]
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    for _ in range(2):  # read, and as it is remembered
        assert read_tokenizer(str(tmp_path)).chat_template == template
    tokenizer_with(CHATML_TEMPLATE).save_pretrained(tmp_path)
    assert read_tokenizer(str(tmp_path)).chat_template == CHATML_TEMPLATE
    for damaged in ("{", "[]", '{"chat_template": 5}'):
        tokenizer_with(None).save_pretrained(tmp_path / "damaged")
        (tmp_path / "damaged" / "chat_template.json").write_text(damaged)
        with pytest.raises(CheckpointError, match=r"chat_template\.json "):
            read_tokenizer(str(tmp_path / "damaged"))
