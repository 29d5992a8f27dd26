"""The file of packed weights: damaged ones are made again, and where none can be written the model
is packed into memory."""

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.callers import all_at_once
from support.tiny_models import model_of

from medusa_kit import console
from medusa_kit.files import file_digest
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.packed import cache as packed_cache
from medusa_kit.infer.cpu.packed import packing_up
from medusa_kit.infer.cpu.packed.cache import packed_folder, packed_model
from medusa_kit.infer.cpu.packed.file import (
    DIGEST,
    FILE,
    LAYOUT,
    PREAMBLE,
    FileSink,
    mapped,
    write_file,
)
from medusa_kit.store import builds
from medusa_kit.store.builds import NotUsable

pytestmark = pytest.mark.skipif(
    kernels.load_library() is None, reason="the C++ kernels cannot be built on this machine"
)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))
    model_of("llama").to(torch.bfloat16).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def config() -> Any:
    return model_of("llama").config


def file_of(folder: Path, config: Any) -> Path:
    return packed_folder(folder, config, "checkpoint") / FILE


def written(path: Path) -> Path:
    with path.open("wb") as file:
        sink = FileSink(file)
        halves = torch.arange(6, dtype=torch.bfloat16).view(3, 2)
        sink.write("a", torch.bfloat16, (3, 2), [halves[:2], halves[2:]])
        sink.write("b", torch.uint8, (5,), [torch.arange(5, dtype=torch.uint8)])
        sink.finish({"one": 1.5})
    return path


