"""Records on disk: nothing half-written or foreign is taken for what it is not."""

import hashlib
import itertools
import json
import os
import platform
from pathlib import Path
from typing import Any

import pytest
from support.callers import all_at_once
from support.full_disk import full

from medusa_kit.store import records
from medusa_kit.store.records import Record, content_digest, short_digest

DEPENDS_ON = {"version": "1", "layers": [1, {"two": 2.5}]}


@pytest.fixture
def record() -> Record:
    return Record("kind", "name", DEPENDS_ON)


def test_a_record_says_what_was_written(record: Record) -> None:
    assert record.read() is None
    record.write(seconds={1: 0.5})
    assert Record("kind", "name", DEPENDS_ON).read() == {**DEPENDS_ON, "seconds": {"1": 0.5}}


def test_a_record_of_something_else_is_passed_over_and_replaced(record: Record) -> None:
    record.write(found=1)
    newer = Record("kind", "name", {**DEPENDS_ON, "version": "2"})
    assert newer.read() is None
    newer.write(found=2)
    assert record.read() is None
    assert [path.name for path in record.path.parent.iterdir()] == ["name.json"]


def test_records_named_by_all_they_depend_on_lie_side_by_side() -> None:
    both = [{"version": version} for version in "12"]
    for found, one in enumerate(both):
        Record("kind", short_digest(json.dumps(one)), one).write(found=found)
    for found, one in enumerate(both):
        assert Record("kind", short_digest(json.dumps(one)), one).read() == {**one, "found": found}


