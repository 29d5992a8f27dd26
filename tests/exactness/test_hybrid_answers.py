"""Families whose layers carry a state: greedy answers equal those of plain transformers, whatever
chains of draft tokens are verified.

The oracle is transformers' own `generate` on a second, untouched model, with its own cache.
"""

from functools import cache

import pytest
import torch
from support.models.hybrids import CHAINS, tiny_hybrid, tiny_hybrid_base
from support.partly_knowing import answered, answered_in
from support.samples import pairs
from support.small_engines import build_engine, random_heads, random_prompt
from support.tiny_models import CONTEXT, STOP, tiny_base

from medusa_kit.engine.engine import Engine
from medusa_kit.errors import ConfigError
from medusa_kit.infer.chains.verifier import MAX_UNREAD, ChainVerifier
from medusa_kit.infer.decode.batch import Batch
from medusa_kit.infer.decode.drafter import Drafter, State
from medusa_kit.infer.decode.request import Request, make_request
from medusa_kit.infer.forest import Forest
from medusa_kit.settings.drafters import DRAFTERS
from medusa_kit.settings.sampling import SamplingParams

# Those that differ most: a gated delta rule beside attention, Mamba-2 with layers that keep
# nothing, short convolutions, and both in each layer.
DIFFERENT = ["qwen3_5", "nemotron_h", "lfm2", "falcon_h1"]


@cache
def plain(family: str, prompt: tuple[int, ...], tokens: int, stop: int | None = STOP) -> list[int]:
    """transformers' own greedy answer."""
    model, ids = _model(family), torch.tensor([prompt])
    model.generation_config.eos_token_id = stop
    whole = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
    )
    return whole[0, len(prompt) :].tolist()


_model = cache(tiny_hybrid)  # a model that nobody else has


def plain_answer(family: str, prompt: list[int], tokens: int, stop: int | None = STOP) -> list[int]:
    return list(plain(family, tuple(prompt), tokens, stop))


@pytest.mark.parametrize("family", CHAINS)
def test_random_chains_in_a_batch(family: str) -> None:
    engine = build_engine(tiny_hybrid_base(family))
    assert isinstance(engine.verifier, ChainVerifier)
    assert engine.check.relative_error < 1e-4
    prompts = [random_prompt(length, length) for length in (1, 9, 20)]
    truths = {tuple(prompt): plain_answer(family, prompt, 16) for prompt in prompts}
    assert len({token for answer in truths.values() for token in answer}) > 4, "proves too little"
    rows = answered(engine, truths, prompts, 16)
    assert [row.token_ids for row in rows] == list(truths.values())
    assert sum(row.num_steps for row in rows) < sum(len(row.token_ids) for row in rows) - 3
    assert "chain" in rows[0].steps_run_by


@pytest.mark.parametrize("family", CHAINS)
def test_a_text_goes_on_after_an_answer(family: str) -> None:
    """Prefixes are shared at states that were kept: behind a prompt, and behind its answer."""
    engine = build_engine(tiny_hybrid_base(family))
    batch = Batch(engine.verifier, 2)
    first = random_prompt(24, 24)
    [answered] = batch_answers(family, batch, [first])
    assert answered.token_ids == plain_answer(family, first, 12)
    longer = [*first, *answered.token_ids, *random_prompt(5, 1)]
    other = [*first, *random_prompt(6, 2)]  # leaves the text where the answer began
    again = batch_answers(family, batch, [longer, other])
    assert [row.token_ids for row in again] == [
        plain_answer(family, p, 12) for p in (longer, other)
    ]
    assert len(first) <= again[0].num_cached < len(longer)
    assert again[1].num_cached == len(first)
    [strange] = batch_answers(family, batch, [random_prompt(9, 9)])  # nothing is left of them
    assert strange.num_cached == 0
    assert strange.token_ids == plain_answer(family, random_prompt(9, 9), 12)


def batch_answers(family: str, batch: Batch, prompts: list[list[int]]) -> list[Request]:
    truths = {tuple(prompt): plain_answer(family, prompt, 12) for prompt in prompts}
    return answered_in(batch, truths, 12)


