"""`SharedBatch.submit(heads=…)`: requests with heads of their own, beside others in one batch.

The reference is plain decoding, which no heads may change.
"""

import gc
import shutil
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
from support.small_engines import build_engine, random_heads, random_prompt
from support.tiny_models import tiny_base

from medusa_kit.engine.heads_store import HeadsStore
from medusa_kit.errors import ClosedError, ConfigError, QueueFullError
from medusa_kit.heads import save_heads
from medusa_kit.tree.candidate_tree import CandidateTree, save_tree
from medusa_kit.tree.dynamic import DynamicTree
from medusa_kit.tree.plan import TreePlan, save_plan

SOON = 60.0  # seconds after which a test has failed
TREES: dict[str, Any] = {
    "few": CandidateTree([(0,), (1,), (0, 0)]),
    "many": CandidateTree([(0,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 0, 0)]),
    "grown": None,
}


def root_with_heads(root: Path, family: str) -> Path:
    """Three kinds, of 2, 4 and 3 heads, the last ones with a dynamic tree."""
    base = tiny_base(family)
    for name, count, kind in (
        ("few", 2, "medusa"),
        ("many", 4, "hydra"),
        ("grown", 3, "recurrent"),
    ):
        save_heads(random_heads(base, count, kind=kind), root / name)
        path = root / name / "tree.json"
        if (tree := TREES[name]) is not None:
            save_tree(tree, path, {})
        else:
            plan = TreePlan.of(CandidateTree.chain(3), DynamicTree(5, (1.0, 1.0, 1.0)))
            save_plan(plan, path, {})
    return root


def drafter_of(answer: Any) -> Any:
    return answer.submission.drafter


@pytest.mark.parametrize("guesses", ["all", "paying"])
@pytest.mark.parametrize("family", ["llama-tied", "llama"])  # in C++, where it can be built
def test_differing_heads_share_a_batch(family: str, guesses: str, tmp_path: Path) -> None:
    engine = build_engine(tiny_base(family), guesses=guesses)
    asks: list[tuple[str | None, dict[str, Any]]] = [
        ("few", {}),
        ("many", {}),
        (None, {"drafter": "prompt-lookup"}),
        ("grown", {}),
        ("many", {"temperature": 1.0, "seed": 3}),
        (None, {"drafter": "suffix"}),
        ("few", {"drafter": "auto"}),
        ("few", {"drafter": "medusa", "temperature": 0.7, "seed": 4}),
        (None, {}),
    ]
    prompts = [random_prompt(4 + 3 * number, number) for number in range(len(asks))]
    with (
        HeadsStore(engine, root_with_heads(tmp_path, family)) as store,
        engine.shared_batch(max_rows=len(asks)) as shared,
    ):
        answers = []
        for prompt, (name, options) in zip(prompts, asks, strict=True):
            heads = {} if name is None else {"heads": store.get(name)}
            answers.append(shared.submit(prompt, max_new_tokens=16, **heads, **options))
        drafters = [drafter_of(answer) for answer in answers]
        assert drafters[0] is drafters[7]  # and so the heads run once for both
        assert drafters[1] is drafters[4]
        assert len({id(one) for one in drafters}) == len(asks) - 2
        for prompt, (_, options), answer in zip(prompts, asks, answers, strict=True):
            plain = engine.generate(prompt, max_new_tokens=16, **{**options, "drafter": "none"})
            found = answer.result()
            assert found.token_ids == plain.token_ids
            assert found.finish_reason == plain.finish_reason
        if guesses == "all":
            nodes = [answers[number].result().stats.nodes_per_step for number in (0, 1, 3, 8)]
            assert nodes == [4.0, 6.0, 5.0, 1.0]
        assert not any(status.in_use for status in store.statuses())


