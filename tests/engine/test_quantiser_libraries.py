"""Bases that torchao, bitsandbytes and gptqmodel quantise, read by transformers, on a CPU.

Each test skips itself where its library is not installed. Greedy answers are held against plain
transformers generate on the same quantised folder.
"""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.changes import answer, made, plain
from support.small_engines import BUSHY, build_engine, lively_chat_base, random_heads, random_prompt
from support.tiny_models import tiny_model
from torch import Tensor, nn

from medusa_kit.base.files import stored_quantised
from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import wrap_model
from medusa_kit.bench.breakdown import _weight_bytes
from medusa_kit.bench.oracle import Oracle
from medusa_kit.bench.verify import verify
from medusa_kit.cli.chat import notes
from medusa_kit.errors import CheckpointError, ConfigError, IncompatibleBaseError
from medusa_kit.infer.cpu.linear import make_native
from medusa_kit.infer.cpu.packed.describe import describe
from medusa_kit.infer.cpu.packed.int8_weights import check_before_loading
from medusa_kit.infer.mkl_linear import plain_linears
from medusa_kit.infer.model_parts import Unsupported

GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def torchao(kind: str) -> Any:
    import torchao.quantization
    from transformers import TorchAoConfig

    return TorchAoConfig(getattr(torchao.quantization, kind)())


def bitsandbytes(**chosen: Any) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**chosen)


def in_16_bits(name: str) -> bool:
    """Whether products are in bfloat16 whatever the dtype: those of bitsandbytes' four bits are, on
    a processor that has them."""
    if not name.startswith("bitsandbytes, bits 4"):
        return False
    from bitsandbytes.functional import has_avx512bf16

    return bool(has_avx512bf16())


def folder_of(place: Path, make_config: Callable[[], Any] | None = None) -> Path:
    """A lively debug-tiny in `place`, quantised by transformers."""
    from transformers import AutoModelForCausalLM

    lively = lively_chat_base()
    lively.tokenizer.save_pretrained(place)
    lively.model.save_pretrained(place)
    if make_config is not None:
        model = AutoModelForCausalLM.from_pretrained(
            place, quantization_config=make_config(), dtype=torch.float32
        )
        model.save_pretrained(place)
    return place


ONLY_WEIGHTS, INPUTS_TOO = True, False
FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
METHODS = {
    "torchao, Int8WeightOnlyConfig": (lambda: torchao("Int8WeightOnlyConfig"), ONLY_WEIGHTS),
    "torchao, Int8DynamicActivationInt8WeightConfig": (
        lambda: torchao("Int8DynamicActivationInt8WeightConfig"), INPUTS_TOO),
    "bitsandbytes, bits 8": (lambda: bitsandbytes(load_in_8bit=True), INPUTS_TOO),
    "bitsandbytes, bits 4 (nf4)": (
        lambda: bitsandbytes(**FOUR_BITS, bnb_4bit_compute_dtype=torch.float32), ONLY_WEIGHTS),
}  # fmt: skip
CASES = [pytest.param(name, marks=needs(name.split(",")[0])) for name in METHODS]


@pytest.mark.parametrize("name", CASES)
def test_a_quantised_folder_decodes_as_plain_transformers_does(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture
) -> None:
    make_config, only_weights = METHODS[name]
    base = load_base_model(str(folder_of(tmp_path, make_config)), device="cpu")
    assert base.info.quantized
    assert base.info.quantization == name
    assert base.info.num_parameters == load_base_model("debug-tiny").info.num_parameters
    assert stored_quantised(str(tmp_path)) == name.split(",")[0]
    kinds = kinds_of_layers(base.model)
    engine = build_engine(base, heads=random_heads(base), tree=BUSHY)
    assert kinds_of_layers(base.model) == kinds
    assert "quantised" in engine.steps_run_by

    oracle = Oracle.beside(base)
    prompts: Any = [random_prompt(length, length) for length in (2, 9, 17)]
    report = verify(engine, oracle, prompts, max_new_tokens=16)
    assert report.bugs == []
    if only_weights and not in_16_bits(name):
        assert report.identical == 3
        assert engine.check.relative_error < 1e-4
    assert base.weights_digest() == oracle.base.weights_digest()

    stats = engine.generate(prompts[0], max_new_tokens=4).stats
    assert (stats.quantization, stats.rounding_tolerance) == (name, engine.check.rounding_tolerance)
    assert notes.rule_note(stats) == f"; base quantised ({name})"
    assert name in notes.weights_note(engine)
    said = notes.quantised_note(engine)
    assert said is not None
    assert f"the rounding tolerance ({engine.check.rounding_tolerance:.1e}) may flip" in said
    assert "torch." not in capsys.readouterr().err  # e.g. a line for every product
    with pytest.raises(ConfigError, match="is quantised already"):
        check_before_loading("int8", str(tmp_path), "float32", "cpu", None)


