"""What is found for heads that come with a package, or lie where nobody may write, is kept in the
cache folder, and found there by all that load these heads.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock
from support.debug_model import MODEL
from support.wrapped import raising

import medusa_kit
from medusa_kit.engine import load as loading
from medusa_kit.engine.before_loading import read_tree
from medusa_kit.engine.heads_folder import HeadsFolder
from medusa_kit.hub.card import CardOptions
from medusa_kit.hub.folder import upload_files
from medusa_kit.hub.measured import read_measured
from medusa_kit.store.beside import found_beside, results_folder

Run = Callable[..., tuple[int, str, str]]
PLACES = (
    "site-packages/heads", "medusa_kit/assets/heads/tiny",
    "hub/models--org--heads/snapshots/0123abc",
    "snapshots/hub/models--org--heads/snapshots/0123abc",
)  # fmt: skip
SEARCH = ("tree-search", *MODEL, "--sizes", "1,3", "--nodes", "3", "--no-dynamic")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(params=PLACES)
def heads(request: pytest.FixtureRequest, trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / request.param))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def found(cache: Path, name: str = "tree.json") -> Path:
    (path,) = (cache / "heads").glob(f"*/{name}")
    return path


def give_tree(heads: Path) -> Path:
    """A tree in the place of what a search finds for these heads."""
    path = results_folder(heads) / "tree.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[[0], [1], [0, 0], [1, 0]]")
    return path


def test_a_search_leaves_the_package_alone_and_is_found(
    run: Run, trained: Path, tmp_path: Path, cache: Path
) -> None:
    heads = Path(shutil.copytree(trained, tmp_path / PLACES[1]))
    before = contents(heads)
    code, _, err = run(*SEARCH, "--heads", heads)
    assert code == 0
    assert "is no place to write to" in err
    assert contents(heads) == before
    tree = found(cache)
    assert len(json.loads(tree.read_text())["table"]) == 2
    assert found(cache, "statistics.npz").parent == tree.parent
    engine = medusa_kit.load("debug-tiny", heads=heads, device="cpu")
    assert engine.tree.num_nodes == 3
    measured = read_measured(heads)
    assert measured.plan is not None
    assert measured.plan.for_batch(1).num_nodes == 3
    code, out, _ = run("cache")
    (row,) = (line.split() for line in out.splitlines() if line.startswith("heads"))
    assert row[4:] == ["there", str(heads)]
    run("cache", "--clear", "heads")
    assert not list((cache / "heads").glob("*/*"))
    assert read_tree(None, heads) == read_tree(None, trained)


def test_the_shipped_heads_are_such(
    run: Run, trained: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --heads and --output, as a first search is called."""
    heads = Path(shutil.copytree(trained, tmp_path / PLACES[1]))
    monkeypatch.setattr(loading, "shipped_heads", lambda _: heads)
    before = contents(heads)
    assert run(*SEARCH)[0] == 0
    assert contents(heads) == before
    assert medusa_kit.load("debug-tiny", device="cpu").tree.num_nodes == 3
    assert found(cache).is_file()


def test_nothing_is_written_where_heads_lie_and_all_of_them_find_it(
    heads: Path, tmp_path: Path, cache: Path
) -> None:
    """Another copy of the same heads too, as of a second environment; not other heads."""
    assert found_beside(heads, "tree.json") == heads / "tree.json", "nothing is found yet"
    tree = give_tree(heads)
    assert cache in tree.parents
    assert found_beside(heads, "tree.json") == tree
    assert found_beside(heads, "statistics.npz") == heads / "statistics.npz"
    again = Path(shutil.copytree(heads, tmp_path / "second" / heads.relative_to(tmp_path)))
    assert found_beside(again, "tree.json") == tree
    weights = again / "heads.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"1")
    assert found_beside(again, "tree.json") == again / "tree.json", "another release"


def test_a_folder_that_cannot_be_written_is_such(
    trained: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = Path(shutil.copytree(trained, tmp_path / "heads"))
    assert results_folder(heads) == heads
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != heads)
    assert cache in results_folder(heads).parents


def test_a_link_to_such_a_folder_is_such(heads: Path, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "link").symlink_to(heads)
    assert results_folder(tmp_path / "link") == results_folder(heads)
    assert cache in results_folder(heads).parents


def test_a_server_loads_such_heads_again_when_their_tree_is_found(
    trained: Path, tmp_path: Path
) -> None:
    root = tmp_path / "site-packages"
    shutil.copytree(trained, root / "tiny")
    folder = HeadsFolder(root)
    before = folder.find("tiny").version
    assert folder.find("tiny").version == before
    give_tree(root / "tiny")
    assert folder.find("tiny").version != before


def test_a_second_search_is_refused_and_clearing_waits(
    run: Run, trained: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = Path(shutil.copytree(trained, tmp_path / PLACES[0]))
    tree = give_tree(heads)
    shutil.copyfile(trained / "tree.json", tree)
    monkeypatch.setattr("medusa_kit.engine.load.load", raising(AssertionError("a base was loaded")))
    with FileLock(tree.parent.with_name(f".{tree.parent.name}.lock")):
        code, _, err = run(*SEARCH, "--heads", heads)
        assert (code, "another process is finding a tree" in err) == (2, True)
        assert run("cache", "--clear", "heads")[0] == 1
    assert tree.is_file()


def test_what_a_killed_search_left_is_cleared(
    run: Run, heads: Path, tmp_path: Path, cache: Path
) -> None:
    folder = give_tree(heads).parent
    (folder / ".0123abcd.tmp").mkdir()
    (folder / ".0123abcd.tmp" / "tree.json").write_text("{}")
    (folder / ".tree.json.0123abcd.tmp").write_text("{")
    assert run("cache", "--clear", "heads")[0] == 0
    assert not folder.exists()


def test_the_picture_that_is_uploaded_is_that_of_the_tree(heads: Path, cache: Path) -> None:
    (heads / "tree.png").write_bytes(b"of the tree that came with the heads")
    tree = give_tree(heads)
    options = CardOptions(repository="org/heads")

    def pictures() -> list[object]:
        files = upload_files(read_measured(heads), options)
        return [file.content for file in files if file.name == "tree.png"]

    (heads / "statistics.npz").unlink()
    assert pictures() == []
    (tree.parent / "tree.png").write_bytes(b"of this one")
    assert pictures() == [tree.parent / "tree.png"]


def test_a_cache_that_cannot_be_written_is_told_before_the_search(
    run: Run, trained: Path, tmp_path: Path, cache: Path
) -> None:
    heads = Path(shutil.copytree(trained, tmp_path / PLACES[0]))
    cache.mkdir()
    (cache / "heads").write_text("a file where the folder should be")
    code, out, err = run(*SEARCH, "--heads", heads)
    assert (bool(code), out) == (True, "")
    assert "--output" in err
