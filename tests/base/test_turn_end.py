"""The token that ends turns, in templates in the style of families, and the stops of a base."""

from pathlib import Path
from typing import Any

import pytest
from support.gguf.tiny_gguf import write_gguf
from support.tiny_models import COMMON, tiny_model

from medusa_kit.base.gguf import CHATML_TEMPLATE, byte_tokenizer
from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.base.tokenizer.turn_end import end_of_turn
from medusa_kit.data.chat import encode_conversation
from medusa_kit.infer.cpu.packed_base import base_for_decoding

EACH, DONE = "{% for m in messages %}", "{% endfor %}"
SAID = "{% if m['role'] == 'assistant' %}"
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
ALWAYS_ASKED = CHATML_TEMPLATE.split("{% if add_generation_prompt")[0] + "<|im_start|>assistant\n"


def asking(opener: str) -> str:
    return "{% if add_generation_prompt %}{{ '" + opener + "' }}{% endif %}"


GLM = "{{ '[gMASK]<sop>' }}" + EACH + "{{ '<|' + m['role'] + '|>\n' + m['content'] }}" + DONE
INST = (
    "{{ '<s>' }}" + EACH + "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ m['content'] + '</s>' }}{% endif %}" + DONE
)
BETWEEN = (
    EACH + "{{ '<|start|>' + m['role'] + '\n' + m['content'] }}"
    "{% if not loop.last %}{{ '<|fin|>' }}{% endif %}" + DONE
)
TEMPLATES = {  # name: (template, special tokens, the end of turn)
    "chatml": (CHATML_TEMPLATE, "", "<|im_end|>"),
    "chatml, always asked": (ALWAYS_ASKED, "", "<|im_end|>"),
    "chatml, only behind a system message": (
        NO_SYSTEM.replace("==", "!=") + CHATML_TEMPLATE, "", "<|im_end|>",
    ),
    "phi-3": (
        EACH + "{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}" + DONE
        + "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}"
        "{% endif %}",
        "<|user|> <|assistant|> <|system|> <|end|> <|endoftext|>", "<|end|>",
    ),
    "gemma": (
        NO_SYSTEM + "{{ '<bos>' }}" + EACH
        + "{{ '<start_of_turn>' + m['role'] + '\n' + m['content'] | trim + '<end_of_turn>\n' }}"
        + DONE + asking("<start_of_turn>model\n"),
        "<bos> <start_of_turn> <end_of_turn>", "<end_of_turn>",
    ),
    "llama 3": (
        "{{ '<|begin|>' }}" + EACH + "{{ '<|header|>' + m['role'] + '<|/header|>\n\n' }}"
        "{{ m['content'] + '<|eot_id|>' }}" + DONE + asking("<|header|>assistant<|/header|>\n\n"),
        "<|begin|> <|header|> <|/header|> <|eot_id|> <|eom_id|>", "<|eot_id|>",
    ),
    "mistral": (INST, "<s> </s> [INST] [/INST]", "</s>"),
    "mistral, answers last refused": (
        "{% if messages[-1]['role'] != 'user' %}{{ raise_exception('no') }}{% endif %}" + INST,
        "<s> </s> [INST] [/INST]", "</s>",
    ),
    "deepseek": (
        "{{ '<|begin|>' }}" + EACH + SAID + "{{ '<|A|>' + m['content'] + '<|fin|>' }}"
        "{% else %}{{ '<|U|>' + m['content'] }}{% endif %}" + DONE + asking("<|A|>"),
        "<|begin|> <|U|> <|A|> <|fin|>", "<|fin|>",
    ),
    "cohere": (
        "{{ '<BOS>' }}" + EACH + "{{ '<|START|>' }}" + SAID + "{{ '<|BOT|>' }}{% else %}"
        "{{ '<|USER|>' }}{% endif %}{{ m['content'] + '<|END|>' }}" + DONE
        + asking("<|START|><|BOT|>"),
        "<BOS> <|START|> <|BOT|> <|USER|> <|END|>", "<|END|>",
    ),
    "harmony, other ends within a talk": (
        EACH + "{{ '<|start|>' + m['role'] + '<|message|>' + m['content'] }}"
        "{% if loop.last and m['role'] == 'assistant' %}{{ '<|return|>' }}{% else %}{{ '<|end|>' }}"
        "{% endif %}" + DONE + asking("<|start|>assistant"),
        "<|start|> <|message|> <|end|> <|return|>", "<|return|>",
    ),
    "vicuna": (
        "{{ '<s>' }}" + EACH + "{% if m['role'] == 'user' %}{{ 'USER: ' + m['content'] }}"
        "{% else %}{{ ' ASSISTANT: ' + m['content'] + '</s>' }}{% endif %}" + DONE
        + asking(" ASSISTANT:"),
        "<s> </s>", "</s>",
    ),
    "olmo, the end of text begins texts": (
        "{{ '<|text|>' }}" + EACH + "{{ m['role'] + ': ' + m['content'] }}" + SAID
        + "{{ '<|text|>' }}{% endif %}" + DONE + asking("assistant: "),
        "<|text|>", "<|text|>",
    ),
    "thoughts are opened": (
        EACH + "{{ '<|start|>' + m['role'] }}" + SAID + "{{ '<think></think>' }}{% endif %}"
        "{{ m['content'] + '<|fin|>' }}" + DONE + asking("<|start|>assistant<think>"),
        "<|start|> <think> </think> <|fin|>", "<|fin|>",
    ),
    "the last turn stays open": (BETWEEN, "<|start|> <|fin|>", "<|fin|>"),
    "the last turn stays open, a system message by default": (
        "{% if messages[0]['role'] != 'system' %}{{ '<|start|>system\nBe ab.<|fin|>' }}{% endif %}"
        + BETWEEN,
        "<|start|> <|fin|>", "<|fin|>",
    ),
    "glm: what follows opens the next turn": (
        GLM + asking("<|assistant|>"), "[gMASK] <sop> <|user|> <|assistant|>", None,
    ),
    "glm, always asked": (GLM + "<|assistant|>\n", "[gMASK] <sop> <|user|> <|assistant|>", None),
    "one opener for all": (
        EACH + "{{ '<|start|>' + m['role'] + '\n' + m['content'] }}" + DONE
        + asking("<|start|>assistant\n"),
        "<|start|>", None,
    ),
    "text that is no token": (
        EACH + "{{ m['role'] + ': ' + m['content'] + '<fin>\n' }}" + DONE, "<|start|>", None,
    ),
    "answers are left out": (EACH + "{{ m['role'] + '<|fin|>' }}" + DONE, "<|fin|>", None),
    "refusing": ("{{ raise_exception('never') }}", "", None),
    "no template at all": (None, "<|fin|>", None),
    "no jinja": ("{% for %}", "<|fin|>", None),
}  # fmt: skip


