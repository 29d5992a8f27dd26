"""What the kit loads from a GGUF file is the model that was written, whatever transformers alone
would make of it.

Shapes: B batch, T tokens, V vocabulary.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.gguf.tiny_files import MODELS, tiny_model, write_model
from support.small_engines import build_engine
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from medusa_kit.base import families
from medusa_kit.base.families import keep_soft_cap
from medusa_kit.base.gguf import dequantised_folder
from medusa_kit.base.gguf_files import architectures
from medusa_kit.base.gguf_files.config import FREQUENCIES, LLAMA3, LONG, SHORT
from medusa_kit.base.loading import load_base_model
from medusa_kit.errors import CheckpointError
from medusa_kit.infer.model_parts import FAMILIES

pytest.importorskip("gguf")

DOCS = Path(__file__).parents[3] / "docs/models.md"
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))


def logits_BTV(model: Any) -> Tensor:
    ids_BT = torch.randint(0, 250, (2, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids_BT).logits


@pytest.mark.parametrize("architecture", MODELS)
def test_the_model_is_the_one_that_was_written(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    keep_soft_cap(model)
    write_model(tmp_path / "model.gguf", architecture, model)
    base = load_base_model(str(tmp_path / "model.gguf"), device="cpu")
    assert type(base.model) is type(model)
    assert torch.equal(logits_BTV(base.model), logits_BTV(model))


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_as_transformers_loads_it(architecture: str, tmp_path: Path) -> None:
    """These have no metadata that it leaves out."""
    write_model(tmp_path / "model.gguf", architecture, tiny_model(architecture))
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    )
    ours = load_base_model(str(tmp_path / "model.gguf"), device="cpu")
    assert torch.equal(logits_BTV(ours.model), logits_BTV(theirs))


def test_a_llama_that_is_called_mistral(tmp_path: Path) -> None:
    """Then transformers makes it one, and knows no names of tensors for it."""
    model = tiny_model("llama")
    write_model(tmp_path / "model.gguf", "llama", model, {"general.name": "mistral"})
    base = load_base_model(str(tmp_path / "model.gguf"), device="cpu")
    assert base.info.model_type == "mistral"
    assert torch.equal(logits_BTV(base.model), logits_BTV(model))


def test_scaled_positions(tmp_path: Path) -> None:
    """transformers alone ignores all of these, and computes another model."""
    theta = {"rope_theta": 10000.0}
    llama3 = {"rope_type": "llama3", "factor": 32.0, **LLAMA3, **theta}
    halves = 8  # of a head of 16
    long, short = (np.linspace(1, most, halves).astype(np.float32) for most in (4, 2))
    longrope = {
        "rope_type": "longrope", "long_factor": long.tolist(), "short_factor": short.tolist(),
        "original_max_position_embeddings": 64, **theta,
    }  # fmt: skip
    gemma = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", **theta}}
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32}  # fmt: skip
    cases: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
        ("llama", LINEAR, linear, {}),
        ("llama", llama3, {}, {FREQUENCIES: None}),
        ("qwen2", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
                   **theta}, yarn, {}),
        ("gemma3", gemma, linear, {}),
        ("phi3", longrope, {"rope.scaling.original_context_length": 64},
         {LONG: long, SHORT: short}),
    ]  # fmt: skip
    for number, (architecture, rope, values, more) in enumerate(cases):
        model = tiny_model(architecture, rope_parameters=rope, **_more(architecture))
        if FREQUENCIES in more:
            scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, "cpu")
            plain = 10000.0 ** -(torch.arange(0, 2 * halves, 2) / (2 * halves))
            more = {FREQUENCIES: (plain / scaled).numpy()}
        path = tmp_path / f"{number}.gguf"
        named = {f"{architecture}.{key}": value for key, value in values.items()}
        write_model(path, architecture, model, named, more)
        base = load_base_model(str(path), device="cpu")
        expected = logits_BTV(model)
        error = (logits_BTV(base.model) - expected).abs().max()
        ignored = (
            (logits_BTV(tiny_model(architecture, **_more(architecture))) - expected).abs().max()
        )
        assert error < 2e-6, rope
        assert ignored > 2e-5, "it matters"


def _more(architecture: str) -> dict[str, Any]:
    """Gemma's sixth layer is the first that sees everything."""
    if architecture == "gemma3":
        return {"num_hidden_layers": 6}
    return {"original_max_position_embeddings": 64} if architecture == "phi3" else {}


