"""Heads stored in eight bits: what a file holds, what is read of it, and how it can be damaged."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.small_engines import random_heads
from support.tiny_models import tiny_base
from torch import Tensor

from medusa_kit.base.model import BaseModel
from medusa_kit.errors import CheckpointError
from medusa_kit.heads import load_heads, save_heads
from medusa_kit.heads.checkpoint import read_config, stored_digest
from medusa_kit.heads.convert import convert
from medusa_kit.heads.weights_base import metadata_of
from medusa_kit.infer.cpu.packed.int8_weights import int8_blocks

MATRIX = "recurrent.input.weight"
SCALES = f"{MATRIX}_scale"


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return tiny_base("llama")


@pytest.mark.parametrize("projection", ["shared", "own", "reduced"])
@pytest.mark.parametrize("kind", ["medusa", "hydra", "recurrent"])
def test_numbers_are_those_of_a_plain_reference(
    base: BaseModel, tmp_path: Path, kind: str, projection: str
) -> None:
    """Matrices within a step of 1/127 of their group's largest number, all else as it was."""
    ids = torch.arange(1, 60, 2) if projection == "reduced" else None
    heads = random_heads(base, kind=kind, projection=projection, reduced_ids=ids)
    save_heads(heads, tmp_path, torch.int8)
    stored, loaded = load_file(tmp_path / "heads.safetensors"), load_heads(tmp_path, base)
    in_8_bits = {name for name, tensor in stored.items() if tensor.dtype == torch.int8}
    assert in_8_bits == {
        name for name, tensor in heads.state_dict().items()
        if name.endswith(".weight") and tensor.dim() == 2 and tensor.shape[1] % 32 == 0
    }  # fmt: skip
    for name, expected in heads.state_dict().items():
        found = loaded.state_dict()[name]
        if name not in in_8_bits:
            assert torch.equal(found, expected)
            continue
        for row, numbers in zip(found, expected, strict=True):
            for start in range(0, len(row), 32):
                group = numbers[start : start + 32]
                off = (row[start : start + 32] - group).abs().max()
                assert off <= group.abs().max() / 127 * 1.001
    assert loaded.digest == stored_digest(tmp_path)


def test_packing_finds_the_integers_of_the_file(base: BaseModel, tmp_path: Path) -> None:
    """So heads that guess in C++ compute with the numbers that torch reads."""
    save_heads(random_heads(base, kind="recurrent", mlp_size=96), tmp_path, torch.int8)
    stored, loaded = load_file(tmp_path / "heads.safetensors"), load_heads(tmp_path, base)
    for name, codes in stored.items():
        if codes.dtype == torch.int8:
            packed = int8_blocks(loaded.state_dict()[name])
            assert torch.equal(packed.codes_OI, codes)
            assert torch.equal(packed.scales_OQ, stored[f"{name}_scale"].float())


def test_rows_that_groups_do_not_fill_stay_as_they_are(base: BaseModel, tmp_path: Path) -> None:
    heads = random_heads(base, kind="recurrent", mlp_size=20)
    save_heads(heads, tmp_path, torch.int8)
    name = "recurrent.blocks.0.w2.weight"
    assert torch.equal(load_heads(tmp_path, base).state_dict()[name], heads.state_dict()[name])


def test_numbers_of_any_size_and_none(base: BaseModel, tmp_path: Path) -> None:
    heads = random_heads(base, kind="recurrent")
    weight_OI = heads.get_parameter(MATRIX).data
    weight_OI[0], weight_OI[1], weight_OI[2] = 0.0, weight_OI[1] * 1e30, weight_OI[2] * 1e-30
    save_heads(heads, tmp_path, torch.int8)
    found_OI = load_heads(tmp_path, base).state_dict()[MATRIX]
    assert not found_OI[0].any()
    for found_I, weight_I in zip(found_OI.double()[1:3], weight_OI.double()[1:3], strict=True):
        assert (found_I - weight_I).norm() < 0.02 * weight_I.norm()


def test_a_base_in_16_bits_and_other_formats_get_the_same_numbers(
    base: BaseModel, tmp_path: Path
) -> None:
    save_heads(random_heads(base), tmp_path / "a", torch.int8)
    digest, small = stored_digest(tmp_path / "a"), tiny_base("llama", dtype=torch.bfloat16)
    assert load_heads(tmp_path / "a", small).digest == digest
    convert(tmp_path / "a", tmp_path / "vllm", "vllm", base=base)
    assert load_heads(tmp_path / "vllm", base).digest == digest


def without(name: str) -> Any:
    return lambda stored: stored.pop(name)


def put(name: str, change: Any) -> Any:
    return lambda stored: stored.update({name: change(stored[name])})


def spoilt(scales_OQ: Tensor) -> Tensor:
    scales_OQ[3, 1] = float("nan")
    return scales_OQ


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without(SCALES), "input.weight is in int8, and its scales, .*_scale, are missing"),
        (without(MATRIX), "input.weight is missing; .*weight_scale is unexpected"),
        (put(SCALES, lambda s: s[:-1]), r"shape \(31, 2\).*one scale for 32 numbers of a row"),
        (put(SCALES, lambda s: s[:, :1]), r"shape \(32, 1\).*one scale for 32"),
        (put(SCALES, lambda s: s.float()), "torch.float32.*expected torch.bfloat16"),
        (put(SCALES, spoilt), "input.weight holds NaN or infinite numbers"),
        (put(SCALES, lambda s: s * float("inf")), "holds NaN or infinite numbers"),
        (put(SCALES, lambda s: -s), "numbers below 0"),
        (put(MATRIX, lambda w: w.float()), "has scales, and is torch.float32"),
        (put(MATRIX, lambda w: w[:, :40].contiguous()), r"a row of \(32, 40\)"),
        (put("recurrent.gain", lambda g: g.to(torch.int8)), "gain is in int8, and its scales"),
    ],
)
def test_scales_that_are_missing_or_wrong(
    base: BaseModel, tmp_path: Path, damage: Any, message: str
) -> None:
    save_heads(random_heads(base, kind="recurrent"), tmp_path, torch.int8)
    path = tmp_path / "heads.safetensors"
    stored = {name: tensor.clone() for name, tensor in load_file(path).items()}
    damage(stored)
    save_file(
        {name: tensor.contiguous() for name, tensor in stored.items()},
        path,
        metadata=metadata_of(read_config(tmp_path)),
    )
    with pytest.raises(CheckpointError, match=message):
        load_heads(tmp_path, base)
    assert stored_digest(tmp_path) is None or "missing;" in message
