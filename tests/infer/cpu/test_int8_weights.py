"""Weights rounded to int8: the arithmetic, the same model in all kernels, answers exact to that
model and never called the checkpoint's."""

import copy
import ctypes
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.small_engines import BUSHY, build_engine, random_heads, random_prompt
from support.tiny_models import tiny_base, tiny_model

import medusa_kit
from medusa_kit.base.files import stored_quantised
from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.bench.oracle import Oracle
from medusa_kit.data.readers import AnswerRow
from medusa_kit.distill.generate import generate_answers
from medusa_kit.engine import load as loading
from medusa_kit.errors import ConfigError
from medusa_kit.heads import save_heads
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.linear import NativeLinear
from medusa_kit.infer.cpu.packed.int8_weights import int8_blocks, with_weights
from medusa_kit.infer.cpu.packed.packing import pack
from medusa_kit.infer.cpu.verifier import NativeVerifier
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.verifier import Verifier
from medusa_kit.tuning.calibrate import calibrate

no_kernels = kernels.load_library() is None
native_only = pytest.mark.skipif(no_kernels, reason="the C++ kernels cannot be built here")
BRANCHING = (-1, 0, 0, 1, 2, 2, 4, 0)


def odd_weights() -> torch.Tensor:
    weight = torch.randn(37, 96, generator=torch.Generator().manual_seed(0))
    weight[3, 32:64] = 0.0  # a group without a scale
    weight[5, :32] = torch.arange(32.0) * 127 / 62  # every second one is halfway between two codes
    weight[6] *= 1e-20
    return weight


def test_rounding_equals_a_plain_reference() -> None:
    weight = odd_weights()
    blocks = int8_blocks(weight)
    for output, row in enumerate(weight.numpy()):
        for group in range(3):
            part = row[32 * group : 32 * (group + 1)]
            scale = np.float32(max(abs(part)) / np.float32(127))
            codes = [round(w / scale) if scale else 0 for w in part]  # ties to even
            assert blocks.scales_OQ[output, group] == scale
            assert blocks.codes_OI[output, 32 * group : 32 * (group + 1)].tolist() == codes
            assert max(map(abs, codes)) == (127 if scale else 0)
            expected = [np.float32(code) * scale for code in codes]
            assert blocks.expand()[output, 32 * group : 32 * (group + 1)].tolist() == expected


@native_only
def test_the_kernels_read_the_same_numbers() -> None:
    """Scales have all 24 bits here, so products of code and scale are rounded too."""
    blocks = int8_blocks(odd_weights())
    matrix = pack(blocks.expand(), None, blocks)
    assert matrix.kind == "int8"
    unit, out = torch.eye(96)[:64], torch.empty(64, 37)
    library = kernels.load_library()
    assert library is not None
    library.mk_linear(ctypes.byref(matrix.struct), unit.data_ptr(), 64, out.data_ptr(), 2)
    assert torch.equal(out, blocks.expand().T[:64])


def family(name: str, **changes: Any) -> BaseModel:
    return wrap_model(tiny_model(name, **changes), None, name)


@native_only
def test_a_step_in_c_equals_torch_on_the_rounded_model() -> None:
    base = family("llama-tied")
    table = base.model.get_input_embeddings().weight
    kept, info = table.clone(), base.info
    engine = build_engine(base, weights="int8")
    native = engine.verifier
    assert isinstance(native, NativeVerifier)
    kinds = [matrix.kind for matrix in native.native.packed.step_matrices]
    assert kinds == ["int8", *["int8", "int8", "int8", "float32"] * 3]  # 48 inputs stay
    assert torch.equal(base.model.get_input_embeddings().weight, kept)
    output = base.output_embedding.weight
    assert torch.equal(output, int8_blocks(kept).expand())
    assert not torch.equal(output, kept)
    assert base.info == replace(info, weights="int8"), "the fingerprint stays"

    prompts, tokens = [random_prompt(n, seed=n) for n in (4, 9)], random_prompt(8, seed=1)
    found = []
    for verifier in (Verifier(base), native):
        cache = verifier.new_cache(2, 32)
        verifier.read_prompts(cache, range(len(prompts)), prompts)
        nodes = Forest.of([tokens] * 2, [BRANCHING] * 2, torch.device("cpu"))
        found.append(verifier.score(cache, nodes, range(2)))
    for part in ("hidden_ND", "logits_NV"):
        torchs, ours = (getattr(scores, part) for scores in found)
        assert torch.allclose(ours, torchs, atol=2e-5 * float(torchs.abs().max()), rtol=0)


WAYS = {
    "C++ steps": ("llama-tied", {}, "C++ ("),
    "C++ linear layers": ("olmo2", {}, "torch, linear layers by C++"),
    "no library": ("llama-tied", {}, "torch"),
    "few linear layers": ("gpt2", {}, "torch"),  # the output embedding alone
}


