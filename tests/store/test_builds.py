"""Files and folders in the store: none that is damaged or half-written is opened, and what one
process makes another need not make.
"""

import contextlib
import errno
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.callers import all_at_once
from support.full_disk import full

from medusa_kit.files import file_digest
from medusa_kit.store import builds, records
from medusa_kit.store.builds import (
    ORIGIN,
    NotUsable,
    Origin,
    check_files,
    make_file_once,
    make_folder_once,
)

WHOLE = "the contents, all of them"


class Maker:
    """Counts what is made, and what was in the files that were opened."""

    def __init__(self, path: Path, origin: Origin | None = None) -> None:
        self.path, self.origin = path, origin
        self.made, self.opened = 0, list[str]()

    def make(self, path: Path) -> None:
        self.made += 1
        path.write_text(WHOLE)

    def open(self, path: Path) -> int:
        self.opened.append(path.read_text())
        return path.stat().st_ino

    def __call__(self, check: bool = True) -> int:
        return make_file_once(
            self.path, "sha256", "making it", self.make, self.open, self.origin, check
        )

    def left(self) -> set[str]:
        return {path.name for path in self.path.parent.parent.iterdir()} - {"digests"}


@pytest.fixture
def maker(cache: Path) -> Maker:
    return Maker(cache / "thing" / "file")


def test_a_file_is_made_once(maker: Maker) -> None:
    assert maker() == maker() == maker(check=False)
    assert maker.made == 1


