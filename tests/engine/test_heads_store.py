"""Heads by name: loaded once for all who ask, dropped under a cap, replaced on disk, refused.

What they draft beside each other in one batch is in test_heads_per_request.py.
"""

import asyncio
import gc
import shutil
import threading
import weakref
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from support.callers import all_at_once
from support.small_engines import build_engine, random_heads
from support.tiny_models import tiny_base

from medusa_kit.engine import heads_reading
from medusa_kit.engine.engine import Engine
from medusa_kit.engine.heads_store import HeadsStore
from medusa_kit.errors import (
    CheckpointError,
    ClosedError,
    ConfigError,
    DeviceMemoryError,
    IncompatibleBaseError,
    MedusaKitError,
    QueueFullError,
    UnknownModelError,
    UsageError,
)
from medusa_kit.heads import save_heads
from medusa_kit.tree.candidate_tree import CandidateTree, save_tree

SOON = 60.0  # seconds after which a test has failed


@pytest.fixture
def engine() -> Engine:
    return build_engine(tiny_base("llama"))


def put(root: Path, name: str, num_heads: int = 2, family: str = "llama", **kinds: Any) -> Path:
    save_heads(random_heads(tiny_base(family), num_heads, **kinds), root / name)
    return root / name


def size_of(engine: Engine, root: Path, name: str) -> int:
    with HeadsStore(engine, root) as store, store.get(name):
        return store.num_bytes


def states(store: HeadsStore) -> dict[str, str]:
    return {one.name: one.state for one in store.statuses()}