def tokenizer_with(template: Any, special: str = "", plain: str = "") -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": special.split()}, replace_extra_special_tokens=False
    )
    tokenizer.add_tokens(plain.split())
    tokenizer.chat_template = template
    return tokenizer


def end_in(tokenizer: Any) -> str | None:
    found = end_of_turn(tokenizer)
    return None if found is None else tokenizer.convert_ids_to_tokens(found)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_end_of_a_turn(name: str) -> None:
    template, special, end = TEMPLATES[name]
    assert end_in(tokenizer_with(template, special)) == end


def test_an_added_token_that_is_not_special_ends_turns_too() -> None:
    template = CHATML_TEMPLATE.replace("<|im_end|>", "<|fin|>")
    assert end_in(tokenizer_with(template, plain="<|fin|> \n\n")) == "<|fin|>"


def test_a_template_set_later_is_looked_at_anew() -> None:
    tokenizer = tokenizer_with(CHATML_TEMPLATE, "<|fin|>")
    assert end_in(tokenizer) == "<|im_end|>"
    tokenizer.chat_template = CHATML_TEMPLATE.replace("<|im_end|>", "<|fin|>")
    assert end_in(tokenizer) == "<|fin|>"


def folder_of(path: Path, stops: Any, rows: int = 320) -> tuple[str, Any]:
    """A folder whose generation config has these stops, and whose turns end with <|fin|>."""
    tokenizer = tokenizer_with(CHATML_TEMPLATE.replace("<|im_end|>", "<|fin|>"), "<|fin|>")
    model = tiny_model("llama", vocab_size=rows)
    model.generation_config.eos_token_id = stops
    for part in (model, tokenizer):
        part.save_pretrained(path)
    return str(path), tokenizer