@pytest.mark.parametrize("family", DIFFERENT)
def test_sixteen_rows_of_different_length(family: str) -> None:
    engine = build_engine(tiny_hybrid_base(family))
    prompts = [random_prompt(length, length) for length in range(1, 17)]
    truths = {tuple(prompt): plain_answer(family, prompt, 12) for prompt in prompts}
    together = answered(engine, truths, prompts, 12)
    assert [row.token_ids for row in together] == list(truths.values())


@pytest.mark.parametrize("family", DIFFERENT)
def test_the_last_tokens_of_the_context(family: str) -> None:
    engine = build_engine(tiny_hybrid_base(family))
    assert engine.base.info.context_length == CONTEXT
    prompt = random_prompt(CONTEXT - 9, 5)
    expected = plain_answer(family, prompt, 9)
    [row] = answered(engine, {tuple(prompt): expected + random_prompt(8, 1)}, [prompt], 50)
    assert row.token_ids == expected


@pytest.mark.parametrize("family", DIFFERENT)
def test_a_stop_token_inside_the_chain(family: str) -> None:
    engine = build_engine(tiny_hybrid_base(family))
    prompts = [random_prompt(length, length + 40) for length in (3, 8, 14)]
    free = {tuple(p): plain_answer(family, p, 20, stop=None) for p in prompts}
    first = free[tuple(prompts[0])]
    stop = next(token for token in first[5:] if token not in first[:5])
    engine.base.model.generation_config.eos_token_id = stop
    rows = answered(engine, free, prompts, 20)
    for row, answer in zip(rows, free.values(), strict=True):
        end = answer.index(stop) + 1 if stop in answer else len(answer)
        assert row.token_ids == answer[:end]


@cache
def engine_of(family: str) -> Engine:
    base = tiny_hybrid_base(family)
    return build_engine(base, heads=random_heads(base), draft_model=tiny_base("llama"))


PROMPTS = [random_prompt(7, 1) * 4, random_prompt(5, 2), random_prompt(CONTEXT - 12, 3)]
TOKENS = 30


@pytest.mark.parametrize(
    ("family", "name"),
    pairs(DIFFERENT, [name for name in DRAFTERS if name != "mtp"]),
)
def test_every_drafter(family: str, name: str) -> None:
    engine = engine_of(family)
    expected = [plain_answer(family, p, min(TOKENS, CONTEXT - len(p))) for p in PROMPTS]
    together = engine.generate(PROMPTS, drafter=name, max_new_tokens=TOKENS)
    assert [result.token_ids for result in together] == expected
    sampling = {"temperature": 0.7, "top_p": 0.9, "seed": 3, "max_new_tokens": 20}
    drawn = engine.generate(PROMPTS[0], drafter="none", **sampling).token_ids
    assert engine.generate(PROMPTS[0], drafter=name, **sampling).token_ids == drawn


def test_a_hybrid_is_no_draft_model() -> None:
    engine = build_engine(tiny_base("llama"), draft_model=tiny_hybrid_base("lfm2"))
    with pytest.raises(ConfigError, match="cannot be a draft model"):
        engine.generate(PROMPTS[0], drafter="draft-model")


@pytest.mark.parametrize("family", DIFFERENT)
def test_guesses_that_are_never_right(family: str) -> None:
    """What was accepted is read again, but never more of it than a few tokens."""
    engine = build_engine(tiny_hybrid_base(family))
    prompt = random_prompt(6, 6)
    expected = plain_answer(family, prompt, 30)
    wrong = [token + 1 if token + 1 < 96 else 3 for token in expected]
    batch = Batch(engine.verifier, 1)
    row = make_request(engine.verifier, prompt, SamplingParams(), 30)
    batch.add(row, AlwaysWrong(wrong, len(prompt)))
    most = 0
    while batch.num_requests:
        batch.step()
        batch.raise_error()
        most = max(most, batch.cache.num_unread([0]))
    assert row.token_ids == expected
    assert 1 < most <= MAX_UNREAD + 1


class AlwaysWrong(Drafter):
    """Drafts one token that the base does not choose."""

    num_nodes, name = 2, "always wrong"

    def __init__(self, wrong: list[int], start: int) -> None:
        self.wrong, self.start = wrong, start

    def propose(self, state: State) -> Forest:
        place = len(state.tokens[0]) - self.start + 1
        guess = self.wrong[place] if place < len(self.wrong) else 3
        return Forest.chains([[state.roots_B[0], guess]], torch.device("cpu"))