def test_rows_in_flight_go_on_when_their_heads_are_deleted(tmp_path: Path) -> None:
    """Replaced by others, and other rows with those beside them."""
    engine = build_engine(tiny_base("llama"))
    root = root_with_heads(tmp_path, "llama")
    held_up, go_on = threading.Event(), threading.Event()

    def hold_up(_: list[int]) -> None:
        held_up.set()
        assert go_on.wait(SOON)

    prompt = random_prompt(6, 6)
    with HeadsStore(engine, root) as store, engine.shared_batch(max_rows=2) as shared:
        ask: Any = lambda **more: shared.submit(  # noqa: E731
            prompt, max_new_tokens=16, heads=store.get("few"), **more
        )
        first = ask(on_tokens=hold_up)
        assert held_up.wait(SOON)
        shutil.rmtree(root / "few")
        (root / "many").rename(root / "few")
        try:
            second = ask()
        finally:
            go_on.set()
        assert drafter_of(first) is not drafter_of(second)
        plain = engine.generate(prompt, max_new_tokens=16, drafter="none")
        found = [first.result(), second.result()]
        assert [one.token_ids for one in found] == [plain.token_ids] * 2
        assert [one.stats.nodes_per_step for one in found] == [4.0, 6.0]


def test_heads_are_in_use_until_their_row_has_ended(tmp_path: Path) -> None:
    engine = build_engine(tiny_base("llama"))
    prompt = random_prompt(6, 6)
    go_on = threading.Event()

    def in_use(store: HeadsStore) -> list[str]:
        return [status.name for status in store.statuses() if status.in_use]

    with HeadsStore(engine, root_with_heads(tmp_path, "llama")) as store:
        with engine.shared_batch(max_rows=1, most_waiting=1) as shared:
            plain = shared.submit(
                prompt, max_new_tokens=8, on_tokens=lambda _: go_on.wait(SOON) or None
            )
            with store.get("few") as heads:
                waiting = shared.submit(prompt, max_new_tokens=8, heads=heads)
            assert in_use(store) == ["few"]
            with store.get("many") as heads, pytest.raises(QueueFullError):
                shared.submit(prompt, heads=heads)
            assert in_use(store) == ["few"]
            plain.cancel()
            go_on.set()
            waiting.result()
            assert in_use(store) == []
            waiting = shared.submit(prompt, heads=store.get("few"))
            waiting.cancel()
            waiting.result()
            assert in_use(store) == []
            answer = shared.submit(
                prompt, max_new_tokens=8, heads=store.get("few"), drafter="suffix"
            )
            answer.result()
        with store.get("few") as heads, pytest.raises(ClosedError):
            shared.submit(prompt, heads=heads)
        assert in_use(store) == []
        loaded = weakref.ref(store.get("few").engine.heads)
        shutil.rmtree(tmp_path / "few")
        assert store.folder.names() == ["grown", "many"]
        store.statuses()
        with pytest.raises(Exception, match="no heads 'few'"):
            store.load("few")
        del heads, waiting, answer, plain
        gc.collect()
        assert loaded() is None


def test_heads_of_another_engine_are_refused(tmp_path: Path) -> None:
    engine, other = (build_engine(tiny_base("llama")) for _ in range(2))
    with (
        HeadsStore(other, root_with_heads(tmp_path, "llama")) as store,
        engine.shared_batch() as shared,
        store.get("few") as heads,
        pytest.raises(ConfigError, match="another engine's base"),
    ):
        shared.submit([3, 4], heads=heads)


def test_named_heads_draft_where_the_engine_would_not(tmp_path: Path) -> None:
    engine = build_engine(tiny_base("llama"), drafter="suffix", drafter_options={"num_nodes": 3})
    with (
        HeadsStore(engine, root_with_heads(tmp_path, "llama")) as store,
        engine.shared_batch() as shared,
        store.get("few") as heads,
    ):
        found = shared.generate([3, 4, 5], max_new_tokens=4, heads=heads)
        assert found.stats.drafter.startswith("medusa")