@pytest.mark.parametrize(
    ("values", "more", "leave_out", "message"),
    [
        ({}, {}, ("blk.1.ffn_up.weight",), "lacks 1 tensors of the model, among them"),
        ({}, {"blk.0.attn_q.bias": np.ones(64, np.float32)}, (),
         "holds the tensor 'blk.0.attn_q.bias', which no part of the model 'llama' takes"),
        ({}, {FREQUENCIES: np.linspace(1, 7, 8).astype(np.float32)}, (), "not those of Llama 3"),
        ({"llama.rope.scaling.type": "dynamic"}, {}, (), "positions scaled by 'dynamic'"),
        ({"llama.rope.scaling.high_freq": 4.0}, {}, (), "llama.rope.scaling.high_freq, which is"),
        ({"llama.attention.value_length": 8}, {}, (), "keys of 16 and values of other sizes"),
        ({"llama.rope.dimension_count": 8}, {}, (), "heads of 16 of which 8 numbers are rotated"),
    ],
)  # fmt: skip
def test_what_no_config_describes_is_refused(
    tmp_path: Path,
    values: dict[str, Any],
    more: dict[str, Any],
    leave_out: tuple[str, ...],
    message: str,
) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, "llama", tiny_model("llama"), values, more, leave_out)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        dequantised_folder(path)


def test_the_lists_of_architectures() -> None:
    theirs = {
        name.replace("_moe", "moe").replace("_", "-") for name in GGUF_SUPPORTED_ARCHITECTURES
    }
    ours = {*architectures.READ, *architectures.WITHOUT_TREES}
    # llama.cpp calls Mistral a Llama, and no file says that it is of the architecture mistral.
    assert theirs - {"general", "tokenizer", "umt5", "mistral"} <= ours
    in_cpp = {name.removesuffix("_text") for name in FAMILIES}
    assert set(architectures.IN_CPP) <= in_cpp
    assert in_cpp - {"gemma", "mistral", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"} <= set(
        architectures.IN_CPP
    )
    assert {"mamba", "bloom"} <= set(families.IMPOSSIBLE)


def test_the_table_of_the_docs() -> None:
    section = DOCS.read_text().partition("## GGUF files")[2].partition("\n## ")[0]
    rows = {line.split("|")[1].strip(): set(re.findall(r"`([^`]+)`", line.split("|")[2]))
            for line in section.splitlines() if line.startswith("| ")}  # fmt: skip
    assert rows["in C++"] == set(architectures.IN_CPP)
    assert rows["through torch"] == {*architectures.TESTED, "llama"}
    assert rows["through torch, not tested"] == set(architectures.UNTESTED)
    assert rows["refused"] >= set(architectures.WITHOUT_TREES)
    [other] = [names for row, names in rows.items() if "Hub id" in row]
    assert other == set(architectures.OTHER_FORMS)


@pytest.mark.parametrize(
    ("architecture", "message", "hint"),
    [
        ("qwen35", "transformers does not dequantise", "folder of safetensors, or by its Hub id"),
        ("mamba", "only from the start of a text", "docs/models.md"),
        ("gemma22", "transformers does not dequantise", "is it 'gemma2'"),
        ("grok", "transformers does not dequantise", "original model's folder"),
    ],
)
def test_what_is_refused_says_what_loads(architecture: str, message: str, hint: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        architectures.check_architecture("some.gguf", architecture)
    assert hint in (caught.value.hint or "")


def test_a_file_of_a_model_with_states_decodes(tmp_path: Path) -> None:
    """lfm2: with chains, as transformers decodes the model that was written."""
    model, prompt = tiny_model("lfm2"), [5, 6, 7, 8] * 4
    write_model(tmp_path / "model.gguf", "lfm2", model)
    engine = build_engine(load_base_model(str(tmp_path / "model.gguf"), device="cpu"))
    assert engine.verifier.chains_only
    ids = torch.tensor([prompt])
    asked = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **asked)[0, len(prompt) :]
    engine.base.generation_config.eos_token_id = None
    result = engine.generate(prompt, drafter="suffix", max_new_tokens=20)
    assert result.token_ids == expected.tolist()
    assert len(result.token_ids) == 20
