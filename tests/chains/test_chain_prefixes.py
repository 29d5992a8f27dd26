"""What later texts need not read again on models that carry a state, and what that takes."""

import pytest
import torch
from support.models.hybrids import tiny_hybrid_base
from support.small_engines import build_engine, random_heads, random_prompt

from medusa_kit.engine.engine import Engine
from medusa_kit.errors import ConfigError
from medusa_kit.infer.chains.cache import MAX_KEPT, ChainCache
from medusa_kit.infer.chains.verifier import ChainVerifier
from medusa_kit.infer.memory import cache_bytes_per_token

FAMILIES = ["qwen3_5", "mamba2"]
SYSTEM = random_prompt(40, 40)


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request: pytest.FixtureRequest) -> Engine:
    base = tiny_hybrid_base(request.param)
    return build_engine(base, heads=random_heads(base))


def answer(engine: Engine, prompt: list[int], **options: object) -> tuple[list[int], int]:
    """(the answer, tokens of the prompt that were not read), checked against plain decoding."""
    found = engine.generate(prompt, max_new_tokens=8, **options)  # type: ignore[arg-type]
    ids_1T = torch.tensor([prompt])
    mask = torch.ones_like(ids_1T)
    plain_1T = engine.base.model.generate(
        ids_1T, attention_mask=mask, max_new_tokens=8, do_sample=False
    )
    assert found.token_ids == plain_1T[0, len(prompt) :].tolist()
    return found.token_ids, found.stats.cached_tokens


def test_a_beginning_that_texts_share_is_read_twice_at_most(engine: Engine) -> None:
    """The second text shows where they part; from the third on it is known."""
    cached = [answer(engine, [*SYSTEM, *random_prompt(9, seed)])[1] for seed in range(5)]
    assert cached == [0, 0, 40, 40, 40]


def test_a_question_asked_again_goes_on_where_its_reading_began(engine: Engine) -> None:
    first = random_prompt(30, 7)
    said, _ = answer(engine, first)
    longer = [*first, *said, *random_prompt(30, 8)]
    _, cached = answer(engine, longer)
    assert cached >= len(first)
    assert answer(engine, longer)[1] == cached  # the turn before, and the question whole
    assert answer(engine, longer)[1] == len(longer) - 1  # asked twice already


def test_a_piece_that_failed_midway_is_read_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark divides a piece into two forwards. Where the second one fails, the row goes back to
    where the piece began."""
    verifier, prompt = engine.verifier, random_prompt(30, 2)
    cache = verifier.new_cache(1, 64)
    assert isinstance(cache, ChainCache)
    cache.mark(0, 15)
    verifier.read_prompts(cache, [0], [prompt[:10]])
    forward, calls = ChainVerifier._forward, list[int]()

    def fails_once(self: ChainVerifier, *given: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError
        return forward(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(ChainVerifier, "_forward", fails_once)
    with pytest.raises(torch.OutOfMemoryError):
        verifier.read_prompts(cache, [0], [prompt[10:20]])
    cache.keep_first(0, 10)  # as a batch does before it tries again
    verifier.read_prompts(cache, [0], [prompt[10:20]])
    _, logits_BV = verifier.read_prompts(cache, [0], [prompt[20:]])
    expected = engine.base.model(torch.tensor([prompt]), use_cache=False).logits[0, -1]
    assert float((logits_BV[0] - expected).abs().max()) < 1e-3 * float(expected.std())


def test_a_prompt_read_in_pieces_keeps_no_state_of_each(engine: Engine) -> None:
    cache, prompt = engine.verifier.new_cache(1, 64), random_prompt(40, 1)
    assert isinstance(cache, ChainCache)
    cache.keep_first(0, 0)
    cache.mark(0, 15)
    for start in range(0, 40, 10):
        engine.verifier.read_prompts(cache, [0], [prompt[start : start + 10]])
        assert cache.lengths == [start + 10]
    assert [cache.usable(0, length) for length in (14, 15, 39, 40)] == [0, 15, 15, 40]


def test_states_are_counted_and_few(engine: Engine) -> None:
    assert isinstance(engine.verifier, ChainVerifier)
    cache = engine.verifier.new_cache(2, 256)
    assert isinstance(cache, ChainCache)
    text, sizes = random_prompt(200, 3), []
    for end in range(20, 200, 20):  # a conversation of nine turns
        cache.keep_first(0, cache.usable(0, end - 20))
        engine.verifier.read_prompts(cache, [0], [text[cache.lengths[0] : end]])
        sizes.append(cache.num_bytes)
    states = {id(one) for kept in cache._kept for one in kept.values()}
    assert len(states) <= MAX_KEPT
    per_token = cache_bytes_per_token(engine.base, engine.verifier.num_layers)
    assert (per_token == 0) == (engine.base.info.model_type == "mamba2")
    assert sizes[0] > 0
    if not per_token:  # nothing but states
        assert sizes[-1] == sizes[3]
    cache.copy_first(0, 1, 180)
    assert cache.num_bytes <= sizes[-1] + 180 * per_token + 2**16  # a page for each layer, at most
    cache.forget(0)
    assert cache.usable(0, 200) == 0


def test_no_steps_of_fixed_shapes(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="the model carries a state"):
        build_engine(engine.base, fixed_shapes="always")
