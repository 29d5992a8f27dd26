"""Heads on disk: bit-exact round trips, and every way a folder can be wrong."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.small_engines import random_heads
from support.tiny_models import tiny_base, tiny_model

from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.errors import CheckpointError, IncompatibleBaseError
from medusa_kit.heads import MedusaHeads, load_heads, read_config, save_heads
from medusa_kit.heads.checkpoint import read_heads

REDUCED = torch.tensor([1, 2, 17, 60, 95])


def trained_heads(base: BaseModel, K: int = 3, L: int = 1, projection: str = "shared") -> Any:
    """Heads whose every weight is away from its start."""
    ids_R = REDUCED if projection == "reduced" else None
    heads = MedusaHeads.for_base(base, K, L, projection, ids_R)  # type: ignore[arg-type]
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    return heads


@pytest.mark.parametrize("projection", ["shared", "own", "reduced"])
@pytest.mark.parametrize(("K", "L"), [(1, 1), (3, 1), (5, 1), (3, 2)])
def test_round_trip_is_bit_exact(
    llama: BaseModel, tmp_path: Path, K: int, L: int, projection: str
) -> None:
    heads = trained_heads(llama, K, L, projection)
    save_heads(heads, tmp_path)
    loaded = load_heads(tmp_path, llama)
    assert loaded.config == heads.config
    saved, found = heads.state_dict(), loaded.state_dict()
    assert saved.keys() == found.keys()
    assert all(torch.equal(saved[name], found[name]) for name in saved)
    hidden_BD = torch.randn(4, 32)
    assert torch.equal(loaded(hidden_BD), heads(hidden_BD))
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "heads.safetensors"]


@pytest.mark.parametrize("projection", ["shared", "own", "reduced"])
def test_heads_that_are_written_over_stay_loaded(
    llama: BaseModel, tmp_path: Path, projection: str
) -> None:
    heads = trained_heads(llama, projection=projection)
    save_heads(heads, tmp_path)
    loaded, path = load_heads(tmp_path, llama), tmp_path / "heads.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    found = loaded.state_dict()
    assert all(torch.equal(one, found[name]) for name, one in heads.state_dict().items())


@pytest.mark.parametrize("kind", ["hydra", "recurrent"])
def test_heads_that_read_more_come_back_and_are_not_taken_for_others(
    llama: BaseModel, tmp_path: Path, kind: str
) -> None:
    heads = MedusaHeads.for_base(llama, 3, 2, kind=kind)  # type: ignore[arg-type]
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    save_heads(heads, tmp_path)
    loaded = load_heads(tmp_path, llama)
    assert loaded.config == heads.config
    hidden_XD, path_XJ = torch.randn(4, 32), torch.randint(3, 96, (4, 3))
    for k in range(3):
        expected_XD = heads.transform(hidden_XD, k, path_XJ)
        assert torch.equal(loaded.transform(hidden_XD, k, path_XJ), expected_XD)
    config = json.loads((tmp_path / "config.json").read_text())
    plain = {"kind": "medusa", "mlp_size": None}
    (tmp_path / "config.json").write_text(json.dumps({**config, **plain}))
    wrong = r"shape .*, expected \(32, 32\)"
    if kind == "recurrent":
        wrong = r"recurrent\..* is unexpected"
    with pytest.raises(CheckpointError, match=wrong):
        load_heads(tmp_path, llama)


def test_the_shared_projection_is_not_written(llama: BaseModel, tmp_path: Path) -> None:
    save_heads(trained_heads(llama), tmp_path)
    names = load_file(tmp_path / "heads.safetensors")
    assert len(names) == 6  # three weights, three biases
    assert {tuple(tensor.shape) for tensor in names.values()} == {(32, 32), (32,)}


@pytest.mark.parametrize("projection", ["shared", "own", "reduced"])
def test_storage_in_bfloat16(llama: BaseModel, tmp_path: Path, projection: str) -> None:
    heads = trained_heads(llama, projection=projection)
    save_heads(heads, tmp_path, torch.bfloat16)
    stored = load_file(tmp_path / "heads.safetensors")
    for name, tensor in heads.state_dict().items():
        if name == "column_ids":
            assert stored[name].dtype == torch.int64
        else:
            assert torch.equal(stored[name], tensor.bfloat16())
    loaded = load_heads(tmp_path, llama).state_dict()
    for name, tensor in heads.state_dict().items():
        assert loaded[name].dtype == tensor.dtype
        rounded = tensor if name == "column_ids" else tensor.bfloat16().float()
        assert torch.equal(loaded[name], rounded)


def test_loading_takes_the_dtype_of_the_base(tmp_path: Path) -> None:
    save_heads(trained_heads(tiny_base("llama")), tmp_path)
    half = load_heads(tmp_path, tiny_base("llama", dtype=torch.bfloat16))
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}


def test_saving_again_replaces_the_heads_and_keeps_other_files(
    llama: BaseModel, tmp_path: Path
) -> None:
    (tmp_path / "tree.json").write_text("{}")
    save_heads(trained_heads(llama, K=5), tmp_path)
    newer = trained_heads(llama, K=2)
    save_heads(newer, tmp_path)
    assert load_heads(tmp_path, llama).num_heads == 2
    assert (tmp_path / "tree.json").read_text() == "{}"


def test_a_failed_save_leaves_the_old_heads(
    llama: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = trained_heads(llama)
    save_heads(first, tmp_path)

    def half_a_file(tensors: Any, path: Path, **options: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr("medusa_kit.heads.checkpoint.save_file", half_a_file)
    with pytest.raises(OSError, match="No space"):
        save_heads(trained_heads(llama), tmp_path)
    loaded = load_heads(tmp_path, llama)
    hidden_BD = torch.randn(2, 32)
    assert torch.equal(loaded(hidden_BD), first(hidden_BD))
    assert len(list(tmp_path.iterdir())) == 2


# How a folder gets broken, and what the error must say.


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = folder / "heads.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def set_key(key: str, value: Any) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, lambda config: config.update({key: value}))


def set_tensor(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, lambda tensors: tensors.update({name: tensor}))


def drop_tensor(name: str) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, lambda tensors: tensors.pop(name))


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def cut(size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / "heads.safetensors", size)


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (remove("config.json"), r"no heads at .*config\.json is missing"),
    "no weights": (remove("heads.safetensors"), r"heads\.safetensors is missing"),
    "broken JSON": (write("config.json", '{"format":'), r"config\.json is not JSON"),
    "a list": (write("config.json", "[1]"), "does not describe medusa-kit heads"),
    "another tool's": (set_key("format", "medusa"), "does not describe medusa-kit heads"),
    "unknown key": (set_key("medusa_num_layers", 1), "unknown keys: medusa_num_layers"),
    "missing key": (lambda f: edit_config(f, lambda c: c.pop("num_heads")), "lacks a key.*num_h"),
    "a kind that is gone": (set_key("kind", "rooted"), "kind 'rooted' are no longer there"),
    "unknown kind": (set_key("kind", "eagle"), "kind 'eagle' is unknown"),
    "unknown projection": (set_key("projection", "tied"), "'tied' is unknown; expected one of"),
    "a number as text": (set_key("num_heads", "3"), "num_heads is '3'"),
    "no head": (set_key("num_heads", 0), "num_heads is 0"),
    "a fraction": (set_key("num_blocks", 1.5), r"num_blocks is 1\.5"),
    "cut-off weights": (cut(200), r"cannot be read"),
    "cut-off header": (cut(5), r"cannot be read"),
    "empty weights": (cut(0), r"cannot be read"),
    "missing tensor": (drop_tensor("blocks.1.0.linear.bias"),
                       r"blocks\.1\.0\.linear\.bias is missing"),
    "extra tensor": (set_tensor("blocks.3.0.linear.bias", torch.zeros(32)),
                     r"blocks\.3\.0\.linear\.bias is unexpected"),
    "misshapen tensor": (set_tensor("blocks.0.0.linear.weight", torch.zeros(32, 31)),
                         r"has shape \(32, 31\), expected \(32, 32\)"),
    "more heads promised": (set_key("num_heads", 4), r"blocks\.3\..* is missing"),
    "far more heads promised": (set_key("num_heads", 500), "500 heads of 1 blocks need at"),
    "far more blocks promised": (set_key("num_blocks", 500), "3 heads of 500 blocks need at least"),
    "column ids of a shared projection": (set_tensor("column_ids", REDUCED), "column_ids"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders(llama: BaseModel, tmp_path: Path, case: str) -> None:
    save_heads(trained_heads(llama), tmp_path)
    load_heads(tmp_path, llama)
    damage, message = BROKEN[case]
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load_heads(tmp_path, llama)


BROKEN_NETWORK: dict[str, tuple[Callable[[Path], None], str]] = {
    "no size": (set_key("mlp_size", None), "mlp_size is None, expected a whole number"),
    "a truth value": (set_key("mlp_size", True), "mlp_size is True, expected a whole number"),
    "nothing": (set_key("mlp_size", 0), "mlp_size is 0, expected a whole number from 1 on"),
    "for another kind": (set_key("kind", "hydra"), "mlp_size is 20 with heads of kind 'hydra'"),
    "a huge network": (set_key("mlp_size", 10**12),
                       r"blocks\.0\.w1\.weight has shape \(20, 32\), expected \(1000000000000, 32"),
    "beyond all counting": (set_key("mlp_size", 10**30), "no tensor has the sizes of these heads"),
    "far more heads promised": (set_key("num_heads", 10**12),
                                r"recurrent\.gain has shape \(2, 32\), expected \(10000"),
    "far more blocks promised": (set_key("num_blocks", 10**12), "need at least"),
    "missing tensor": (drop_tensor("recurrent.gain"), r"recurrent\.gain is missing"),
    "extra tensor": (set_tensor("blocks.0.0.linear.bias", torch.zeros(32)),
                     r"blocks\.0\.0\.linear\.bias is unexpected"),
    "misshapen tensor": (set_tensor("recurrent.input.weight", torch.zeros(32, 32)),
                         r"recurrent\.input\.weight has shape \(32, 32\), expected \(32, 64\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN_NETWORK)
def test_broken_shared_networks(llama: BaseModel, tmp_path: Path, case: str) -> None:
    save_heads(MedusaHeads.for_base(llama, 2, kind="recurrent", mlp_size=20), tmp_path)
    assert load_heads(tmp_path, llama).config.mlp_size == 20
    assert read_heads(tmp_path)[0].mlp_size == 20
    damage, message = BROKEN_NETWORK[case]
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load_heads(tmp_path, llama)


@pytest.mark.parametrize("config", [
    {"prefix_layers": 1, "prefix_sizes": {"query_heads": 4}}, {"prefix_layers": True},
])  # fmt: skip
def test_heads_with_a_prefix_layer_are_refused(
    llama: BaseModel, tmp_path: Path, config: dict[str, Any]
) -> None:
    """Versions up to 0.1 wrote such; without one, they wrote the keys as none."""
    save_heads(trained_heads(llama), tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        json.dumps({**json.loads(text), "prefix_layers": 0, "prefix_sizes": None})
    )
    load_heads(tmp_path, llama)
    (tmp_path / "config.json").write_text(json.dumps({**json.loads(text), **config}))
    for read in (lambda: load_heads(tmp_path, llama), lambda: read_heads(tmp_path)):
        with pytest.raises(CheckpointError, match="have a prefix layer") as caught:
            read()
        assert "train heads without it" in str(caught.value.hint)


BROKEN_REDUCED: dict[str, Callable[[Path], None]] = {
    "no column ids": drop_tensor("column_ids"),
    "fewer than the config says": set_tensor("column_ids", REDUCED[:4].clone()),
    "out of range": set_tensor("column_ids", torch.tensor([1, 2, 17, 60, 96])),
    "unsorted": set_tensor("column_ids", torch.tensor([2, 1, 17, 60, 95])),
    "of two dimensions": set_tensor("column_ids", REDUCED[None].clone()),
    "fractions": set_tensor("column_ids", REDUCED.float()),
    "no size in the config": set_key("reduced_size", None),
}


@pytest.mark.parametrize("case", BROKEN_REDUCED)
def test_broken_column_ids(llama: BaseModel, tmp_path: Path, case: str) -> None:
    save_heads(trained_heads(llama, projection="reduced"), tmp_path)
    load_heads(tmp_path, llama)
    BROKEN_REDUCED[case](tmp_path)
    with pytest.raises(CheckpointError, match=r"column_ids|reduced_size"):
        load_heads(tmp_path, llama)


def test_a_missing_folder_says_how_to_make_one(llama: BaseModel, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no heads at") as caught:
        load_heads(tmp_path / "nowhere", llama)
    assert "medusa-kit train" in str(caught.value)


@pytest.mark.parametrize("inner", ["heads", "run/heads"])
def test_a_run_is_told_where_its_heads_are(llama: BaseModel, tmp_path: Path, inner: str) -> None:
    save_heads(trained_heads(llama), tmp_path / inner)
    with pytest.raises(CheckpointError, match="no heads at") as caught:
        read_config(tmp_path)
    assert caught.value.hint == f"did you mean {tmp_path / inner}?"


def test_read_config_needs_no_base(llama: BaseModel, tmp_path: Path) -> None:
    heads = trained_heads(llama, projection="reduced")
    save_heads(heads, tmp_path)
    assert read_config(tmp_path) == heads.config


def test_another_base_of_the_same_shape_is_refused_unless_forced(tmp_path: Path) -> None:
    base, other = tiny_base("llama"), tiny_base("llama", seed=1)
    heads = trained_heads(base)
    save_heads(heads, tmp_path)
    with pytest.raises(IncompatibleBaseError) as caught:
        load_heads(tmp_path, other)
    message = str(caught.value)
    assert f"fingerprint '{base.info.fingerprint}' ≠ '{other.info.fingerprint}'" in message
    assert "hidden size" not in message
    assert "architecture" not in message
    assert "force" in (caught.value.hint or "")
    forced = load_heads(tmp_path, other, force=True)
    assert forced.base is other
    hidden_BD = torch.randn(2, 32)
    assert torch.equal(forced.transform(hidden_BD, 1), heads.transform(hidden_BD, 1))


def test_another_architecture_is_named(tmp_path: Path) -> None:
    save_heads(trained_heads(tiny_base("llama")), tmp_path)
    with pytest.raises(IncompatibleBaseError, match="architecture 'llama' ≠ 'mistral'"):
        load_heads(tmp_path, tiny_base("mistral"))


@pytest.mark.parametrize("force", [False, True])
def test_other_sizes_are_refused_whatever_is_forced(tmp_path: Path, force: bool) -> None:
    save_heads(trained_heads(tiny_base("llama")), tmp_path)
    wide = wrap_model(tiny_model("llama", hidden_size=64))
    with pytest.raises(IncompatibleBaseError, match="hidden size 32 ≠ 64") as caught:
        load_heads(tmp_path, wide, force)
    assert ("fingerprint" in caught.value.message) is not force
    large = wrap_model(tiny_model("llama", vocab_size=100))
    with pytest.raises(IncompatibleBaseError, match="vocabulary size 96 ≠ 100"):
        load_heads(tmp_path, large, force)


def test_a_quantised_copy_is_warned_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tiny_base("llama")
    save_heads(trained_heads(base), tmp_path)
    load_heads(tmp_path, base)
    assert capsys.readouterr().err == ""
    base.info = replace(base.info, quantized=True)
    load_heads(tmp_path, base)
    captured = capsys.readouterr()
    assert "trained on a full-precision copy" in captured.err
    assert captured.out == ""
    save_heads(trained_heads(base), tmp_path)
    base.info = replace(base.info, quantized=False)
    load_heads(tmp_path, base)
    assert "trained on a quantised copy" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["medusa", "hydra", "recurrent"])
def test_loading_draws_no_random_numbers(kind: str, llama: BaseModel, tmp_path: Path) -> None:
    """A server loads heads in threads beside whatever else the process draws."""
    save_heads(random_heads(llama, kind=kind), tmp_path / "heads")
    before = torch.get_rng_state()
    load_heads(tmp_path / "heads", llama)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_folder_that_is_not_there_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "my-heads").mkdir()
    with pytest.raises(CheckpointError, match="there is no such folder") as caught:
        read_config(tmp_path / "my-head")
    assert caught.value.hint == f"did you mean {tmp_path / 'my-heads'}?"
