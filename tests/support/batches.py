"""Schedulers of tiny engines: requests that come and go, drafters to share, what each gets alone.

The reference is transformers' own generate for greedy rows, and for those that draw the same
request alone, decoded plainly.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from medusa_kit.drafters.factory import DraftContext, build_drafter
from medusa_kit.drafters.heads.choice import draft_with
from medusa_kit.engine.engine import Engine
from medusa_kit.infer.decode import schedule
from medusa_kit.infer.decode.batches import Batches, BatchStats
from medusa_kit.infer.decode.caller import Caller
from medusa_kit.infer.decode.drafter import Drafter
from medusa_kit.infer.decode.request import Emitted, Request, make_request
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.dynamic import DynamicTree
from support.small_engines import BUSHY, engine_with_heads, random_prompt
from support.tiny_models import tiny_base

TEXT = ("none", "prompt-lookup", "suffix", "recycling", "auto")
DRAFTERS = ["none", "heads", "other heads", "dynamic", "heads that pay", "prompt-lookup", "auto"]
MORE_DRAFTERS = [*DRAFTERS, "suffix", "recycling"]
LONGEST = 14
DRAWN = SamplingParams(0.9, top_p=0.95, seed=5)


@dataclass(frozen=True)
class Asked:
    arrives: int
    prompt: int  # its length, and the seed of its tokens
    tokens: int
    drafter: str
    drawn: bool
    leaves: int | None  # cancelled at this step, if it is still there


REQUESTS = st.lists(
    st.builds(
        Asked,
        arrives=st.integers(0, 10),
        prompt=st.integers(1, 40) | st.sampled_from([20, 33]),  # some are asked again
        tokens=st.integers(1, LONGEST),
        drafter=st.sampled_from(MORE_DRAFTERS),
        drawn=st.booleans(),
        leaves=st.none() | st.integers(0, 14),
    ),
    min_size=1,
    max_size=7,
)


@cache
def engine_for(family: str) -> Engine:
    return engine_with_heads(tiny_base(family))


class Serving(Caller):
    """Batches with one caller, whose requests this steps. Options as of both."""

    def __init__(
        self, verifier: Any, max_rows: int, max_pause: float | None = None, **options: Any
    ) -> None:
        self._begin(Batches(verifier, **options), max_rows, max_pause)
        self.batches.prepare(self)

    @classmethod
    def of(cls, batches: Batches, max_rows: int) -> "Serving":
        """With batches that have served others."""
        serving = cls.__new__(cls)
        serving._begin(batches, max_rows)
        return serving

    def _begin(self, batches: Batches, max_rows: int, max_pause: float | None = None) -> None:
        Caller.__init__(self, max_rows, max_pause)
        self.batches, self.verifier = batches, batches.verifier
        self._emitted, self._finished = list[Any](), list[Request]()

    def add(self, request: Request, drafter: Any) -> None:
        self.batches.add(request, drafter, self)

    def step(self) -> Emitted:
        self._emitted = []
        self.batches.step()
        return self._emitted

    def hear(self, emitted: Emitted, finished: list[Request]) -> None:
        self._emitted += emitted
        self._finished += finished

    def take_finished(self) -> list[Request]:
        finished, self._finished = self._finished, []
        return finished

    @property
    def stats(self) -> BatchStats:
        return self.batches.stats_of(self)


def drafters(engine: Engine) -> dict[str, Drafter]:
    """Each is shared by the rows that name it."""
    heads = engine.heads
    assert heads is not None
    context = DraftContext(engine.verifier, heads, tree=BUSHY, batch_size=4)
    return {
        **{name: build_drafter(name, context) for name in TEXT},
        "heads": draft_with(heads, BUSHY),
        "other heads": draft_with(heads, CandidateTree.chain(2)),
        "dynamic": draft_with(heads, DynamicTree(5, (1.0, 1.0, 1.0))),
        "heads that pay": build_drafter("medusa", replace(context, paying=True)),
    }


@cache
def alone(family: str, prompt: int, drawn: bool) -> list[int]:
    """LONGEST tokens, or fewer where a stop token comes. `prompt`: its length, and the seed of its
    tokens."""
    engine, ids = engine_for(family), random_prompt(prompt, prompt)
    if drawn:
        answer = engine.generate(
            ids, max_new_tokens=LONGEST, drafter="none", temperature=0.9, top_p=0.95, seed=5
        )
        return list(answer.token_ids)
    with torch.no_grad():
        out_1T = tiny_base(family).model.generate(
            torch.tensor([ids]), max_new_tokens=LONGEST, do_sample=False,
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        )  # fmt: skip
    return out_1T[0, len(ids) :].tolist()


@contextmanager
def pieces_of(tokens: int | None) -> Iterator[float | None]:
    """A pause for batches in which so many tokens of prompts are read between two steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "MIN_TOKENS", tokens)
        yield None if tokens is None else 1e-9