@pytest.mark.parametrize("way", WAYS)
def test_greedy_answers_are_those_of_the_rounded_model(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    name, changes, by = WAYS[way]
    if by.endswith(("C++", "C++ (")) and no_kernels:
        pytest.skip("the C++ kernels cannot be built here")
    base, untouched = family(name, **changes), family(name, **changes)
    save_heads(random_heads(untouched), tmp_path)  # made for the checkpoint's model
    with_weights(base, "int8")
    assert "which is LOSSY" in capsys.readouterr().err
    oracle = Oracle(wrap_model(copy.deepcopy(base.model), None, name))
    if way == "no library":
        monkeypatch.setenv("MEDUSA_KIT_NATIVE", "0")
        kernels.load_library.cache_clear()
    try:
        engine = build_engine(base, heads=tmp_path, tree=BUSHY, weights="int8")
    finally:
        kernels.load_library.cache_clear()
    assert engine.steps_run_by.startswith(by)
    packed = [m.packed.kind for m in base.model.modules() if isinstance(m, NativeLinear)]
    if by.endswith("C++"):
        assert (packed.count("int8"), packed.count("float32")) == (19, 3)
    prompts = [random_prompt(length, seed=length) for length in (3, 8, 13)]
    for prompt, result in zip(prompts, engine.generate(prompts, max_new_tokens=12), strict=True):
        assert result.token_ids == oracle.generate(prompt, 12)[0]
        assert (result.stats.weights, result.stats.lossy) == ("int8", True)
        assert not torch.equal(oracle.logits(prompt), Oracle(untouched).logits(prompt))


# What is refused.


def no_loading(*args: object, **options: object) -> None:
    raise AssertionError("weights were read")


def quantised_folder(folder: Path) -> str:
    config = tiny_model("llama").config.to_dict()
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int_8"}, "'int_8' is unknown; expected checkpoint or int8\n.*int8"),
        (
            {"weights": "int8", "dtype": "bfloat16"},
            "need dtype float32.*it is bfloat16\nhint: use --d",
        ),
        (
            {"weights": "int8", "device": "cuda"},
            "the device is cuda\nhint: leave out --weights and",
        ),
        ({"weights": "int8", "name": "QUANTISED"}, r"quantised already \(gptq\)\nhint: leave out"),
        ({"weights": "int8", "name": "smollm2-135m-instruct"}, "already .a quantised GGUF file"),
    ],
    ids=["unknown", "dtype", "device", "folder", "embedded"],
)
def test_refused_before_anything_is_loaded(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "base_for_decoding", no_loading)
    if options.get("device") == "cuda":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if options.get("name") == "QUANTISED":
        options = {**options, "name": quantised_folder(tmp_path)}
    with pytest.raises(ConfigError, match=message):
        medusa_kit.load(**{"name": "./nowhere", "device": "cpu", **options})


def test_a_gguf_file_says_whether_it_is_quantised(tmp_path: Path) -> None:
    import gguf

    for kinds, told in ((["F16"], None), (["F16", "Q8_0"], "Q8_0")):
        path = tmp_path / f"{len(kinds)}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for kind in kinds:
            values = np.ones((4, 32), np.float16)
            raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
            writer.add_tensor(kind, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        assert stored_quantised(str(path)) == told


def claimed_quantised(base: BaseModel) -> BaseModel:
    base.info = replace(base.info, quantized=True)
    return base


def in_use(base: BaseModel) -> BaseModel:
    build_engine(base)
    return base


BASES: dict[str, tuple[Callable[[], BaseModel], dict[str, Any], str]] = {
    "dtype": (lambda: tiny_base("llama", dtype=torch.bfloat16), {}, "need dtype float32"),
    "quantised": (lambda: claimed_quantised(tiny_base("llama")), {}, "is quantised already"),
    "in use": (lambda: in_use(tiny_base("llama")), {}, "while an engine decodes with them"),
    "kept layers": (lambda: tiny_base("llama"), {"keep_layers": True}, "was to keep its layers"),
    "nothing fits": (lambda: family("gpt2", n_embd=48), {}, "multiple of 32 inputs"),
    "rounded before": (lambda: with_weights(tiny_base("llama"), "int8"),
                       {"weights": "checkpoint"}, "those of this base are rounded to int8"),
}  # fmt: skip


@pytest.mark.parametrize("case", BASES)
def test_bases_that_cannot_be_had_so(case: str) -> None:
    make, options, message = BASES[case]
    base = make()
    digest = base.weights_digest()
    with pytest.raises(ConfigError, match=message):
        build_engine(base, **{"weights": "int8", **options})
    assert base.weights_digest() == digest, "refused means untouched"


def test_a_rounded_model_gives_no_data_for_heads(tmp_path: Path) -> None:
    base = with_weights(load_base_model("debug-tiny", device="cpu"), "int8")
    with pytest.raises(ConfigError, match="rounded to int8, which is lossy; data holds"):
        generate_answers(base, [], tmp_path / "answers.jsonl")
    row = AnswerRow([5, 6], [7, 8], "stop", 1, "1")
    with pytest.raises(ConfigError, match="rounded to int8, which is lossy; statistics are"):
        calibrate(base, random_heads(base), [row])
    assert not (tmp_path / "answers.jsonl").exists()