class Gate:
    """Holds loading up until it is opened, and counts it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened, self.count = threading.Event(), threading.Event(), 0
        really = heads_reading.load_heads

        def load_heads(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            self.reached.set()
            assert self.opened.wait(SOON)
            return really(*args, **kwargs)

        monkeypatch.setattr(heads_reading, "load_heads", load_heads)


def test_heads_come_with_their_tree(engine: Engine, tmp_path: Path) -> None:
    tree = CandidateTree([(0,), (1,), (0, 0)])
    save_tree(tree, put(tmp_path, "bushy", kind="hydra") / "tree.json", {})
    put(tmp_path, "chain", num_heads=3)
    (tmp_path / "notes").mkdir()
    with HeadsStore(engine, tmp_path) as store:
        assert states(store) == {"bushy": "available", "chain": "available"}
        with store.get("bushy") as held:
            assert held.engine.tree == tree
            assert held.engine.verifier is engine.verifier
        with store.get("chain") as held:
            assert held.engine.tree == CandidateTree.chain(3)
        told = {one.name: one for one in store.statuses()}
        assert [told["bushy"].kind, told["bushy"].num_heads] == ["hydra", 2]
        assert told["bushy"].state == "loaded"
        assert sum(one.num_bytes for one in told.values()) == store.num_bytes > 0


def test_all_who_ask_wait_for_one_load(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "heads")
    gate = Gate(monkeypatch)
    with HeadsStore(engine, tmp_path) as store:
        waiting = all_at_once(lambda _: store.load("heads"), 6)
        assert gate.reached.wait(SOON)
        assert states(store) == {"heads": "loading"}
        assert not any(future.done() for future in waiting)
        assert waiting[0].cancel()  # one hangs up; the others get theirs
        gate.opened.set()
        numbers = {future.result(SOON).number for future in waiting[1:]}
        assert (len(numbers), gate.count) == (1, 1)
        assert store.get("heads").number in numbers
        assert gate.count == 1


def test_asyncio_waits_for_a_load(engine: Engine, tmp_path: Path) -> None:
    put(tmp_path, "heads")

    async def ask(store: HeadsStore) -> str:
        held = await asyncio.wrap_future(store.load("heads"))
        return held.name

    with HeadsStore(engine, tmp_path) as store:
        assert asyncio.run(ask(store)) == "heads"


def test_a_failed_load_is_told_to_all_and_tried_again(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = put(tmp_path, "heads")
    whole = (folder / "heads.safetensors").read_bytes()
    (folder / "heads.safetensors").write_bytes(whole[:100])
    gate = Gate(monkeypatch)
    with HeadsStore(engine, tmp_path) as store:
        waiting = [store.load("heads") for _ in range(3)]
        gate.opened.set()
        errors = [future.exception(SOON) for future in waiting]
        assert len({id(error) for error in errors}) == 3  # each raised in a thread of its own
        for error in errors:
            assert isinstance(error, CheckpointError)
            assert error.message.startswith("heads/heads.safetensors cannot be read")
            assert str(tmp_path) not in str(error)
        (folder / "heads.safetensors").write_bytes(whole)
        assert store.get("heads").name == "heads"


def test_those_used_longest_ago_are_dropped_under_the_cap(engine: Engine, tmp_path: Path) -> None:
    for name in "abc":
        put(tmp_path, name)
    each = size_of(engine, tmp_path, "a")
    with HeadsStore(engine, tmp_path, most_bytes=2 * each) as store:
        with store.get("a") as first:
            number, heads = first.number, weakref.ref(first.engine.heads)
        del first
        for name in ("b", "a", "c"):  # a has been used after b
            store.get(name).close()
            assert store.num_bytes <= 2 * each
        assert states(store) == {"a": "loaded", "b": "available", "c": "loaded"}
        assert store.get("a").number == number
        for name in "cb":
            store.get(name).close()
        assert states(store) == {"a": "available", "b": "loaded", "c": "loaded"}
        gc.collect()
        assert heads() is None
        assert store.get("a").number != number


def test_heads_in_use_are_never_dropped(engine: Engine, tmp_path: Path) -> None:
    for name in "ab":
        put(tmp_path, name)
    each = size_of(engine, tmp_path, "a")
    with HeadsStore(engine, tmp_path, most_bytes=each) as store:
        with store.get("a") as held:
            clone = held.clone()
        with pytest.raises(QueueFullError, match="heads in use"):
            store.get("b")
        assert states(store) == {"a": "loaded", "b": "available"}
        clone.close()
        store.get("b").close()
        assert states(store) == {"a": "available", "b": "loaded"}
        store.get("a")  # whoever forgets to close them does not hold them for ever
        gc.collect()
        store.get("b").close()
    with (
        HeadsStore(engine, tmp_path, most_bytes=each - 1) as store,
        pytest.raises(DeviceMemoryError, match=f"take {each} bytes; at most {each - 1}"),
    ):
        store.get("a")


def test_a_folder_that_is_deleted_or_replaced(engine: Engine, tmp_path: Path) -> None:
    folder = put(tmp_path, "heads", num_heads=2)
    with HeadsStore(engine, tmp_path) as store:
        old = store.get("heads")
        size = store.num_bytes
        shutil.rmtree(folder)
        with pytest.raises(UnknownModelError, match="no heads 'heads' here"):
            store.load("heads")
        assert store.num_bytes == size  # in use still
        put(tmp_path, "heads", num_heads=3)
        new = store.get("heads")
        counts = [one.engine.heads.num_heads for one in (old, new) if one.engine.heads]
        assert counts == [2, 3]
        both = store.num_bytes
        old.close()
        assert store.num_bytes == both - size


def test_a_folder_that_changes_while_it_is_read_is_read_again(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "heads", num_heads=2)
    gate = Gate(monkeypatch)
    with HeadsStore(engine, tmp_path) as store:
        future = store.load("heads")
        assert gate.reached.wait(SOON)
        put(tmp_path, "heads", num_heads=3)
        gate.opened.set()
        heads = future.result(SOON).engine.heads
        assert heads is not None
        assert heads.num_heads == 3


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../outside", "heads/../../outside", "/etc", "heads/", "a\\b", "\0", "~",
     "heads\n", ".hidden", "link", "\ud800", "x" * 5000, "nothing", "org/name"],
)  # fmt: skip
def test_names_cannot_leave_the_folder(engine: Engine, tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    put(root, "heads")
    put(root, ".hidden")
    put(tmp_path, "outside")
    (root / "link").symlink_to(tmp_path / "outside")
    with HeadsStore(engine, root) as store:
        with pytest.raises(UnknownModelError):
            store.load(name)
        assert states(store) == {"heads": "available"}


def test_what_may_not_be_loaded_is_refused(engine: Engine, tmp_path: Path) -> None:
    inside = put(tmp_path, "linked")
    weights = inside / "heads.safetensors"
    weights.rename(tmp_path / "elsewhere.safetensors")
    weights.symlink_to(tmp_path / "elsewhere.safetensors")
    put(tmp_path, "other", family="llama-tied")
    (tmp_path / "pickled").mkdir()
    torch.save({"0.0.linear.weight": torch.zeros(32, 32)}, tmp_path / "pickled/medusa_lm_head.pt")
    refused: list[tuple[str, type[MedusaKitError], str]] = [
        ("linked", CheckpointError, "a link that leads out of their folder"),
        ("other", IncompatibleBaseError, "do not fit"),
        ("pickled", CheckpointError, "is a pickle; expected safetensors"),
    ]
    with HeadsStore(engine, tmp_path) as store:
        for name, kind, message in refused:
            with pytest.raises(kind, match=message):
                store.get(name)
        assert store.num_bytes == 0
        store.statuses()
    with pytest.raises(ConfigError, match="does not exist"):
        HeadsStore(engine, tmp_path / "nothing")
    with pytest.raises(UsageError, match="no repository"):
        HeadsStore(engine, None, ["not a name"])


def test_only_allowed_names_are_fetched_from_the_hub(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = list[str]()

    def local_heads_folder(name: str) -> Path:
        fetched.append(name)
        return put(tmp_path, "cache")

    monkeypatch.setattr("medusa_kit.engine.heads_folder.local_heads_folder", local_heads_folder)
    with HeadsStore(engine, None, ["org/heads"]) as store:
        for name in ("org/others", "heads", "org/heads@main"):
            with pytest.raises(UnknownModelError):
                store.load(name)
        assert fetched == []
        with store.get("org/heads") as first, store.get("org/heads") as second:
            assert first.number == second.number
        assert fetched == ["org/heads"]
        assert states(store) == {"org/heads": "loaded"}


def test_closing_tells_those_who_wait(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "heads")
    gate = Gate(monkeypatch)
    store = HeadsStore(engine, tmp_path)
    future: Future[Any] = store.load("heads")
    assert gate.reached.wait(SOON)
    store.close()
    with pytest.raises(ClosedError):
        future.result(SOON)
    gate.opened.set()
    with pytest.raises(ClosedError):
        store.load("heads")