@pytest.mark.parametrize(
    "damage",
    [
        *(b"", b"{", b"[]", b"null", b"7", b'"found"', b'{"found": 1}', b"\xff\xfe", b"[" * 9999),
        *(b'{"checksum": 1}', b'{"found": ' + 5000 * b"9" + b', "checksum": 1}'),
        b'{"checksum": "", "found": ' + 900 * b"[" + 900 * b"]" + b"}",
    ],
)
def test_a_damaged_record_is_told_of_passed_over_and_replaced(
    record: Record, damage: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    record.write(found=1)
    record.path.write_bytes(damage)
    for _ in range(2):
        assert record.read() is None
    said = "".join(capsys.readouterr().err.split())
    assert said.count(f"{record.path}ismadeagain:") == said.count("again") == 1
    record.write(found=2)
    assert record.read() == {**DEPENDS_ON, "found": 2}


def test_no_byte_of_a_record_can_change_what_it_says(record: Record) -> None:
    """Every bit of every byte, of names and numbers too. A changed blank says the same."""
    record.write(rope={"theta": 10000.0, "type": None}, layers=[1, 2], exact=True)
    whole, expected = record.path.read_bytes(), record.read()
    for place, bit in itertools.product(range(len(whole)), range(8)):
        changed = bytes([whole[place] ^ 1 << bit])
        record.path.write_bytes(whole[:place] + changed + whole[place + 1 :])
        assert record.read() in (None, expected)
    for size in range(len(whole)):
        record.path.write_bytes(whole[:size])
        assert record.read() is None


def test_a_folder_in_place_of_a_record_is_told_of_and_stays(
    record: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    record.path.mkdir(parents=True)
    (record.path / "mine").touch()  # an empty one is nobody's
    assert record.read() is None
    record.write(found=1)
    assert record.path.is_dir()
    said = "".join(capsys.readouterr().err.split())
    assert said.count(f"{record.path}ismadeagain:") == 1
    assert "cannotbewritten" in said


def test_an_empty_folder_in_place_of_a_record_goes(record: Record) -> None:
    record.path.mkdir(parents=True)
    record.write(found=3)
    assert (record.read() or {})["found"] == 3


def test_a_record_is_not_written_through_a_link(record: Record, tmp_path: Path) -> None:
    record.path.parent.mkdir(parents=True)
    for target in (tmp_path / "nowhere.json", tmp_path / "mine.json"):
        if target.name == "mine.json":
            target.write_text("mine")
            record.path.unlink()
        record.path.symlink_to(target)
        record.write(found=3)
        assert not record.path.is_symlink()
        assert (record.read() or {})["found"] == 3
    assert not (tmp_path / "nowhere.json").exists()
    assert (tmp_path / "mine.json").read_text() == "mine"


def test_a_record_says_what_it_is_about(cache: Path) -> None:
    names: tuple[str | Path, ...] = (cache.parent, "org/model")
    for number, about in enumerate(names):
        one = Record("kind", str(number), DEPENDS_ON, about)
        one.write(found=1)
        found = one.read()
        assert found is not None
        assert found["about"] == [platform.node(), str(about)]


def test_names_that_are_no_text_have_digests() -> None:
    assert short_digest(os.fsdecode(b"model\xff")) != short_digest("model")


def test_a_record_that_several_write_at_once_is_always_whole(record: Record) -> None:
    """As long texts, which a reader would find half-written."""
    found = list("abcd")
    record.write(found="a" * 100_000)

    def write_and_read(number: int) -> list[dict[str, Any] | None]:
        said = list[dict[str, Any] | None]()
        for _ in range(20):
            record.write(found=found[number] * 100_000)
            said.append(record.read())
        return said

    whole = [{**DEPENDS_ON, "found": one * 100_000} for one in found]
    assert all(one in whole for said in all_at_once(write_and_read, 4) for one in said)


def test_a_folder_that_cannot_be_written_is_one_warning(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.write_text("a file where the folder should be")
    for name in ("one", "two"):
        record = Record("kind", name, DEPENDS_ON)
        record.write(found=1)
        assert record.read() is None
    assert capsys.readouterr().err.count("cannot be written") == 1


def test_a_full_disk_leaves_the_record_as_it_was(
    record: Record, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record.write(found=1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        record.write(found=2)
    assert "No space left on device" in capsys.readouterr().err
    assert record.read() == {**DEPENDS_ON, "found": 1}
    assert [path.name for path in record.path.parent.iterdir()] == ["name.json"]


def test_records_of_earlier_versions_are_found_out_again(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They have no checksum."""
    monkeypatch.setattr(records, "SETTLED_SECONDS", -60)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    stamp = path.stat()
    known = {
        "path": str(path), "size": 7, "mtime_ns": stamp.st_mtime_ns, "ctime_ns": stamp.st_ctime_ns,
    }  # fmt: skip
    (cache / "digests").mkdir(parents=True)
    name = hashlib.sha256(str(path).encode()).hexdigest()[:16]
    memory = cache / "digests" / f"{name}.json"
    memory.write_text(json.dumps({**known, "sha256": "remembered"}) + "\n")
    assert content_digest(path) == hashlib.sha256(b"weights").hexdigest()
    assert "".join(capsys.readouterr().err.split()).count(f"{memory}ismadeagain") == 1
    found = records.read_record(memory)
    assert found.items() >= {**known, "sha256": content_digest(path)}.items()


def test_a_file_that_may_change_without_a_new_time_is_not_remembered(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    assert content_digest(path) == hashlib.sha256(b"weights").hexdigest()
    assert not list(cache.glob("digests/*"))
    monkeypatch.setattr(records, "SETTLED_SECONDS", -60)
    content_digest(path)
    assert len(list(cache.glob("digests/*"))) == 1


def test_a_digest_of_the_kits_own_file_is_recorded_once_the_disk_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut may take contents that were not written yet, and leave size and times."""
    done = list[str]()
    sync, write = os.fsync, Record.write
    monkeypatch.setattr(os, "fsync", lambda file: done.append("synced") or sync(file))
    monkeypatch.setattr(
        Record, "write", lambda record, **found: done.append("recorded") or write(record, **found)
    )
    for own, expected in ((True, ["synced", "recorded"]), (False, ["recorded"])):
        path = tmp_path / f"file-{own}"
        path.write_bytes(b"contents")
        monkeypatch.setattr(records, "SETTLED_SECONDS", 0)
        content_digest(path, own=own)
        assert done == expected
        done.clear()