@pytest.mark.parametrize("load", [load_base_model, base_for_decoding])
@pytest.mark.parametrize("stops", [2, [2, 7], None])
def test_folders_get_the_end_of_turn_that_their_files_lack(
    load: Any, stops: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, tokenizer = folder_of(tmp_path, stops)
    base: BaseModel = load(name, device="cpu")
    fin, end = tokenizer.convert_tokens_to_ids("<|fin|>"), tokenizer.eos_token_id
    own = {2: {2}, None: {end}}.get(stops if not isinstance(stops, list) else 0, {2, 7})
    assert base.stop_token_ids == own | {fin}
    said = [line for line in capsys.readouterr().err.splitlines() if "answers end with" in line]
    assert len(said) == 1
    assert f"'<|fin|>' ({fin})" in said[0]
    base.generation_config.eos_token_id = 5  # which has the last word
    assert base.stop_token_ids == {5}


def test_nothing_is_said_where_the_files_name_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fin = tokenizer_with(CHATML_TEMPLATE, "<|fin|>").convert_tokens_to_ids("<|fin|>")
    base = load_base_model(folder_of(tmp_path, [2, fin])[0], device="cpu")
    assert base.stop_token_ids == {2, fin}
    assert "answers end with" not in capsys.readouterr().err


def test_an_end_that_the_model_has_no_row_for_is_left_out() -> None:
    model = tiny_model("llama")
    base = wrap_model(model, tokenizer_with(TEMPLATES["phi-3"][0], TEMPLATES["phi-3"][1]))
    assert base.stop_token_ids == {2}
    assert COMMON["vocab_size"] < len(base.tokenizer)


def test_what_is_trained_on_ends_where_answers_do() -> None:
    """Phi-3's template ends the whole text once more, behind the end of the turn."""
    tokenizer = tokenizer_with(*TEMPLATES["phi-3"][:2])
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    example = encode_conversation(tokenizer, talk)
    pairs = zip(example.input_ids, example.loss_mask, strict=True)
    assert tokenizer.decode([i for i, trained in pairs if trained]) == "Hello!<|end|>"


@pytest.mark.parametrize("load", [load_base_model, base_for_decoding])
def test_a_gguf_files_ends_of_text_turn_and_message_stop(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))
    ends = {"eot": 257, "eom": 258}
    for found in (ends, {"eom": 258}, {}):
        values = {f"tokenizer.ggml.{name}_token_id": i for name, i in found.items()}
        path = write_gguf(tmp_path / f"{len(found)}.gguf", values=values)
        base = load(str(path), device="cpu")
        assert base.stop_token_ids == {256, *found.values()}


def test_a_familys_default_end_of_text_is_not_a_gguf_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama's is token 2, which may be a letter."""
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("gguf.GGUFWriter.add_eos_token_id", lambda *_: None)
    path = write_gguf(tmp_path / "model.gguf", values={"tokenizer.ggml.eot_token_id": 257})
    assert load_base_model(str(path), device="cpu").stop_token_ids == {257}
