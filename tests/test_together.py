"""Files that belong together, in a process that is killed or fails amid them."""

import os
import shutil
from pathlib import Path

import pytest
from support.full_disk import full
from support.killed import after_each_rename

from medusa_kit.errors import WriteError
from medusa_kit.files import atomic_write, finish_replacing
from medusa_kit.together import finish_moves, moved_together

NAMES = ("config.json", "heads.safetensors", "provenance.json")


def write(folder: Path, text: str) -> None:
    with moved_together(folder, replaced=["picture.png"]) as new:
        for name in NAMES:
            (new / name).write_text(text)


def texts(folder: Path) -> set[str]:
    return {(folder / name).read_text() for name in NAMES}


def test_a_killed_process_leaves_all_old_files_or_all_new_ones(tmp_path: Path) -> None:
    folder, found = tmp_path / "heads", []

    def before() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        write(folder, "old")

    for _ in after_each_rename(lambda: write(folder, "new"), before):
        finish_moves(folder)
        found.append(texts(folder))
        assert not list(folder.glob("*.whole"))
    assert found == [{"old"}] + [{"new"}] * len(NAMES)


def test_the_next_files_come_after_those_that_a_killed_process_left(tmp_path: Path) -> None:
    folder = tmp_path / "heads"
    for _ in after_each_rename(lambda: write(folder, "old"), lambda: None):
        write(folder, "new")
        assert texts(folder) == {"new"}
        finish_moves(folder)
        assert texts(folder) == {"new"}


def test_two_processes_may_move_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if target.name == NAMES[1]:
            monkeypatch.setattr(Path, "replace", rename)
            finish_moves(tmp_path)
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    write(tmp_path, "new")
    assert texts(tmp_path) == {"new"}
    assert len(list(tmp_path.iterdir())) == len(NAMES)


def test_nothing_is_moved_where_a_file_cannot_take_its_place(tmp_path: Path) -> None:
    (tmp_path / NAMES[2]).mkdir()
    (tmp_path / "picture.png").write_text("old")
    with pytest.raises(IsADirectoryError, match=NAMES[2]):
        write(tmp_path, "new")
    assert {path.name for path in tmp_path.iterdir()} == {NAMES[2], "picture.png"}


def test_a_link_stays_and_what_it_points_to_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To another disk too, where nothing can be renamed to."""
    rename, folder, disk = os.replace, tmp_path / "heads", tmp_path / "disk"
    folder.mkdir()
    (folder / NAMES[1]).symlink_to(disk / "weights")

    def replace(source: Path, target: Path) -> None:
        if Path(target).parent == disk != Path(source).parent:
            raise OSError(18, "Invalid cross-device link")
        rename(source, target)

    monkeypatch.setattr(os, "replace", replace)
    for text in ("old", "new"):
        write(folder, text)
        assert texts(folder) == {text}
    assert (folder / NAMES[1]).is_symlink()
    assert [path.name for path in disk.iterdir()] == ["weights"]
    assert len(list(folder.iterdir())) == len(NAMES)


def test_a_killed_process_leaves_a_folder_or_the_one_that_takes_its_place(tmp_path: Path) -> None:
    path, found = tmp_path / "model [1]", []

    def replace(text: str) -> None:
        with atomic_write(path) as new:
            new.mkdir()
            (new / "weights").write_text(text)

    def before() -> None:
        shutil.rmtree(path, ignore_errors=True)
        for left in tmp_path.iterdir():
            shutil.rmtree(left)
        replace("old")

    for _ in after_each_rename(lambda: replace("new"), before):
        finish_replacing(path)
        found.append((path / "weights").read_text())
    assert found == ["old", "new"]
    finish_replacing(path)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_a_full_disk_is_told_by_the_name_that_the_file_was_to_have(tmp_path: Path) -> None:
    with (
        pytest.raises(WriteError) as caught,
        moved_together(tmp_path / "heads") as new,
        atomic_write(new / "config.json"),
    ):
        full()
    assert str(tmp_path / "heads" / "config.json") in caught.value.message
    assert ".tmp" not in caught.value.message
    assert "make room" in (caught.value.hint or "")
    assert list((tmp_path / "heads").iterdir()) == []
