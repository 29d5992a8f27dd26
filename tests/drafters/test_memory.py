"""What drafters keep: made once for each key, and shared by engines as far as heads are no part."""

import threading

from support.small_engines import build_engine, random_heads
from support.tiny_models import tiny_base

from medusa_kit.drafters.memory import Kept, Memory
from medusa_kit.engine.load import with_heads
from medusa_kit.tree.candidate_tree import CandidateTree

SOON = 60.0  # seconds after which a test has failed


def test_who_asks_for_another_key_does_not_wait() -> None:
    kept, going, go_on = Kept(), threading.Event(), threading.Event()
    made = list[str]()

    def slow() -> str:
        made.append("slow")
        going.set()
        assert go_on.wait(SOON)
        return "slow"

    threads = [threading.Thread(target=kept.remembered, args=("a", slow)) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert going.wait(SOON)
    assert kept.remembered("b", lambda: "quick") == "quick"
    go_on.set()
    for thread in threads:
        thread.join(SOON)
    assert kept.remembered("a", lambda: "again") == "slow"
    assert made == ["slow"]


def test_what_cannot_be_made_is_tried_again() -> None:
    kept = Kept()
    for _ in range(2):
        try:
            kept.remembered("a", lambda: 1 // 0)
        except ZeroDivisionError:
            assert len(kept) == 0
    assert kept.remembered("a", lambda: 3) == 3


def test_other_heads_share_all_but_what_heads_are_in() -> None:
    base = tiny_base("llama")
    plain = build_engine(base)
    tree = CandidateTree.chain(2)
    first, second = (with_heads(plain, random_heads(base, 2), tree=tree) for _ in range(2))
    for engine in (first, second):
        assert engine.memory.loaded is plain.memory.loaded
        assert engine.memory.learned is plain.memory.learned
    for drafter in ("auto", "recycling"):
        first.generate([3, 4], max_new_tokens=3, drafter=drafter)
    assert len(first.memory) > 0
    assert len(second.memory) == 0
    assert len(plain.memory.learned) > 0


def test_the_drafter_inside_a_draft_model_learns_apart() -> None:
    memory = Memory()
    inside = memory.of_draft_model(1)
    inside.learned.remembered("table", dict)
    assert memory.for_other_heads().of_draft_model(1).learned is inside.learned
    fresh = memory.without_texts().of_draft_model(1)
    assert fresh.loaded is inside.loaded
    assert len(fresh.learned) == 0