def test_what_was_just_made_is_read_once(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have gigabytes."""
    read = list[Path]()

    def digest(path: Path) -> str:
        read.append(path)
        return file_digest(path)

    monkeypatch.setattr(builds, "file_digest", digest)
    monkeypatch.setattr(records, "file_digest", digest)
    maker(check=False)
    assert len(read) == 1
    assert maker.made == len(maker.opened) == 1


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("damage", ["", WHOLE[:9], WHOLE.replace("all", "ale"), "foreign", None])
def test_a_damaged_file_is_never_opened_and_made_again(
    maker: Maker, damage: str | None, check: bool
) -> None:
    """None: only its digest is."""
    maker(check)
    name, contents = ("sha256", b"\xff") if damage is None else ("file", damage.encode())
    maker.path.with_name(name).write_bytes(contents)
    maker(check)
    assert maker.made == 2
    assert set(maker.opened) == {WHOLE}
    maker(check)
    assert maker.made == 2


def test_two_files_of_the_same_bytes_are_there_once(cache: Path) -> None:
    """A damaged one is not taken for the other."""
    first, second, third = (Maker(cache / name / "file") for name in ("one", "two", "three"))
    first(), second()
    assert first.path.samefile(second.path)
    first.path.write_text("damaged")
    third()
    assert third.path.read_text() == WHOLE
    assert not third.path.samefile(first.path)
    assert (second(), second.made) == (third.path.stat().st_ino, 2)


def folder_maker(cache: Path) -> Callable[[], int]:
    """Makes a folder of two files; returns how often it has been made."""
    made = []

    def make(folder: Path) -> None:
        made.append(0)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "weights").write_bytes(bytes(range(9)))

    def once() -> int:
        origin = Origin(cache.parent / "model", ["contents"])
        make_folder_once(cache / "folder", "making it", make, origin)
        assert {path.name for path in check_files(cache / "folder")} == {"config.json", "weights"}
        return len(made)

    return once


def a_flipped_bit(folder: Path) -> None:
    (folder / "weights").write_bytes(bytes([1, *range(1, 9)]))


def an_empty_file(folder: Path) -> None:
    (folder / "config.json").write_text("")


def a_missing_file(folder: Path) -> None:
    (folder / "weights").unlink()


def a_file_too_many(folder: Path) -> None:
    (folder / "added_tokens.json").write_text("{}")


def a_folder_in_place_of_a_file(folder: Path) -> None:
    (folder / "weights").unlink()
    (folder / "weights").mkdir()


def a_damaged_list(folder: Path) -> None:
    text = (folder / ORIGIN).read_text()
    (folder / ORIGIN).write_text(text.replace("weights", "weightz"))


def no_list(folder: Path) -> None:
    (folder / ORIGIN).write_bytes(b"\xff")


def nothing_but_a_file(folder: Path) -> None:
    shutil.rmtree(folder / "none", ignore_errors=True)
    for path in folder.iterdir():
        path.unlink()
    (folder / ORIGIN).write_text("[]")


@pytest.mark.parametrize("damage", [
    a_flipped_bit, an_empty_file, a_missing_file, a_file_too_many, a_folder_in_place_of_a_file,
    a_damaged_list, no_list, nothing_but_a_file,
])  # fmt: skip
def test_a_damaged_folder_is_made_again_with_one_line(
    damage: Callable[[Path], None], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once = folder_maker(cache)
    assert [once(), once()] == [1, 1]
    damage(cache / "folder")
    capsys.readouterr()
    assert [once(), once()] == [2, 2]
    said = "".join(capsys.readouterr().err.split())
    assert said.count(f"{cache / 'folder'}ismadeagain:") == said.count("again") == 1


@pytest.mark.parametrize("lacking", ["file", "sha256"])
def test_a_folder_that_lacks_a_file_is_made_again_without_a_word(
    maker: Maker, lacking: str, capsys: pytest.CaptureFixture[str]
) -> None:
    maker()
    maker.path.with_name(lacking).unlink()
    maker()
    assert maker.made == 2
    assert "again" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", [NotUsable, OSError])
def test_what_does_not_open_is_made_once_more_and_then_told(
    maker: Maker, kind: type[Exception], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    maker()

    def refuse(_: Path) -> int:
        raise kind("of another version")

    monkeypatch.setattr(maker, "open", refuse)
    with pytest.raises(OSError, match="of another version"):
        maker()
    assert maker.made == 2
    assert capsys.readouterr().err.count("is made again: of another version") == 1


def test_threads_that_come_at_once_make_one(maker: Maker) -> None:
    together, own = threading.Barrier(2), maker.make

    def slowly(path: Path) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(timeout=0.3)  # without a lock both are here at the same time
        own(path)

    maker.make = slowly  # type: ignore[method-assign]
    first, second = all_at_once(lambda _: maker(), 2)
    assert first == second
    assert maker.made == 1


PROCESS = """
import sys
from pathlib import Path
from medusa_kit.store.builds import make_file_once

def make(path):
    path.write_text("half of ")
    print("making", flush=True)
    sys.stdin.readline()
    path.write_text(sys.argv[2])

def inode(path):
    return path.stat().st_ino

print("ready", flush=True)
print(make_file_once(Path(sys.argv[1]), "sha256", "making it", make, inode), flush=True)
"""


def start(maker: Maker) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(maker.path), WHOLE],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_processes_that_come_at_once_make_one(maker: Maker) -> None:
    first = start(maker)
    assert first.stdout is not None
    assert first.stdout.readline() == "making\n"
    second = start(maker)
    assert second.stderr is not None
    assert "waiting for another process: making it" in second.stderr.readline()
    said = first.communicate("go on\n")[0]
    assert second.communicate("")[0] == said, "it made nothing of its own"
    assert first.returncode == second.returncode == 0
    assert said == f"{maker()}\n"
    assert maker.made == 0


def test_a_killed_process_holds_nobody_up_and_leaves_nothing(maker: Maker) -> None:
    first = start(maker)
    assert first.stdout is not None
    assert first.stdout.readline() == "making\n"
    first.kill()
    first.communicate()
    maker()
    assert (maker.made, maker.opened) == (1, [WHOLE])
    assert maker.left() == {"thing", ".thing.lock"}


def test_what_a_process_left_that_was_killed_in_replacing_one_goes(maker: Maker) -> None:
    maker()
    maker.path.unlink()
    for ending in ("tmp", "old"):
        left = maker.path.parent.with_name(f".thing.12345678.{ending}")
        left.mkdir()
        (left / "file").write_text(WHOLE)
    maker()
    assert maker.left() == {"thing", ".thing.lock"}


def test_without_locks_the_first_one_stays(
    maker: Maker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_locks(*_: object, **__: object) -> None:
        raise NotImplementedError("this file system has none")

    monkeypatch.setattr(builds.FileLock, "acquire", no_locks)
    other, own = Maker(maker.path), maker.make
    first = list[int]()

    def make(path: Path) -> None:
        own(path)
        first.append(other())  # another process comes, and is done before this one

    monkeypatch.setattr(maker, "make", make)
    assert [maker()] == first
    assert [maker.path.stat().st_ino] == first, "not replaced"
    assert (maker.made, other.made) == (1, 1)
    assert "work may be done twice" in capsys.readouterr().err
    assert maker.left() == {"thing"}


def test_an_owner_that_hangs_is_waited_for_with_patience(
    maker: Maker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(builds, "PATIENCE", 0.01)
    first = start(maker)
    assert first.stdout is not None
    assert first.stdout.readline() == "making\n"
    made = maker()
    assert "continuing without it" in capsys.readouterr().err
    assert first.communicate("go on\n")[0] == f"{made}\n", "the one that is there is not replaced"
    assert maker.left() == {"thing", ".thing.lock"}


@pytest.mark.parametrize("how", ["full disk", "no folder"])
def test_where_nothing_can_be_written_it_is_an_oserror_and_nothing_is_left(
    maker: Maker, how: str, cache: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if how == "full disk":
        monkeypatch.setattr(maker, "make", full)
    else:
        cache.write_text("a file where the folder should be")
    with pytest.raises(OSError, match="No space left" if how == "full disk" else "File exists"):
        maker()
    assert how == "no folder" or maker.left() <= {".thing.lock"}
    assert "made again" not in capsys.readouterr().err


def of_contents(cache: Path, contents: str, place: str = "model") -> Maker:
    return Maker(cache / f"{place}-{contents}" / "file", Origin(cache.parent / place, [contents]))


def test_those_of_older_contents_are_removed(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = [of_contents(cache, "older"), of_contents(cache, "newer", "elsewhere")]
    other_version = of_contents(cache, "newer")
    other_version.path = cache / "model-newer-of-another-version" / "file"
    for maker in [*others, other_version]:
        maker()
    newer = of_contents(cache, "newer")
    newer()
    removed, *stay = [*others, other_version, newer]
    assert not removed.path.parent.exists()
    assert all(maker.path.read_text() == WHOLE for maker in stay)
    said = "".join(capsys.readouterr().err.split())
    assert f"removed{removed.path.parent}:modelhasothercontents" in said


def without_origin(folder: Path) -> None:
    (folder / ORIGIN).unlink()


def half_an_origin(folder: Path) -> None:
    (folder / ORIGIN).write_text("{half")


def another_machine(folder: Path) -> None:
    record = json.loads((folder / ORIGIN).read_text())
    record["place"][0] += "2"
    (folder / ORIGIN).write_text(json.dumps(record))


@pytest.mark.parametrize("why", [without_origin, half_an_origin, another_machine])
def test_those_that_another_load_may_open_stay(why: Callable[[Path], None], cache: Path) -> None:
    older = of_contents(cache, "older")
    older()
    why(older.path.parent)
    of_contents(cache, "newer")()
    assert older.path.read_text() == WHOLE


def test_files_in_use_stay_whole_where_the_system_wants_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    older = of_contents(cache, "older")
    older()
    names = {path.name for path in older.path.parent.iterdir()}
    replace = Path.replace

    def refused(path: Path, target: Path) -> Path:
        if path == older.path.parent:
            raise PermissionError(errno.EACCES, "used by another process", str(path))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", refused)
    of_contents(cache, "newer")()
    assert {path.name for path in older.path.parent.iterdir()} == names
    assert "removed" not in capsys.readouterr().err


def test_files_of_earlier_versions_are_adopted_and_removed_by_the_same_rule(cache: Path) -> None:
    older = of_contents(cache, "older")
    older.path.parent.mkdir(parents=True)
    older.path.write_text(WHOLE)
    older.path.with_name("sha256").write_text(hashlib.sha256(WHOLE.encode()).hexdigest())
    place = [platform.node(), os.path.realpath(cache.parent / "model")]
    record = json.dumps({"place": place, "contents": ["older"]})
    older.path.with_name("made_from.json").write_text(record)
    older(check=False)
    assert older.made == 0
    of_contents(cache, "newer")()
    assert not older.path.parent.exists()


def test_a_link_in_a_circle_is_made_again(tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text(WHOLE)

    folder, origin = tmp_path / "made", Origin(tmp_path, ["1"])
    make_folder_once(folder, "making", make, origin)
    for target in ("config.json", "nowhere"):
        (folder / "config.json").unlink()
        (folder / "config.json").symlink_to(target)
        make_folder_once(folder, "making", make, origin)
        assert (folder / "config.json").read_text() == WHOLE
