"""The file of heads' packed weights: mapped where it is whole, made again where it is not, and
removed once other heads lie in its place."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_engines import random_heads
from support.tiny_models import model_of

from medusa_kit.base.loading import load_base_model
from medusa_kit.files import file_digest
from medusa_kit.heads import MedusaHeads, load_heads, save_heads
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.decoder import native_decoder
from medusa_kit.infer.cpu.heads import NativeHeads
from medusa_kit.infer.cpu.packed import heads as packed_module
from medusa_kit.infer.cpu.packed.file import DIGEST, FILE
from medusa_kit.infer.cpu.packed.heads import PackedHeads, packed_heads
from medusa_kit.infer.cpu.packed_base import PackedBase, base_for_decoding

pytestmark = pytest.mark.skipif(
    kernels.load_library() is None, reason="the C++ kernels cannot be built on this machine"
)


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PackedBase:
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))
    model_of("llama").save_pretrained(tmp_path / "model")
    base = base_for_decoding(str(tmp_path / "model"))
    assert isinstance(base, PackedBase)
    return base


def saved(base: Any, folder: Path, **options: Any) -> MedusaHeads:
    """Random heads, as they are read from `folder`."""
    save_heads(random_heads(base, **options), folder)
    return load_heads(folder, base)


def packed(heads: MedusaHeads, folder: Path | None) -> PackedHeads:
    return packed_heads(heads, heads.base.packed.output, folder)  # type: ignore[attr-defined]


def files(tmp_path: Path) -> list[Path]:
    return sorted(tmp_path.glob(f"cache/packed/heads-*/{FILE}"))


def assert_same(found: PackedHeads, expected: PackedHeads) -> None:
    assert found.matrices.keys() == expected.matrices.keys()
    assert found.vectors.keys() == expected.vectors.keys()
    for name, matrix in expected.matrices.items():
        other = found.matrices[name]
        assert torch.equal(other.data, matrix.data)
        for field in ("kind", "outputs", "inputs"):
            assert getattr(other.struct, field) == getattr(matrix.struct, field)
        assert (other.bias is None) == (matrix.bias is None)
        assert matrix.bias is None or torch.equal(other.bias, matrix.bias)
    for name, vector in expected.vectors.items():
        assert torch.equal(found.vectors[name], vector)


@pytest.mark.parametrize("projection", ["shared", "reduced", "own"])
@pytest.mark.parametrize("kind", ["medusa", "hydra", "recurrent"])
def test_a_mapped_file_has_the_bits_that_memory_has(
    base: PackedBase, tmp_path: Path, kind: str, projection: str
) -> None:
    ids = torch.arange(1, 60, 2) if projection == "reduced" else None
    heads = saved(base, tmp_path / "heads", kind=kind, projection=projection, reduced_ids=ids)
    expected = packed(heads, None)
    assert not files(tmp_path)
    assert_same(packed(heads, tmp_path / "heads"), expected)
    (path,) = files(tmp_path)
    made = path.stat().st_mtime_ns
    assert_same(packed(heads, tmp_path / "heads"), expected)
    assert path.stat().st_mtime_ns == made, "opened, not made again"
    hidden, read = torch.randn(2, base.info.hidden_size), torch.randint(0, 60, (2, 3))
    by_file, by_memory = (
        NativeHeads(heads, base.decoder, folder)([1], hidden, read, 4)
        for folder in (tmp_path / "heads", None)
    )
    assert by_file is not None
    assert by_memory is not None
    assert torch.equal(by_file[0], by_memory[0])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def flipped(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:80] + bytes([whole[80] ^ 4]) + whole[81:])


def rewritten(path: Path, first: int = 0, **changes: Any) -> None:
    """The same file without its arrays before the `first`, and with other numbers."""
    numbers, mapped = packed_module.mapped(path)
    arrays = [(name, array.clone()) for name, array in mapped.items()]
    del mapped  # a file that is mapped must not be cut
    with path.open("wb") as file:
        sink = packed_module.FileSink(file)
        for name, array in arrays[first:]:
            sink.write(name, array.dtype, array.shape, [array])
        sink.finish({**numbers, **changes})
    path.with_name(DIGEST).write_text(file_digest(path))


def without_a_part(path: Path) -> None:
    rewritten(path, first=1)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (cut, "its contents are damaged"),
    "a bit": (flipped, "its contents are damaged"),
    "a part": (without_a_part, "a part of it is missing"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_is_made_again(
    base: PackedBase, tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = saved(base, tmp_path / "heads", kind="recurrent")
    packed(heads, tmp_path / "heads")
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    expected = packed(heads, None)
    damage, reason = DAMAGE[how]
    shutil.copytree(path.parent, tmp_path / "copy")  # `path` itself stays mapped
    damage(tmp_path / "copy" / FILE)
    for name in (FILE, DIGEST):
        (tmp_path / "copy" / name).replace(path.with_name(name))
    capsys.readouterr()
    assert_same(packed(heads, tmp_path / "heads"), expected)
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("is made again") == 1
    assert reason in said
    assert path.read_bytes() == whole


def test_a_part_of_another_size_is_refused(base: PackedBase, tmp_path: Path) -> None:
    heads = saved(base, tmp_path / "heads", kind="recurrent")
    packed(heads, tmp_path / "heads")
    (path,) = files(tmp_path)
    other = saved(base, tmp_path / "other", kind="recurrent", num_heads=2)
    with pytest.raises(packed_module.NotUsable, match=r"recurrent\.gain is"):
        packed_module._opened(path, other)


def test_other_heads_in_its_place_remove_it(base: PackedBase, tmp_path: Path) -> None:
    folder = tmp_path / "heads"
    heads = saved(base, folder)
    in_use, expected = packed(heads, folder), packed(heads, None)
    (before,) = files(tmp_path)
    assert json.loads((before.parent / "made_from.json").read_text())["place"][1] == str(folder)
    heads = saved(base, folder, num_heads=2)
    assert_same(packed(heads, folder), packed(heads, None))
    (after,) = files(tmp_path)
    assert after != before
    assert_same(in_use, expected)  # still mapped


def test_two_versions_lie_side_by_side(
    base: PackedBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And copies of the same heads share a file."""
    folder = tmp_path / "heads"
    heads = saved(base, folder)
    packed(heads, folder)
    shutil.copytree(folder, tmp_path / "copies" / "heads")
    packed(load_heads(tmp_path / "copies" / "heads", base), tmp_path / "copies" / "heads")
    assert len(files(tmp_path)) == 1
    monkeypatch.setattr(packed_module, "__version__", "0.0.0")
    packed(heads, folder)
    assert len(files(tmp_path)) == 2


def test_other_bases_and_forms_have_other_files(base: PackedBase, tmp_path: Path) -> None:
    folder, ids = tmp_path / "heads", torch.arange(1, 60, 2)
    packed(saved(base, folder, projection="reduced", reduced_ids=ids), folder)
    rounded = base_for_decoding(base.info.name, weights="int8")
    heads = load_heads(folder, rounded)
    assert_same(packed(heads, folder), packed(heads, None))
    assert len(files(tmp_path)) == 2


def test_without_a_place_they_are_packed_into_memory(base: PackedBase, tmp_path: Path) -> None:
    heads = saved(base, tmp_path / "heads")
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("no folder")
    assert_same(packed(heads, tmp_path / "heads"), packed(heads, None))


def test_a_base_that_may_change_in_memory_has_no_file(base: PackedBase, tmp_path: Path) -> None:
    full = load_base_model(base.info.name, device="cpu")
    heads = saved(full, tmp_path / "heads")
    NativeHeads(heads, native_decoder(full), tmp_path / "heads")
    assert not files(tmp_path)
