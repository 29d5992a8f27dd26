"""Quantised bases: trees are verified on them, and what rounding may do is measured, not hidden.

The folder is one that transformers itself quantises, by a method that needs no further package:
8-bit weights, and inputs rounded to fixed steps, where a last bit can become a whole step.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.small_engines import BUSHY, build_engine, random_heads, random_prompt
from support.tiny_models import tiny_model
from torch import Tensor, nn

from medusa_kit.base import loading as base_loading
from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import wrap_model
from medusa_kit.bench.oracle import Oracle
from medusa_kit.bench.verify import verify
from medusa_kit.cli import verify as cli_verify
from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.infer.chains.choice import self_check
from medusa_kit.infer.mkl_linear import PackedLinear, install_packed_linears


def quantise_folder(folder: Path, input_step: float) -> Path:
    """debug-tiny with wider weights, saved in 8 bits; an `input_step` of 0 leaves inputs alone."""
    tiny = load_base_model("debug-tiny", device="cpu")
    tiny.model.save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        weight = 8 * weights[name]
        scale = weight.abs().amax(1, keepdim=True) / 127
        weights[name] = (weight / scale).round().to(torch.int8)
        weights[f"{name}_scale"] = scale
        for side in ("input", "output"):
            step = input_step if side == "input" else 0.0
            weights[name.replace("weight", f"{side}_activation_scale")] = torch.tensor(step)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gemma", "num_bits": 8}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("input_step", [0.0, 0.02])
def test_a_base_that_transformers_quantises(
    tmp_path: Path, input_step: float, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("transformers.integrations.gemma_quant")
    base = load_base_model(str(quantise_folder(tmp_path, input_step)), device="cpu")
    assert base.info.quantized
    engine = build_engine(base, heads=random_heads(base), tree=BUSHY)
    kinds = {type(m) for n, m in base.model.named_modules() if n.endswith("_proj")}
    assert [kind.__name__ for kind in kinds] == ["QuantizedLinear"]
    prompts: Any = [random_prompt(length, length) for length in (2, 9, 17)]
    report = verify(engine, Oracle.beside(base), prompts, max_new_tokens=16)
    assert report.rounding_tolerance == engine.check.rounding_tolerance > 0
    assert report.bugs == []
    if input_step == 0.0:
        assert report.identical == 3
        assert report.rounding_tolerance < 1e-4
    cli_verify._print(engine, {"greedy": report})
    said = capsys.readouterr()
    assert "the base is quantised" in said.err
    assert f"tolerance ({report.rounding_tolerance:.1e}) may flip" in " ".join(said.err.split())
    out = " ".join(said.out.split())
    assert ("passed: all 3 answers are identical" in out) == (report.identical == 3)


class EightBitLinear(nn.Module):
    """What a quantiser puts in a Linear's place; no nn.Linear, and no `weight`."""

    def __init__(self, linear: nn.Linear, shared_step: bool) -> None:
        super().__init__()
        self.shared_step = shared_step
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale.detach())
        self.register_buffer("packed", (linear.weight / scale).detach().round().to(torch.int8))

    def forward(self, x_XD: Tensor) -> Tensor:
        if self.shared_step:
            step = x_XD.abs().max() / 127
            x_XD = (x_XD / step).round() * step
        return nn.functional.linear(x_XD, self.packed * self.scale)


def eight_bit_model(shared_step: bool) -> Any:
    model = tiny_model("llama")
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and name != "lm_head":
                setattr(parent, name, EightBitLinear(child, shared_step))
    return model


def test_layers_that_are_no_linear_are_verified_and_left_alone() -> None:
    engine = build_engine(wrap_model(eight_bit_model(False)))
    assert engine.check.relative_error < 1e-4
    engine.heads = random_heads(engine.base)
    engine.use_tree(BUSHY)
    prompt: Any = random_prompt(7, 1)
    oracle = Oracle(wrap_model(eight_bit_model(False)))
    expected, _ = oracle.generate(prompt, 20)
    assert engine.generate(prompt, max_new_tokens=20).token_ids == expected
    assert len(set(expected)) > 4
    packed = [n for n, m in engine.base.model.named_modules() if isinstance(m, PackedLinear)]
    assert set(packed) <= {"lm_head"}


def test_a_step_shared_by_all_tokens_of_a_forward_is_refused() -> None:
    """Then what a token becomes depends on the others beside it, siblings and other rows too."""
    with pytest.raises(IncompatibleBaseError, match=r"off by \d"):
        self_check(wrap_model(eight_bit_model(True)))


def test_packing_leaves_weights_alone_that_only_claim_to_be_float32() -> None:
    class Claiming(Tensor):
        """As torchao's: a subclass of a tensor inside a plain nn.Linear."""

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    claiming = torch.randn(4, 4).as_subclass(Claiming)
    del model[0].weight
    model[0].weight = claiming
    install_packed_linears(model)
    assert type(model[0]) is nn.Linear
    assert isinstance(model[1], PackedLinear) == torch.backends.mkl.is_available()


def test_a_quantised_model_that_cannot_be_moved_stays_where_it_is() -> None:
    class Fixed:
        is_quantized = True

        def to(self, device: torch.device) -> None:
            raise ValueError("`.to` is not supported")

    fixed = Fixed()
    assert base_loading._on_device(fixed, torch.device("cpu")) is fixed
    fixed.is_quantized = False
    with pytest.raises(ValueError, match="not supported"):
        base_loading._on_device(fixed, torch.device("cpu"))