def test_arrays_are_mapped_at_multiples_of_64_bytes(tmp_path: Path) -> None:
    numbers, arrays = mapped(written(tmp_path / "file"))
    assert numbers == {"one": 1.5}
    assert arrays["a"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert arrays["b"].tolist() == [0, 1, 2, 3, 4]
    assert all(array.data_ptr() % 64 == 0 for array in arrays.values())
    assert arrays["a"].untyped_storage().data_ptr() == arrays["b"].untyped_storage().data_ptr()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("num_bytes", [5, 1 << 20])
def test_what_cannot_be_written_is_raised(num_bytes: int) -> None:
    """Parts are written in a thread: at the latest the end tells."""

    def write(sink: FileSink) -> dict[str, Any]:
        part = torch.zeros(num_bytes, dtype=torch.uint8)
        sink.write("a", torch.uint8, (num_bytes,), [part])
        return {}

    with pytest.raises(OSError, match="No space left on device"):
        write_file(Path("/dev/full"), write)


def test_a_damaged_file_is_refused_wherever_it_matters(tmp_path: Path) -> None:
    """Every byte of preamble and header, and every length."""
    path = written(tmp_path / "file")
    whole = path.read_bytes()
    at = PREAMBLE.unpack(whole[: PREAMBLE.size])[3]
    for place in [*range(PREAMBLE.size), *range(at, len(whole))]:
        if 8 <= place < 12:  # reserved
            continue
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(NotUsable):
            mapped(path)
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(NotUsable):
            mapped(path)
    path.write_bytes(whole + b" ")
    with pytest.raises(NotUsable, match=f"it has {len(whole) + 1} bytes, expected {len(whole)}"):
        mapped(path)


@pytest.mark.parametrize("entry", [
    ["uint8", [5], 1 << 40], ["uint8", [1 << 40], 64], ["uint8", [-1], 64], ["uint8", [5], 65],
    ["uint8", [5], 0], ["float99", [5], 64], ["uint8", 5, 64], ["uint8", [5]], None,
])  # fmt: skip
def test_arrays_outside_the_file_are_refused(entry: Any, tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        sink = FileSink(file)
        sink.write("a", torch.uint8, (5,), [torch.arange(5, dtype=torch.uint8)])
        sink._table["a"] = entry
        sink.finish({})
    with pytest.raises(NotUsable, match="table of arrays is wrong"):
        mapped(tmp_path / "file")


def cut(whole: bytes) -> bytes:
    return whole[: len(whole) // 2]


def another_layout(whole: bytes) -> bytes:
    magic, reserved, _, *rest = PREAMBLE.unpack(whole[: PREAMBLE.size])
    return PREAMBLE.pack(magic, reserved, LAYOUT + 1, *rest) + whole[PREAMBLE.size :]


def another_maker(whole: bytes) -> bytes:
    return whole.replace(b'"model_type"', b'"model_typ3"')


def another_file(whole: bytes) -> bytes:
    return b"no weights"


def flipped(whole: bytes) -> bytes:
    """A bit of the first array."""
    return whole[:80] + bytes([whole[80] ^ 4]) + whole[81:]


DAMAGED = "its contents are damaged"
DAMAGE = {
    "cut": (cut, DAMAGED),
    "empty": (lambda whole: b"", DAMAGED),
    "a bit": (flipped, DAMAGED),
    # With digests of their own beside them.
    "another layout": (another_layout, "its layout is version 2, expected 1"),
    "another header": (another_maker, "its header is damaged"),
    "another file": (another_file, "does not begin"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_is_made_again(
    how: str, folder: Path, config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    packed_model(folder, config)
    assert "packing model, once on this machine" in capsys.readouterr().err
    path = file_of(folder, config)
    whole = path.read_bytes()
    damage, reason = DAMAGE[how]
    path.write_bytes(damage(whole))
    if reason != DAMAGED:
        path.with_name(DIGEST).write_text(file_digest(path))
    packed_model(folder, config)
    said = capsys.readouterr().err
    assert said.count("is made again") == 1
    assert reason in said
    assert path.read_bytes() == whole
    packed_model(folder, config)
    assert capsys.readouterr().err == "", "a whole one is opened as it is"


def test_a_check_reads_the_whole_file(
    folder: Path, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may damage a file without a trace in its times."""
    packed_model(folder, config)
    path = file_of(folder, config)
    whole = path.read_bytes()
    known = file_digest(path)
    path.write_bytes(flipped(whole))
    monkeypatch.setattr(builds, "content_digest", lambda *_, **__: known)
    packed_model(folder, config)
    assert path.read_bytes() != whole
    packed_model(folder, config, check=True)
    assert path.read_bytes() == whole


def test_another_version_of_transformers_has_a_file_of_its_own(
    folder: Path, config: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It decides what a config means. Environments that share a cache folder take turns here."""
    found = []
    for number in "989889":
        monkeypatch.setattr(packed_cache, "_made_with", lambda n=number: [f"transformers {n}"])
        packed_model(folder, config)
        found.append(file_of(folder, config))
    assert capsys.readouterr().err.count("packing model") == len(set(found)) == 2
    assert found[0].samefile(found[1]), "the same bytes are there once"


def test_another_layout_has_a_file_of_its_own(
    folder: Path, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file_of(folder, config)
    monkeypatch.setattr(packed_cache, "LAYOUT", LAYOUT + 1)
    assert file_of(folder, config) != before


@pytest.mark.parametrize("made_with", [None, ["transformers 9"]])
@pytest.mark.parametrize("links", [True, False])
def test_a_file_of_an_earlier_version_is_taken_if_it_was_made_alike(
    folder: Path, config: Any, monkeypatch: pytest.MonkeyPatch, made_with: list[str] | None,
    links: bool, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Which named those of all versions of transformers alike and wrote that inside."""
    packed_model(folder, config)
    path = file_of(folder, config)
    numbers, arrays = mapped(path)
    contents = packed_cache._contents(folder)
    older = packed_cache._folder_of(folder, contents, config, "checkpoint", named_with=[])
    older.mkdir()
    made_with = made_with or packed_cache._made_with()
    with (older / FILE).open("wb") as file:
        sink = FileSink(file)
        for name, array in arrays.items():
            sink.write(name, array.dtype, array.shape, [array])
        sink.finish({**numbers, "made_with": made_with})
    (older / DIGEST).write_text(file_digest(older / FILE))
    shutil.rmtree(path.parent)
    if not links:
        monkeypatch.setattr(os, "link", refuse_links)
    capsys.readouterr()
    packed_model(folder, config)
    taken = made_with == packed_cache._made_with()
    assert ("packing" in capsys.readouterr().err) is not taken
    assert path.samefile(older / FILE) == (taken and links)
    assert (path.read_bytes() == (older / FILE).read_bytes()) == taken


def refuse_links(*_: Any) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


def test_other_weights_or_settings_are_another_file(folder: Path, config: Any) -> None:
    before = file_of(folder, config)
    config.rope_parameters = {**config.rope_parameters, "rope_theta": 5e5}
    assert file_of(folder, config) != before
    assert packed_folder(folder, config, "int8") != packed_folder(folder, config, "checkpoint")
    config.dtype = torch.float16
    config.architectures = None
    changed = file_of(folder, config)
    model_of("llama", vocab_size=64).save_pretrained(folder)
    assert file_of(folder, config) != changed


def test_packs_of_an_edited_config_are_removed(
    folder: Path, config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    packed_model(folder, config)
    older = packed_folder(folder, config, "checkpoint")
    config.rope_parameters = {**config.rope_parameters, "rope_theta": 5e5}
    config.save_pretrained(folder)
    packed_model(folder, config)
    assert "has other contents by now" in " ".join(capsys.readouterr().err.split())
    assert not older.exists()
    assert packed_folder(folder, config, "checkpoint").is_dir()


def change_weights(folder: Path) -> None:
    model = model_of("llama").to(torch.bfloat16)
    model.lm_head.weight.data += 1
    model.save_pretrained(folder)


def test_files_of_older_contents_are_removed(
    folder: Path, config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    model_of("qwen2").save_pretrained(elsewhere)
    packed_model(elsewhere, own := model_of("qwen2").config)
    mapped_before = packed_model(folder, config)
    packed_model(folder, config, "int8")
    older = [packed_folder(folder, config, weights) for weights in ("checkpoint", "int8")]
    before = mapped_before.output.data.clone()
    change_weights(folder)
    capsys.readouterr()
    packed_model(folder, config)
    said = "".join(capsys.readouterr().err.split())
    assert all(f"removed{one}:modelhasothercontents" in said for one in older)
    newer = [packed_folder(folder, config, weights) for weights in ("checkpoint", "int8")]
    packed_model(folder, config, "int8")
    left = [path for path in newer[0].parent.iterdir() if path.is_dir()]
    assert sorted(left) == sorted([*newer, packed_folder(elsewhere, own, "checkpoint")])
    assert torch.equal(mapped_before.output.data, before), "who has mapped it keeps it"


@pytest.mark.parametrize("how", ["full disk", "no folder"])
def test_where_no_file_can_be_written(
    how: str, folder: Path, config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    expected = packed_model(folder, config)
    if how == "no folder":
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "file" / "cache"))
    else:
        monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "other"))
        write, count = FileSink.write, []

        def full(sink: FileSink, *arguments: Any) -> None:
            count.append(0)
            if len(count) == 7:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(sink, *arguments)

        monkeypatch.setattr(FileSink, "write", full)
    capsys.readouterr()
    packed = packed_model(folder, config)
    said = capsys.readouterr().err
    assert "is packed into memory" in said
    assert how == "no folder" or "No space left on device" in said
    assert not list(tmp_path.glob("other/packed/*/*"))
    assert not list(tmp_path.glob("other/packed/.*.tmp"))
    assert packed.info == expected.info
    for name, matrix in expected.matrices.items():
        assert torch.equal(packed.matrices[name].data, matrix.data)


@pytest.mark.parametrize("found", ["missing tensors", "in the weights", "in the first layer"])
def test_what_cannot_run_leaves_no_file_and_does_not_say_that_it_is_packed(
    folder: Path, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def refuse(*_: Any, **__: Any) -> None:
        raise packed_cache.Unsupported("as a test wants it")

    if found == "missing tensors":
        config.num_hidden_layers = 9
    elif found == "in the weights":
        monkeypatch.setattr(packed_cache, "describe", refuse)
    else:
        monkeypatch.setattr(packed_cache.Packing, "_layer", refuse)
    for _ in range(2):
        with pytest.raises(packed_cache.Unsupported):
            packed_model(folder, config)
    assert "packing" not in capsys.readouterr().err
    assert not list(tmp_path.glob("cache/packed/*/*"))


def test_those_that_come_at_once_pack_once(
    folder: Path, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two threads here: the lock is one between processes (tests/store/test_builds.py)."""
    packed, together, made = packed_cache._packed, threading.Barrier(2), []

    def slowly(*arguments: Any) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(timeout=0.3)  # without a lock both are here at the same time
        made.append(0)
        return packed(*arguments)

    monkeypatch.setattr(packed_cache, "_packed", slowly)
    found = all_at_once(lambda _: packed_model(folder, config), 2)
    assert len(made) == 1
    assert torch.equal(found[0].output.data, found[1].output.data)


def test_processes_share_its_pages(folder: Path, config: Any) -> None:
    """Mapped from the file and not copied: the kernel tells which file an address belongs to."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("only Linux tells what is mapped")
    packed = packed_model(folder, config)
    address = packed.output.data.data_ptr()
    for line in maps.read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            assert line.endswith(str(file_of(folder, config)))
            assert line.split()[1] == "r--s", "shared, and not to be written"
            return
    pytest.fail("nothing is mapped there")


@pytest.mark.parametrize("tied", [False, True])
def test_the_bar_counts_every_weight_and_ends_at_their_number(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrix by matrix, and large ones piece by piece."""
    model = model_of("llama", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "model")
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packing_up, "PIECE", 1)  # a piece is 32 rows
    bars = list[tuple[float, str, list[float]]]()

    @contextmanager
    def progress(_: str, total: float, unit: str, brief: bool) -> Iterator[Any]:
        done = list[float]()
        bars.append((total, unit, done))
        yield SimpleNamespace(advance=done.append)

    monkeypatch.setattr(console, "progress", progress)
    packed_model(tmp_path / "model", model.config)
    ((total, unit, done),) = bars
    matrices = {id(one): one.numel() for one in model.parameters() if one.dim() > 1}
    assert unit == "M weights"
    assert total == pytest.approx(sum(matrices.values()) / 1e6)
    assert sum(done) == pytest.approx(total)
    assert max(done) < total / 4