def kinds_of_layers(model: Any) -> set[tuple[str, str]]:
    layers = [module for name, module in model.named_modules() if name.endswith("_proj")]
    return {(type(layer).__name__, type(layer.weight).__name__) for layer in layers}


def torchao_in_memory(model: Any, of: Any) -> Any:
    """Without transformers, which then does not mark the model as quantised."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(of, Int8WeightOnlyConfig())
    return model


@needs("torchao")
def test_weights_that_claim_to_be_float32_are_found_out() -> None:
    plain, model = tiny_model("llama-tied"), tiny_model("llama-tied")
    describe(plain)  # C++ knows the family
    torchao_in_memory(model, model.model)
    with pytest.raises(Unsupported, match="weights are quantised"):
        describe(model)
    base = wrap_model(model)
    assert base.info.quantization == "weights of Int8Tensor"
    assert plain_linears(model) == [model.lm_head]
    with pytest.raises(ConfigError, match="is quantised already"):
        build_engine(base, weights="int8")

    engine = build_engine(base, heads=random_heads(base), tree=BUSHY)
    prompt: Any = random_prompt(7, 1)
    expected, _ = Oracle(wrap_model(torchao_in_memory(plain, plain.model))).generate(prompt, 20)
    assert engine.generate(prompt, max_new_tokens=20).token_ids == expected
    numbers = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))
    left = 4 * model.lm_head.weight.numel()
    assert numbers < _weight_bytes(engine) - left < 2 * numbers  # eight bits, and their scales


@needs("torchao")
def test_a_loaded_model_that_is_quantised_then() -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    engine = build_engine(wrap_model(made("llama-tied")))
    before, other = answer(engine), made("llama-tied")
    for model in (engine.base.model, other):
        model.model.layers[0].mlp.down_proj.weight.data.mul_(-1.5)
        quantize_(model.model, Int8WeightOnlyConfig())
    assert answer(engine) == plain(other) != before


@needs("torchao")
def test_a_quantised_output_embedding_is_refused() -> None:
    model = tiny_model("llama")
    torchao_in_memory(model, model)
    with pytest.raises(IncompatibleBaseError, match="no output embedding in floating point"):
        wrap_model(model)


def test_layers_whose_own_forward_rounds_are_left_alone() -> None:
    """compressed-tensors does so: a plain Linear, plain weights, and a forward of its own."""
    model = tiny_model("llama-tied")
    rounding = model.model.layers[0].mlp.up_proj
    plain_forward = rounding.forward
    rounding.forward = lambda x_XD: plain_forward(x_XD.round(decimals=3))
    with pytest.raises(Unsupported, match="a module with a forward of its own"):
        describe(model)
    exchangeable = plain_linears(model)
    assert model.model.layers[0].mlp.down_proj in exchangeable
    assert rounding not in exchangeable
    assert not make_native(rounding)


def test_a_base_that_rounds_coarsely_is_refused_with_its_own_rounding() -> None:
    class Rounding(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x_XD: Tensor) -> Tensor:
            step = x_XD.abs().max() / 7  # of all tokens
            return self.linear((x_XD / step).round() * step)

    model = tiny_model("llama")
    model.is_quantized = True
    for layer in model.model.layers:
        layer.mlp.down_proj = Rounding(layer.mlp.down_proj)
    with pytest.raises(IncompatibleBaseError, match="with and without a cache") as raised:
        build_engine(wrap_model(model))
    assert raised.value.hint is not None
    assert "quantise its weights alone" in raised.value.hint


def with_method(folder: Path, **config: Any) -> str:
    place = folder / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"quantization_config": config}))
    return str(folder)


MISSING = [("gptq", "optimum gptqmodel"), ("awq", "gptqmodel")]


@pytest.mark.skipif(importlib.util.find_spec("gptqmodel") is not None, reason="it is installed")
@pytest.mark.parametrize(("method", "packages"), MISSING)
def test_a_missing_package_is_named(tmp_path: Path, method: str, packages: str) -> None:
    name = with_method(folder_of(tmp_path), quant_method=method, bits=4, group_size=GROUP)
    with pytest.raises(CheckpointError, match=r"pip install") as raised:
        load_base_model(name, device="cpu")
    assert raised.value.hint == (
        f"the model is quantised ({method}); for transformers to read it: pip install {packages}"
    )


def test_an_unknown_method_is_refused_instead_of_ignored(tmp_path: Path) -> None:
    """transformers would load it, with random numbers for the weights that it does not find."""
    name = with_method(folder_of(tmp_path), quant_method="rot13")
    with pytest.raises(IncompatibleBaseError, match="quantised by 'rot13'"):
        load_base_model(name, device="cpu")


@needs("gptqmodel", "optimum")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_four_bits_that_gptqmodel_reads(tmp_path: Path, method: str) -> None:
    name = packed_folder(tmp_path, method)
    base = load_base_model(name, device="cpu")
    assert base.info.quantization == f"{method}, bits 4"
    engine = build_engine(base, heads=random_heads(base), tree=BUSHY)
    prompts: Any = [random_prompt(length, length) for length in (2, 9, 17)]
    report = verify(engine, Oracle.beside(base), prompts, max_new_tokens=16)
    assert report.identical == 3
    assert engine.check.relative_error < 1e-4


def packed_folder(folder: Path, method: str) -> str:
    """The lively debug-tiny in groups of symmetric four-bit numbers, as `method` lays them out."""
    weights, packed = load_file(folder_of(folder) / "model.safetensors"), {}
    for name, weight in weights.items():
        packed.update(four_bits(name.removesuffix(".weight"), weight, method)
                      if name.endswith("_proj.weight") else {name: weight})  # fmt: skip
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    kind = {"gptq": {"sym": True, "desc_act": False}, "awq": {"zero_point": True}}[method]
    return with_method(folder, quant_method=method, bits=4, group_size=GROUP, **kind)


def four_bits(name: str, weight_OI: Tensor, method: str) -> dict[str, Tensor]:
    groups_QGO = weight_OI.T.unflatten(0, (-1, GROUP))
    scales_QO = groups_QGO.abs().amax(1) / 7
    codes_IO = ((groups_QGO / scales_QO[:, None]).round() + 8).flatten(0, 1).long()
    zeros_QO = torch.full(scales_QO.shape, 8)
    found = {f"{name}.scales": scales_QO.half()}
    if method == "awq":
        found[f"{name}.qweight"] = words(codes_IO, AWQ_ORDER)
        return found | {f"{name}.qzeros": words(zeros_QO, AWQ_ORDER)}
    found[f"{name}.qweight"] = words(codes_IO.T, range(8)).T.contiguous()
    found[f"{name}.g_idx"] = torch.arange(len(codes_IO), dtype=torch.int32) // GROUP
    return found | {f"{name}.qzeros": words(zeros_QO - 1, range(8))}


def words(codes_XY: Tensor, order: Any) -> Tensor:
    """Eight neighbours in each 32-bit word, the one named first in its lowest bits."""
    eights_XY8 = codes_XY.unflatten(1, (-1, 8))
    word_XY = sum(eights_XY8[..., place] << (4 * i) for i, place in enumerate(order))
    return word_XY.to(torch.int32).contiguous()  # type: ignore[union-attr]
