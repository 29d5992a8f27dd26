"""How much room a batch takes that several callers share: no call takes another's, is refused for
it, or leaves it behind.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import put_adapter
from support.batches import Serving, drafters, row_for
from support.cuda_stand_in import Device
from support.small_engines import (
    BUSHY,
    build_engine,
    endless_base,
    engine_with_heads,
    random_heads,
    random_prompt,
    reusing,
)
from support.tiny_models import tiny_base, tiny_model

from medusa_kit.base.model import wrap_model
from medusa_kit.engine.engine import Engine
from medusa_kit.engine.heads_store import HeadsStore
from medusa_kit.infer import tree_cache
from medusa_kit.infer.decode.batch import Batch
from medusa_kit.infer.decode.request import Request, make_request
from medusa_kit.infer.device.cache import FixedCache
from medusa_kit.settings.sampling import SamplingParams

LONG = 200  # tokens of the longer answers


def engine_for(family: str = "llama", **options: Any) -> Engine:
    """Whose context is long and whose answers have no end."""
    model = tiny_model(family, max_position_embeddings=2048)
    model.generation_config.eos_token_id = None
    base = wrap_model(model, None, f"long-{family}")
    return build_engine(base, heads=random_heads(base), tree=BUSHY, **options)


def row(engine: Engine, prompt: int, tokens: int) -> Request:
    return make_request(engine.verifier, random_prompt(prompt, prompt), SamplingParams(), tokens)


def batches(engine: Engine) -> list[Batch]:
    return [*engine.scheduler.idle, *engine.scheduler.batches.used]


def test_a_larger_tree_takes_no_captured_forward_from_the_others() -> None:
    """The trees of all are padded to the largest, which the longest has no room for."""
    engine = engine_for(fixed_shapes="always")
    engine.scheduler = reusing(engine.verifier)
    prompts = [random_prompt(n, n) for n in (5, 9)]
    expected = engine.generate(prompts, max_new_tokens=20, batch_size=2, drafter="none")
    long = row(engine, 12, 256 - 12)
    steps = engine.scheduler.run([long], engine.drafter_for("none"))
    next(steps), next(steps)
    (batch,) = batches(engine)
    assert isinstance(batch.cache, FixedCache)
    before = dict(batch.cache.forwards)
    assert before
    answer = engine.generate(prompts[1], max_new_tokens=20, drafter="medusa")
    assert answer.token_ids == expected[1].token_ids
    assert all(batch.cache.forwards.get(shape) is one for shape, one in before.items())
    steps.close()


@pytest.mark.parametrize("family", ["llama-tied", "gpt2"])
def test_many_short_prompts_beside_a_long_answer(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is memory for them alone, and none for so many slots as long as the other's."""
    engine = engine_with_heads(tiny_base(family))
    prompts = [random_prompt(4 + n % 3, n) for n in range(20)]
    expected = engine.generate(prompts, max_new_tokens=6, batch_size=20)
    engine.scheduler = reusing(engine.verifier)
    long = row(engine, 3, 120)
    steps = engine.scheduler.run([long], drafters(engine)["none"])
    next(steps)
    (block,) = [one.cache.block for one in batches(engine)]
    assert block is not None
    most, lazy_zeros = 4 * block.nelement(), tree_cache.lazy_zeros

    def small(shape: Any, *args: Any) -> torch.Tensor:
        if torch.Size(shape).numel() > most:
            raise MemoryError("no room")
        return lazy_zeros(shape, *args)

    monkeypatch.setattr(tree_cache, "lazy_zeros", small)
    answers = engine.generate(prompts, max_new_tokens=6, batch_size=20)
    assert [one.token_ids for one in answers] == [one.token_ids for one in expected]
    list(steps)
    alone = engine.generate(long.prompt_ids, max_new_tokens=120, drafter="none")
    assert long.token_ids == alone.token_ids


def burst(engine: Engine, count: int = 12) -> None:
    """A call of many prompts, whose answers end one after another."""
    rows = [row_for(engine, 4 + n, 2 + n) for n in range(count)]
    engine.scheduler.decode(rows, drafters(engine)["none"])


@pytest.mark.parametrize("family", ["llama-tied", "gpt2"])
def test_memory_of_many_prompts_is_given_back_beside_a_shared_batch(family: str) -> None:
    """Once they have their answers, where more than what may be kept is kept of them."""
    engine = engine_with_heads(tiny_base(family))
    for kept_bytes, slots in ((1, 1), (1 << 29, 13)):
        engine.scheduler = reusing(engine.verifier, kept_bytes)
        with engine.shared_batch(max_rows=1) as shared:
            prompt = random_prompt(9, 9)
            expected = shared.generate(prompt, max_new_tokens=20).token_ids
            burst(engine)
            shared.generate(prompt, max_new_tokens=1)
            (batch,) = batches(engine)
            assert (
                len(batch.cache.lengths) == len(batch.slots.all) == len(batch.slots.free) == slots
            )
            assert shared.generate(prompt, max_new_tokens=20).token_ids == expected
            assert shared.stats.held_prefixes <= slots