def row_for(
    engine: Engine, prompt: int, tokens: int, drawn: bool = False, verifier: Any = None
) -> Request:
    """`prompt`: its length, and the seed of its tokens. `verifier`: in place of the engine's."""
    sampling = DRAWN if drawn else SamplingParams()
    ids = random_prompt(prompt, prompt)
    return make_request(verifier or engine.verifier, ids, sampling, tokens)


def exact(family: str, row: Request) -> list[int]:
    """What it gets alone."""
    drawn = not row.sampler.params.greedy
    return alone(family, len(row.prompt_ids), drawn)[: row.max_new_tokens]


def served(scheduler: Serving, rows: Sequence[Request], most: int = 500) -> None:
    """Step until these have left."""
    steps = 0
    while any(row.finish_reason is None for row in rows):
        scheduler.step()
        steps += 1
        assert steps < most, "somebody starves"
    assert set(scheduler.take_finished()) >= set(rows)


def check_slots(scheduler: Serving, family: str, prompts: Sequence[int]) -> None:
    """No slot is lost, and each caches what it is said to cache: requests with these prompts, which
    may have been read before, get what they get alone, as many at once as there are slots."""
    engine, count = engine_for(family), scheduler.max_rows
    drafter = drafters(engine)["heads"]
    rows = [
        row_for(engine, prompts[n % len(prompts)], LONGEST, verifier=scheduler.verifier)
        for n in range(count)
    ]
    for row in rows:
        row.stop_ids = frozenset()  # all are there after one step
        scheduler.add(row, drafter)
    scheduler.step()
    assert (stats := scheduler.stats).running + stats.reading == count
    served(scheduler, rows)
    for row in rows:
        own = exact(family, row)
        assert (row.error, row.token_ids[: len(own)]) == (None, own)
    assert (stats := scheduler.stats).running + stats.reading == 0


def run(scheduler: Serving, requests: Sequence[Asked], shared: Mapping[str, Any],
        engine: Engine) -> list[Request]:  # fmt: skip
    """The rows of these requests, once all have left."""
    rows = [
        row_for(engine, one.prompt, one.tokens, one.drawn, scheduler.verifier) for one in requests
    ]
    heard: dict[Request, list[int]] = {row: [] for row in rows}
    last, left = max(request.arrives for request in requests), set[Request]()
    step = 0
    while step <= last or len(left) < len(rows):
        for request, row in zip(requests, rows, strict=True):
            if request.arrives == step:
                scheduler.add(row, shared[request.drafter])
            if request.leaves == step and row.finish_reason is None:
                row.cancel()
        for row, tokens in scheduler.step():
            heard[row] += tokens
        left |= set(scheduler.take_finished())
        step += 1
        assert step < 500, "somebody starves"
    assert [row.token_ids for row in rows] == [heard[row] for row in rows]
    return rows


def expected(row: Request, request: Asked, alone: Sequence[int]) -> list[int]:
    """`alone`: LONGEST tokens that it gets alone."""
    wanted = list(alone[: request.tokens])
    return wanted[: len(row.token_ids)] if row.finish_reason == "cancelled" else wanted
