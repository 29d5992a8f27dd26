"""Writing to a temporary name and renaming: what is there before, during, after and on failure.

And reading: JSON that is nested too deeply for Python's parser.
"""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from medusa_kit.base import adapters
from medusa_kit.base.loading import load_base_model
from medusa_kit.data.answer_settings import read_settings, settings_path
from medusa_kit.data.readers import read_rows
from medusa_kit.errors import MedusaKitError
from medusa_kit.files import atomic_write, mode_of_copy, near_file, parse_json
from medusa_kit.heads import checkpoint
from medusa_kit.heads.formats import files as formats
from medusa_kit.hub import measured
from medusa_kit.settings.grammar import Grammar
from medusa_kit.settings.schema import apply_override, read_yaml
from medusa_kit.tree.candidate_tree import load_tree


def test_the_old_file_stands_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.json"
    with atomic_write(path) as temporary:
        temporary.write_text("old")
    with atomic_write(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert temporary.parent == path.parent
    assert path.read_text() == "new"
    assert [p.name for p in path.parent.iterdir()] == ["a.json"]


def test_a_failure_keeps_the_old_one_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def write_half() -> None:
        with atomic_write(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_replaces_the_old_folder_whole(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    for name in ("one", "two"):
        with atomic_write(path) as temporary:
            temporary.mkdir()
            (temporary / name).write_text(name)
    assert [p.name for p in path.iterdir()] == ["two"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_never_takes_the_place_of_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "results"
    path.mkdir()
    (path / "precious").write_text("old")
    with pytest.raises(IsADirectoryError, match="results"), atomic_write(path) as temporary:
        temporary.write_text("new")
    assert (path / "precious").read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_device_stays_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(OSError, match="Not an ordinary file"), atomic_write(path) as temporary:
        temporary.write_text("new")
    assert path.is_fifo()
    assert list(tmp_path.iterdir()) == [path]


def test_files_are_readable_by_whom_ordinary_files_are(tmp_path: Path) -> None:
    (tmp_path / "ordinary").write_text("")
    with atomic_write(tmp_path / "heads.safetensors") as temporary:
        save_file({"a": torch.zeros(2)}, temporary)  # on its own readable by the owner alone
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_a_file_with_a_mode_has_it_from_its_first_byte_on(tmp_path: Path) -> None:
    path = tmp_path / "private"
    with atomic_write(path, 0o600) as temporary:
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
        temporary.write_text("what people asked")
    assert mode_of_copy(path) == stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o440)
    assert mode_of_copy(path) == 0o640  # a copy can be written
    assert path.read_text() == "what people asked"


def test_the_mask_of_the_process_is_never_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between setting and restoring it, another thread's files would be open to everybody."""
    set_mask, before, asked = os.umask, os.umask(0o027), []
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "umask", lambda mask: asked.append(mask) or set_mask(mask))
            with atomic_write(tmp_path / "heads.safetensors") as temporary:
                save_file({"a": torch.zeros(2)}, temporary)
    finally:
        set_mask(before)
    assert asked == []
    assert (tmp_path / "heads.safetensors").stat().st_mode & 0o777 == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["heads.safetensors"]


def test_a_folder_named_by_way_of_itself_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        with atomic_write(Path("folder/../folder")) as temporary:
            temporary.mkdir()
            (temporary / name).write_text(name)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["two"]


def test_links_in_a_circle_are_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"), atomic_write(tmp_path / "a"):
        pass


def test_a_link_stays_and_what_it_points_to_is_written(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    (disk / "heads").mkdir(parents=True)
    (disk / "heads" / "old").write_text("old")
    (disk / "a.json").write_text("old")
    for name in ("heads", "a.json", "new.json"):  # nothing is at new.json yet
        (tmp_path / name).symlink_to(Path("disk") / name)
    with atomic_write(tmp_path / "heads") as temporary:
        assert temporary.parent == disk, "a rename must stay on the target's disk"
        temporary.mkdir()
        (temporary / "new").write_text("new")
    for name in ("a.json", "new.json"):
        with atomic_write(tmp_path / name) as temporary:
            assert temporary.parent == disk
            temporary.write_text("new")
        assert (disk / name).read_text() == "new"
    assert [path.name for path in (disk / "heads").iterdir()] == ["new"]
    assert all((tmp_path / name).is_symlink() for name in ("heads", "a.json", "new.json"))
    assert sorted(path.name for path in disk.iterdir()) == ["a.json", "heads", "new.json"]


def test_a_folder_whose_replacement_fails_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    (path / "old").write_text("old")
    rename = Path.replace

    def interrupted(self: Path, target: Path) -> Path:
        if target == path and self.suffix == ".tmp":
            raise KeyboardInterrupt
        return rename(self, target)

    def write() -> None:
        with atomic_write(path) as temporary:
            temporary.mkdir()

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write()
    assert [one.name for one in path.iterdir()] == ["old"]
    assert list(tmp_path.iterdir()) == [path]


def of_a_base(folder: Path) -> Any:
    """A base whose generation config is the file `nested`."""
    load_base_model("debug-tiny", device="cpu").model.save_pretrained(folder / "base")
    (folder / "nested").rename(folder / "base" / "generation_config.json")
    return load_base_model(str(folder / "base"), device="cpu")


READERS: dict[str, Callable[[Path], Any]] = {
    "rows": lambda folder: list(read_rows(str((folder / "nested").rename(folder / "a.jsonl")))),
    "a list of rows": lambda folder: list(
        read_rows(str((folder / "nested").rename(folder / "a.json")))
    ),
    "answers": lambda folder: read_settings(
        (folder / "nested").rename(settings_path(folder / "a")) and folder / "a"
    ),
    "heads": lambda folder: checkpoint.read_config(
        (folder / "nested").rename(folder / checkpoint.CONFIG_NAME).parent
    ),
    "other heads": lambda folder: formats.read_json(folder / "nested"),
    "an index": lambda folder: formats.read_index(folder / "nested"),
    "an adapter": lambda folder: adapters.read_info(
        (folder / "nested").rename(folder / adapters.OWN_NAME).parent
    ),
    "a report": lambda folder: measured._json(folder / "nested"),
    "a recipe": lambda folder: read_yaml(folder / "nested", "recipe"),
    "an override": lambda folder: apply_override({}, f"a={(folder / 'nested').read_text()}"),
    "a generation config": of_a_base,
    "a tree": lambda folder: load_tree(folder / "nested"),
    "a schema": lambda folder: Grammar.json_schema((folder / "nested").read_text()),
}


@pytest.mark.parametrize("kind", READERS)
def test_json_nested_too_deeply_is_an_error_of_ours(kind: str, tmp_path: Path) -> None:
    of_yaml = kind in ("a recipe", "an override")  # a slower parser, in Python
    (tmp_path / "nested").write_text("[" * (600 if of_yaml else 200_000))
    with pytest.raises(MedusaKitError):
        READERS[kind](tmp_path)


@pytest.mark.parametrize("kind", [kind for kind in READERS if kind != "an override"])
def test_integers_of_many_digits_are_named(kind: str, tmp_path: Path) -> None:
    """Python reads at most 4,300, and other values of an override are checked by their option."""
    if kind == "a recipe":  # of which a key is text then, and no option
        (tmp_path / "nested").write_text("9" * 5000)
    else:
        (tmp_path / "nested").write_text('{"a": "999", "b": -' + "9" * 5000 + "}")
    with pytest.raises(MedusaKitError) as caught:
        READERS[kind](tmp_path)
    assert len(caught.value.message) < 400
    assert "5,000 digits" in caught.value.message or kind == "a recipe"


def test_the_place_of_an_integer_of_many_digits() -> None:
    for text in (f'["{"9" * 5000}",\n {"8" * 5000}]', f"[1,\n{'8' * 5000}]".encode()):
        with pytest.raises(json.JSONDecodeError, match="5,000 digits") as caught:
            parse_json(text)
        assert caught.value.lineno == 2
    assert parse_json(f"[{'7' * 4000}]") == [int("7" * 4000)]


def test_half_a_generation_config_is_no_missing_one(tmp_path: Path) -> None:
    """transformers takes it for missing."""
    (tmp_path / "nested").write_text('{"eos_token_id": 25')
    with pytest.raises(MedusaKitError, match=r"generation_config.json cannot be read: Expecting"):
        of_a_base(tmp_path)


def test_the_nearest_name_in_a_folder_is_offered(tmp_path: Path) -> None:
    there = tmp_path / "mychat.gguf"
    there.touch()
    assert near_file(tmp_path / "mychatt.gguf", "look") == f"did you mean {there}?"
    for other in (tmp_path / "x", tmp_path / "gone/mychat.gguf", there):
        assert near_file(other, "look") == "look"