def test_slots_that_nobody_uses_are_not_made_longer() -> None:
    engine = engine_with_heads(tiny_base("llama-tied"))
    engine.scheduler = reusing(engine.verifier)
    with engine.shared_batch(max_rows=1) as shared:
        shared.generate(random_prompt(9, 9), max_new_tokens=2)
        burst(engine)
        prompt = random_prompt(40, 40)
        answer = shared.generate(prompt, max_new_tokens=80)
        (batch,) = batches(engine)
        assert (len(batch.cache.lengths), batch.cache.num_positions >= 120) == (1, True)
    plain = engine_with_heads(tiny_base("llama-tied"))
    assert answer.token_ids == plain.generate(prompt, max_new_tokens=80, drafter="none").token_ids


def test_slots_in_use_stay_whatever_is_given_up() -> None:
    """An answer in the last of many slots goes on."""
    engine = engine_with_heads(tiny_base("llama-tied"))
    serving = Serving(engine.verifier, 12, reuse_prefixes=True, kept_bytes=1)
    rows = [row_for(engine, 4 + n, 2 if n < 11 else 14) for n in range(12)]
    for one in rows:
        one.stop_ids = frozenset()
        serving.add(one, drafters(engine)["none"])
    (batch,) = serving.batches.used
    while len(batch.served) != 1:
        serving.step()
    (last,) = batch.served
    assert last.slot is not None
    batch.cut(1)
    assert len(batch.slots.all) == last.slot.number + 1
    while last.finish_reason is None:
        serving.step()
    alone = engine.generate(last.prompt_ids, max_new_tokens=14, drafter="none")
    assert last.token_ids[: len(alone.token_ids)] == alone.token_ids


def test_on_a_device_a_short_call_does_not_take_as_much_as_a_long_one(
    cuda_stand_in: Device,
) -> None:
    """Where what is reserved takes memory, one slot more of a batch of long ones is too much."""
    model = tiny_model("llama", max_position_embeddings=2048).to("cuda")
    base = wrap_model(model)
    engine = build_engine(base, heads=random_heads(base), tree=BUSHY, fixed_shapes="never")
    engine.scheduler = reusing(engine.verifier)
    long = engine.scheduler.run([row(engine, 3, 1500)], engine.drafter_for("none"))
    next(long)
    short = engine.scheduler.run([row(engine, 4, 8)], engine.drafter_for("none"))
    next(short)
    assert sorted(one.cache.num_positions for one in batches(engine)) == [12, 1503]
    beside = engine.scheduler.run([row(engine, 5, 8)], engine.drafter_for("none"))
    next(beside)
    assert sorted(len(one.cache.lengths) for one in batches(engine)) == [1, 2]
    for steps in (long, short, beside):
        steps.close()


def test_the_steps_that_a_server_counts_only_grow(tmp_path: Path) -> None:
    """Also where those of an adapter have ended."""
    put_adapter(tmp_path / "first", lambda: tiny_model("llama"), "llama", 1, 2)
    engine = build_engine(wrap_model(tiny_model("llama"), None, "llama"), attention="sdpa")
    counts = list[int]()
    with HeadsStore(engine, tmp_path) as store, engine.shared_batch(max_rows=2) as shared:
        for heads in ({}, {"heads": store.get("first")}, {}):
            shared.generate(random_prompt(5, 1), max_new_tokens=9, **heads)
            counts.append(shared.stats.steps)
    assert 0 < counts[0] < counts[1] < counts[2]


def test_a_batch_that_is_empty_again_is_as_one_that_has_had_no_long_request() -> None:
    """What the longest needed and how large the largest tree was is forgotten with them."""
    engine = engine_with_heads(endless_base(24), BUSHY)
    engine.scheduler = reusing(engine.verifier)
    prompt = random_prompt(12, 1, 24)
    engine.generate(prompt, max_new_tokens=90, drafter="none")
    (batch,) = engine.scheduler.idle
    positions = batch.cache.num_positions
    engine.generate(prompt, max_new_tokens=2, drafter="medusa")
    assert [(one is batch, one.cache.num_positions) for one in engine.scheduler.idle] == [
        (True, positions)
    ]


@pytest.mark.parametrize("family", ["llama-tied", "gpt2"])
def test_of_more_than_may_be_kept_the_newest_is(family: str) -> None:
    """Not nothing, since calls that took part in the same steps left it in one batch."""
    sizes = {"n_positions": 2048} if family == "gpt2" else {"max_position_embeddings": 2048}
    model = tiny_model(family, **sizes)
    model.generation_config.eos_token_id = None
    engine = build_engine(wrap_model(model, None, f"long-{family}"))
    prompts = [random_prompt(300, seed) for seed in range(12)]
    expected = [engine.generate(prompt, max_new_tokens=4).token_ids for prompt in prompts]
    for share, kept in ((0.6, (4, 8)), (2.0, (12, 12))):
        engine.scheduler = reusing(engine.verifier, 1 << 29)
        rows = [make_request(engine.verifier, ids, SamplingParams(), 4) for ids in prompts]
        steps = [engine.scheduler.run([one], engine.drafter_for("none")) for one in rows]
        for one in steps:
            next(one)
        (batch,) = batches(engine)
        engine.scheduler.batches.kept_bytes = most = int(share * batch.cache.num_bytes)
        for one in steps:
            list(one)
        assert [one.cache.num_bytes <= most for one in engine.scheduler.idle] == [True]
        found = [engine.generate(prompt, max_new_tokens=4) for prompt in reversed(prompts)]
        assert [one.token_ids for one in reversed(found)] == expected
        cached = [one.stats.cached_tokens for one in found]
        assert cached == sorted(cached, reverse=True)
        assert kept[0] <= cached.count(299) <= kept[1]
