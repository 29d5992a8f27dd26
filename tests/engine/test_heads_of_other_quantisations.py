"""Heads find their base in every form: GGUF files of any quantisation, safetensors of any dtype,
loaded light or through transformers. They do not find another model of the same shape."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support.gguf.tiny_files import tiny_model, write_model
from support.small_engines import build_engine, random_heads

from medusa_kit.base.fingerprint import Fingerprint, Match, compare
from medusa_kit.base.gguf import byte_tokenizer
from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.base.origin import HEADS
from medusa_kit.cli.tree_search import check_answers
from medusa_kit.data.answer_settings import write_settings
from medusa_kit.engine import load as loading
from medusa_kit.engine.load import find_heads
from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.heads import load_heads, save_heads
from medusa_kit.infer.cpu.packed_base import base_for_decoding
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.plan import TreePlan, save_plan

QUANTISED = ("Q8_0", "Q4_0", "Q5_1", "F16", "BF16")


def quantised(path: Path, architecture: str, model: Any, kind: str) -> Path:
    """A GGUF file whose matrices are of this type; other rows stay float32."""
    write_model(path, architecture, model)
    number = gguf.GGMLQuantizationType[kind]
    block = gguf.GGML_QUANT_SIZES[number][0]
    matrices = [one for one in gguf.GGUFReader(path).tensors
                if len(one.shape) > 1 and one.shape[0] % block == 0]  # fmt: skip
    assert matrices
    raw = {one.name: (gguf.quants.quantize(np.array(one.data), number), kind) for one in matrices}
    path.unlink()
    write_model(path, architecture, model, more=raw)
    return path


def trained(architecture: str, seed: int = 0) -> Any:
    """A model of 16-bit numbers whose norms and biases are not those of other seeds."""
    model = tiny_model(architecture).bfloat16().float()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            noise = 0.1 * torch.randn(parameter.shape, generator=generator)
            parameter.data.add_(noise).copy_(parameter.bfloat16())
    return model


def in_folder(path: Path, model: Any) -> str:
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3", "phi3", "lfm2"])
def test_all_forms_of_a_model_have_the_same_vectors(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))
    model = trained(architecture)
    forms = [in_folder(tmp_path / "float32", model)]
    forms += [str(quantised(tmp_path / f"{kind}.gguf", architecture, model, kind))
              for kind in QUANTISED]  # fmt: skip
    forms += [in_folder(tmp_path / "bfloat16", trained(architecture).bfloat16())]
    bases = [base_for_decoding(forms[0]), *(load_base_model(name, device="cpu") for name in forms)]
    found = [Fingerprint.parse(base.info.fingerprint) for base in bases]
    assert found[0].vectors is not None
    assert {each.vectors for each in found} == {found[0].vectors}
    assert compare(found[0], found[1]) is Match.SAME  # the same file, light and not
    for other in found[2:4]:
        assert compare(found[0], other) is Match.SAME_NORMS
    of_another = wrap_model(trained(architecture, seed=1)).info.fingerprint
    assert {compare(each, of_another) for each in found} == {Match.OTHER}


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseModel, str], Path]:
    """Puts heads for a base into the package."""
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loading.importlib.resources, "files", lambda _: tmp_path / "package")

    def put(base: BaseModel, name: str) -> Path:
        folder = tmp_path / "package" / "assets" / "heads" / name
        save_heads(random_heads(base), folder)
        return folder

    return put


def test_auto_takes_those_that_fit_best(
    tmp_path: Path,
    shipped: Callable[[BaseModel, str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = trained("llama")
    small = load_base_model(str(quantised(tmp_path / "q.gguf", "llama", model, "Q4_0")))
    whole, other = wrap_model(model), wrap_model(trained("llama", seed=1))
    first = shipped(whole, "a")
    assert find_heads(small, "auto") == first
    assert find_heads(other, "auto") is None
    engine = build_engine(small, heads="auto")
    assert engine.heads_source == str(first)
    told = capsys.readouterr().err
    assert "another quantisation" in told
    assert "text stays exact" in told
    own = shipped(small, "b")
    assert (find_heads(small, "auto"), find_heads(whole, "auto")) == (own, first)
    capsys.readouterr()
    build_engine(small, heads="auto")
    assert "another quantisation" not in capsys.readouterr().err


def merged(model: Any) -> Any:
    """As a LoRA adapter of the attention leaves it."""
    for layer in model.model.layers:
        weight_OI = layer.self_attn.q_proj.weight.data
        weight_OI += 0.1 * torch.randn(len(weight_OI), 1) @ torch.randn(1, weight_OI.shape[1])
    return model


def test_a_merged_adapter_gets_the_heads_of_its_base_and_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, tuned = wrap_model(trained("qwen2")), wrap_model(merged(trained("qwen2")))
    save_heads(random_heads(base), tmp_path)
    assert compare(base.info.fingerprint, tuned.info.fingerprint) is Match.SAME_NORMS
    load_heads(tmp_path, tuned)
    assert "fine-tuned since with norms and biases left alone" in capsys.readouterr().err
    every = merged(trained("qwen2"))
    every.model.layers[0].input_layernorm.weight.data[3] += 0.01
    with pytest.raises(IncompatibleBaseError, match="fingerprint"):
        load_heads(tmp_path, wrap_model(every))


def test_a_tree_and_other_config_words_do_not_stand_in_the_way(
    tmp_path: Path,
    shipped: Callable[[BaseModel, str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The tree beside the heads is of the same base, whose file says its config otherwise."""
    model = trained("llama")
    whole = wrap_model(model)
    whole.config.rope_parameters["rope_theta"] += 1.0
    folder = shipped(whole, "a")
    heads = load_heads(folder, whole)
    about = {**whole.origin, HEADS: heads.digest}
    save_plan(TreePlan.of(CandidateTree([(0,), (1,)])), folder / "tree.json", about)
    whole.config.rope_parameters["rope_theta"] -= 1.0
    small = load_base_model(str(quantised(tmp_path / "q.gguf", "llama", model, "Q8_0")))
    engine = build_engine(small, heads="auto")
    assert engine.tree.num_nodes == 3
    assert "when the config" not in capsys.readouterr().err


def test_medusa_2_and_adapters_are_told_from_their_base() -> None:
    base = wrap_model(trained("llama"))
    own, joint = base.info.fingerprint, base.fingerprint("a variant")
    adapted = str(base.adapted_fingerprint("an adapter"))
    for other in (joint, adapted):
        assert compare(own, other) is compare(other, own) is Match.OTHER


def test_tree_search_says_that_answers_are_those_of_another_quantisation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = trained("llama")
    whole, small = (load_base_model(str(quantised(tmp_path / f"{kind}.gguf", "llama", model, kind)))
                    for kind in ("F16", "Q4_0"))  # fmt: skip
    answers = tmp_path / "answers.jsonl"
    answers.write_text("")
    write_settings(answers, whole.origin)
    check_answers(answers, whole)
    assert "quantisation" not in capsys.readouterr().err
    check_answers(answers, small)
    assert "answers of another quantisation" in capsys.readouterr().err
