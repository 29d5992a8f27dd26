"""GGUF files are dequantised once for each content, and a folder is never replaced."""

import contextlib
import errno
import json
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from support.callers import all_at_once
from support.gguf.tiny_gguf import write_gguf
from transformers import PreTrainedTokenizerBase

from medusa_kit.base import gguf as embedded
from medusa_kit.base.files import check_readable, stored_config, stored_generation_config
from medusa_kit.base.gguf import dequantised_folder, described_folder
from medusa_kit.base.loading import load_base_model, load_tokenizer
from medusa_kit.errors import CheckpointError
from medusa_kit.store import records
from medusa_kit.store.builds import ORIGIN

pytest.importorskip("gguf")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file of the size of real ones, whose contents nobody looks into here."""
    return write_gguf(tmp_path / "large.gguf")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were dequantised, by a stand-in."""
    done: list[Path] = []

    def make(gguf: Path, folder: Path) -> None:
        done.append(gguf)
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(embedded, "_dequantise", make)
    return done


def change_last_byte(path: Path) -> None:
    """Only the contents change: name, size, beginning and times stay."""
    stamp = path.stat()
    with path.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last[0] ^ 0x40]))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


def damage_merges(path: Path) -> None:
    """To a token that there is not."""
    raw = path.read_bytes()
    merge = b"\3" + bytes(7) + b"a b"
    assert raw.count(merge) == 1
    path.write_bytes(raw.replace(merge, merge[:-1] + b"z"))


def test_a_byte_changed_late_in_the_file_is_another_model(large: Path, made: list[Path]) -> None:
    first = dequantised_folder(large)
    assert dequantised_folder(large) == first
    assert len(made) == 1
    change_last_byte(large)
    assert dequantised_folder(large) != first
    assert len(made) == 2
    assert not first.exists(), "nobody can open it again"
    change_last_byte(large)
    assert dequantised_folder(large) == first
    assert len(made) == 3


def test_weights_are_those_of_the_file_as_it_is(tmp_path: Path) -> None:
    """Two exports of one name, size and beginning; a model of the other's weights is not loaded."""
    path = write_gguf(tmp_path / "tuned.gguf")
    before = load_base_model(str(path), device="cpu")
    raw = path.read_bytes()
    last = before.model.lm_head.weight[-1, -1].item()
    at = raw.rindex(before.model.lm_head.weight[-1].detach().numpy().tobytes())
    assert at > 1 << 20
    path.write_bytes(raw[:at] + bytes(4) + raw[at + 4 :])
    after = load_base_model(str(path), device="cpu")
    assert after.model.lm_head.weight[-1, 0].item() == 0
    assert after.model.lm_head.weight[-1, -1].item() == last
    assert after.info.fingerprint != before.info.fingerprint


def test_the_digest_is_remembered(
    large: Path, made: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    digest = records.file_digest
    monkeypatch.setattr(records, "_digests", {})

    def digest_of(path: Path) -> str:
        if path == large:
            read.append(path)
        return digest(path)

    monkeypatch.setattr(records, "file_digest", digest_of)
    folder = dequantised_folder(large)
    assert dequantised_folder(large) == folder
    assert len(read) == 2, "a file that was just written may change within a tick of the clock"
    monkeypatch.setattr(records, "SETTLED_SECONDS", -60)
    for _ in range(3):
        assert dequantised_folder(large) == folder
    assert len(read) == 3
    change_last_byte(large)
    assert dequantised_folder(large) != folder
    memory = cache / "digests" / f"{records.short_digest(str(large))}.json"
    for damage in ("{half", "[]", json.dumps({"path": str(large)})):
        memory.write_text(damage)
        records._digests.clear()
        assert dequantised_folder(large) != folder


def test_threads_that_come_at_once_get_one_folder(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No folder is replaced while another thread reads it."""
    together = threading.Barrier(2)
    made: list[int] = []

    def make(_: Path, folder: Path) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(timeout=0.3)  # without a lock both are here at the same time
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        made.append(folder.stat().st_ino)

    def load(_: int) -> tuple[Path, int]:
        folder = dequantised_folder(large)
        return folder, folder.stat().st_ino

    monkeypatch.setattr(embedded, "_dequantise", make)
    found = all_at_once(load, 2)
    assert len(made) == 1
    assert found == [(found[0][0], made[0])] * 2


def test_a_file_that_transformers_refuses_leaves_nothing(large: Path, cache: Path) -> None:
    damage_merges(large)
    with pytest.raises(CheckpointError, match=r"a merge of .a. and .z., which are no tokens"):
        dequantised_folder(large)
    assert [path for path in cache.iterdir() if path.is_dir() and path.name != "digests"] == []


def test_a_cache_that_cannot_be_written_is_told(large: Path, made: list[Path], cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="cannot be read into") as error:
        dequantised_folder(large)
    assert "MEDUSA_KIT_CACHE" in str(error.value)
    assert made == []


def test_what_needs_no_weights_dequantises_nothing(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    check_readable(str(path))
    config = stored_config(str(path))
    assert config is not None
    assert (config.model_type, config.vocab_size) == ("llama", 260)
    settings = stored_generation_config(str(path))
    assert settings is not None
    assert settings.eos_token_id == config.eos_token_id
    assert load_tokenizer(str(path)).convert_tokens_to_ids("ab") == 259
    assert not list(cache.rglob("*.safetensors"))


def test_a_described_file_has_all_that_a_dequantised_one_has_but_weights(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    described = described_folder(path)
    whole = dequantised_folder(path)
    assert whole != described
    for file in whole.iterdir():
        if file.suffix != ".safetensors" and file.name != ORIGIN:
            assert (described / file.name).read_bytes() == file.read_bytes(), file.name
    assert described_folder(path) == whole, "what is there need not be made again"


def test_a_file_that_cannot_be_described_leaves_nothing(large: Path, cache: Path) -> None:
    damage_merges(large)
    with pytest.raises(CheckpointError, match=r"a merge of .a. and .z., which are no tokens"):
        check_readable(str(large))
    assert [path for path in cache.iterdir() if path.is_dir() and path.name != "digests"] == []


@pytest.mark.parametrize("how", ["no folder", "full disk"])
def test_where_nothing_can_be_written_it_is_described_for_now(
    how: str, large: Path, cache: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A full disk: the tokenizers library raises an Exception of no particular kind."""
    expected = described_folder(large)
    files = {path.name: path.read_bytes() for path in expected.iterdir() if path.name != ORIGIN}
    shutil.rmtree(cache)
    if how == "no folder":
        cache.write_text("a file where the folder should be")
    else:
        save = PreTrainedTokenizerBase.save_pretrained

        def full(tokenizer: Any, folder: Path, **_: Any) -> Any:
            if Path(folder).is_relative_to(cache):
                raise Exception("No space left on device (os error 28)")
            return save(tokenizer, folder)

        monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", full)
    found = described_folder(large)
    assert described_folder(large) == found != expected
    assert {path.name: path.read_bytes() for path in found.iterdir()} == files
    assert "cannot be written" in capsys.readouterr().err
    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    embedded._for_now.clear()
    with pytest.raises(CheckpointError, match="cannot be read into"):
        described_folder(large)


def refuse(*_: Any, **__: Any) -> str:
    raise OSError(errno.ENOSPC, "No space left on device")
