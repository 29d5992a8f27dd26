"""Forwards of fixed shapes, run on the CPU as they are captured on CUDA: plain answers, no reads.

The oracle is transformers' own generate. Few tokens in the vocabulary let random heads guess right
now and then, so that stops and limits fall inside accepted paths.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.attention_inputs import inputs_of
from support.host_reads import few_words, no_reads, plain_answers
from support.samples import pairs
from support.small_engines import (
    BUSHY,
    build_engine,
    engine_with_heads,
    random_heads,
    random_prompt,
)
from support.tiny_models import CONTEXT, tiny_base, tiny_model

from medusa_kit.base.model import wrap_model
from medusa_kit.drafters.heads.choice import draft_with
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import ConfigError
from medusa_kit.infer.attention.choice import AttentionChoice
from medusa_kit.infer.attention.step import TreeStep
from medusa_kit.infer.decode.request import make_request
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.infer.device.cache import FixedCache
from medusa_kit.infer.device.captured import CapturedForward, Shape, fitting
from medusa_kit.infer.device.guard import HostRead, NoHostReads
from medusa_kit.infer.device.step import FixedStep
from medusa_kit.infer.device.verifier import AGAIN_AFTER, CapturedVerifier, usual_steps
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.runners.adapted_verifier import adapted
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.infer.verifier import Verifier
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.tree.dynamic import DynamicTree

FAMILIES = ["llama", "qwen3", "gemma3"]
KINDS = ["medusa", "hydra", "recurrent"]
PROMPTS = [random_prompt(length, length) for length in (2, 19, 7)]
FIXED = "torch, fixed shapes (sdpa)"


@pytest.mark.parametrize(("family", "kind"), pairs(FAMILIES, KINDS))
def test_answers_and_steps_are_those_of_the_loop(family: str, kind: str) -> None:
    base = tiny_base(family)
    heads = random_heads(base, kind=kind)
    engine = build_engine(base, heads=heads, tree=BUSHY, fixed_shapes="always")
    expected = plain_answers(family, PROMPTS, 24)
    in_turn = engine_with_heads(tiny_base(family), kind=kind)
    assert in_turn.heads is not None
    in_turn.heads.guesser = None  # in C++ the heads' weights are rounded
    loop = in_turn.generate(PROMPTS, max_new_tokens=24)
    together = engine.generate(PROMPTS, max_new_tokens=24)
    alone = [engine.generate(prompt, max_new_tokens=24) for prompt in PROMPTS]
    for results in (together, alone):
        assert [result.token_ids for result in results] == expected
        assert {result.stats.steps_run_by for result in results} == {FIXED}
        for result, same in zip(results, loop, strict=True):
            assert result.stats.num_steps == same.stats.num_steps
            assert result.stats.acceptance_by_depth == same.stats.acceptance_by_depth


def test_chunks_and_queries_scaled_by_position() -> None:
    """Of Llama 4, whose queries are scaled by the slots that the cache counts: here all of them."""
    base = tiny_base("llama4")
    engine = build_engine(base, heads=random_heads(base), tree=BUSHY, fixed_shapes="always")
    results = engine.generate(PROMPTS, max_new_tokens=24)
    expected = plain_answers("llama4", PROMPTS, 24)
    assert [result.token_ids for result in results] == expected
    assert {result.stats.steps_run_by for result in results} == {FIXED}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_stop_and_every_limit_inside_paths(family: str) -> None:
    base = wrap_model(few_words(family))
    engine = build_engine(
        base, heads=random_heads(base, kind="hydra"), tree=BUSHY, fixed_shapes="always"
    )
    prompts = [[token % 14 for token in prompt] for prompt in PROMPTS]
    answers = plain_answers(family, prompts, 14, few=True)
    stops = sorted({token for answer in answers for token in answer})
    for stop, limit in [(stop, 14) for stop in stops] + [(99, n) for n in range(1, 15)]:
        rows = [make_request(engine.verifier, p, SamplingParams(), limit) for p in prompts]
        for row in rows:
            row.stop_ids = frozenset([stop])
        list(Scheduler(engine.verifier).run(rows, draft_with(engine.heads, BUSHY)))
        for row, answer in zip(rows, answers, strict=True):
            end = answer.index(stop) + 1 if stop in answer else limit
            assert row.token_ids == answer[: min(end, limit)], (stop, limit)
            assert row.finish_reason == ("stop" if stop in answer else "length")
    deepest = max(max(row.depth_counts) for row in rows)
    assert deepest >= 2, "no path was accepted, so none was cut: the test shows nothing"


def test_near_the_contexts_end() -> None:
    """Of gpt2, which has no position past the last: alone, and beside a row that is far from it."""
    family = "gpt2"
    base = wrap_model(few_words(family))
    engine = build_engine(base, heads=random_heads(base), tree=BUSHY, fixed_shapes="always")
    prompts = [[token % 14 for token in random_prompt(n, n)] for n in (CONTEXT - 7, CONTEXT - 1, 5)]
    expected = plain_answers(family, prompts[:1], 7, few=True)
    assert engine.generate(prompts[0], max_new_tokens=50).token_ids == expected[0]
    expected += plain_answers(family, prompts[1:2], 1, few=True)
    expected += plain_answers(family, prompts[2:], 50, few=True)
    results = engine.generate(prompts, max_new_tokens=50)
    assert [result.token_ids for result in results] == expected


@pytest.mark.parametrize(("family", "pads"), [*((f, False) for f in FAMILIES), ("gptj", True)])
@pytest.mark.parametrize("counts", [[1], [7], [3, 1], [2, 20, 5]])
def test_a_forward_reads_nothing_on_the_host(
    family: str, pads: bool, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, and on the meta device, where there are no values and mixing devices shows."""
    base = tiny_base(family)
    verifier = CapturedVerifier(base, AttentionChoice(fixed_shapes=True))
    assert verifier.pads == pads
    for device in ("cpu", "meta"):
        base.model.to(device)
        cache = verifier.new_cache(4, 64)
        assert isinstance(cache, FixedCache)
        shape = Shape(*fitting(counts), 64)
        with torch.inference_mode():
            captured = CapturedForward(verifier, cache, shape, base.hidden_and_logits)
            captured.send(
                Forest.chains([[5] * count for count in counts], base.device),
                [2, 0, 3][: len(counts)],
            )
            with no_reads(monkeypatch):
                captured.run()
            scores = captured.replay(sum(counts))
        assert scores.argmax().device.type == device
        assert len(scores.hidden_ND) == sum(counts)


def test_the_guard_sees_reads() -> None:
    x, two = torch.arange(4.0), torch.tensor([1, 2, 1, 1])
    reads: list[Callable[[], Any]] = [
        lambda: x.sum().item(), lambda: bool(x.sum() > 1), lambda: int(x[0]), lambda: x[x > 1],
        lambda: x.nonzero(), lambda: torch.where(x > 1), lambda: x.repeat_interleave(two),
        lambda: torch.equal(x, x), lambda: x.to("meta"),
    ]  # fmt: skip
    for number, read in enumerate(reads):
        for inference in (True, False):
            assert refused(read, inference), f"read {number} went by"


def refused(read: Callable[[], Any], inference: bool) -> bool:
    try:
        with torch.inference_mode(inference), NoHostReads():
            read()
    except HostRead:
        return True
    return False


@pytest.mark.parametrize("window", [None, 4, 7])
def test_the_mask_is_that_of_a_tree_step(window: int | None) -> None:
    depths, sees = inputs_of([(-1, 0, 0, 1, 2, 2, 3)] * 3)
    lengths = [5, 0, 13]
    expected = TreeStep(lengths, depths, sees).mask(window)
    mask = FixedStep(torch.tensor(lengths), depths, sees, 40, None).mask(window)
    assert torch.equal(mask[..., :20], expected)
    assert not mask[..., 20:].any()


def fixed_engine(**options: Any) -> Engine:
    base = tiny_base("llama")
    return build_engine(
        base, heads=random_heads(base), tree=BUSHY, fixed_shapes="always", **options
    )


def verifier_of(engine: Engine) -> CapturedVerifier:
    assert isinstance(engine.verifier, CapturedVerifier)
    return engine.verifier


@pytest.mark.parametrize(
    ("drafter", "sampling"),
    pairs(
        ["none", "medusa", "auto", "suffix"],
        [{}, {"temperature": 0.8, "seed": 3}, {"repetition_penalty": 1.3}],
    ),
)
def test_everything_that_decodes_is_captured(drafter: str, sampling: dict[str, Any]) -> None:
    engine, loop = fixed_engine(), engine_with_heads()
    verifier = verifier_of(engine)
    before = verifier.num_loose
    results = engine.generate(PROMPTS, max_new_tokens=16, drafter=drafter, **sampling)
    expected = loop.generate(PROMPTS, max_new_tokens=16, drafter="none", **sampling)
    assert [one.token_ids for one in results] == [one.token_ids for one in expected]
    assert {one.stats.steps_run_by for one in results} == {FIXED}
    assert verifier.num_loose == before
    assert verifier.num_captured > 0


def test_trees_that_grow_are_captured() -> None:
    engine = fixed_engine()
    engine.use_tree(DynamicTree(6, (1.0, 1.0, 1.0)))
    before = verifier_of(engine).num_loose
    results = engine.generate(PROMPTS, max_new_tokens=16)
    assert [one.token_ids for one in results] == plain_answers("llama", PROMPTS, 16)
    assert verifier_of(engine).num_loose == before


def test_forwards_serve_later_requests_of_any_text() -> None:
    """Also where no prefix is reused: a batch is kept for its cache, whose memory they read."""
    for prefix_cache in ("on", "off"):
        engine = fixed_engine(prefix_cache=prefix_cache)
        answers = [engine.generate(PROMPTS[1], max_new_tokens=12)]
        (batch,) = engine.scheduler.idle
        forwards = dict(batch.cache.forwards)  # type: ignore[attr-defined]
        answers.append(engine.generate(PROMPTS[2], max_new_tokens=12))
        (again,) = engine.scheduler.idle
        assert again is batch
        assert batch.cache.forwards == forwards  # type: ignore[attr-defined]
        assert [one.token_ids for one in answers] == plain_answers("llama", PROMPTS[1:], 12)


@pytest.mark.parametrize("num_rows", [1, 3, 8, 32])
def test_what_is_captured_at_the_start_is_what_requests_need(num_rows: int) -> None:
    """Rows of any trees of at most 64 nodes, as long as all have fewer than 512."""
    there = [fitting(counts) for counts in usual_steps(num_rows)]
    assert len(set(there)) == len(there)
    generator = random.Random(num_rows)
    for _ in range(2000):
        most = generator.choice([1, 3, 10, 64])
        rows = range(generator.randint(1, num_rows))
        counts = [generator.randint(1, most) for _ in rows]
        if sum(counts) <= 512:
            assert fitting(counts) in there, counts


def test_what_memory_is_too_small_for_is_left_out_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verifier, run = verifier_of(fixed_engine()), Verifier.score
    whole = CapturedForward.__init__

    def too_large(self: CapturedForward, *args: Any) -> None:
        whole(self, *args)
        if self.shape.num_nodes > 16:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def loose(self: Verifier, cache: TreeCache, nodes: Forest, rows: Any) -> Any:
        if sum(nodes.counts) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return run(self, cache, nodes, rows)

    monkeypatch.setattr(CapturedForward, "__init__", too_large)
    monkeypatch.setattr(Verifier, "score", loose)
    cache = verifier.new_cache(2, 200)
    verifier.prepare(cache, 2)
    assert isinstance(cache, FixedCache)
    there = {shape[:2] for shape in cache.forwards}
    assert there == {fit for one in usual_steps(2) if (fit := fitting(one))[0] <= 16}


def test_more_room_takes_other_memory_and_other_forwards() -> None:
    engine = fixed_engine()
    verifier = verifier_of(engine)
    cache = verifier.new_cache(2, 8)
    assert isinstance(cache, FixedCache)
    nodes = Forest.chains([[3, 4], [5]], verifier.base.device)
    verifier.read_prompts(cache, [0, 1], PROMPTS[:2])
    before = verifier.score(cache, nodes, [0, 1])
    assert len(cache.forwards) == 1
    cache.grow(2 * cache.num_positions)
    assert not cache.forwards
    after = verifier.score(cache, nodes, [0, 1])
    assert torch.allclose(before.logits_NV, after.logits_NV, atol=1e-6)


def test_nodes_left_over_touch_nothing_that_is_committed() -> None:
    """A row that takes no part, and the rows that do, hold afterwards what they held before."""
    verifier = verifier_of(fixed_engine())
    cache = verifier.new_cache(3, 40)
    verifier.read_prompts(cache, [0, 1, 2], [PROMPTS[1], PROMPTS[2], PROMPTS[1][::-1]])
    block = cache.block
    assert block is not None
    held = [block[:, :, row, :, : cache.lengths[row]].clone() for row in range(3)]
    verifier.score(cache, Forest.chains([[1] * 5, [2] * 6], verifier.base.device), [2, 0])
    for row, before in enumerate(held):
        assert torch.equal(block[:, :, row, :, : cache.lengths[row]], before), row
    assert not block[:, :, 1, :, cache.lengths[1] :].any()


@pytest.mark.slow
def test_a_capture_that_fails_is_tried_again_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = fixed_engine()
    whole = CapturedForward.__init__

    def refuse(self: CapturedForward, *args: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(CapturedForward, "__init__", refuse)
    expected = plain_answers("llama", PROMPTS[:1], 12)[0]
    first = engine.generate(PROMPTS[0], max_new_tokens=12)
    said = "operation not permitted when stream is capturing"
    assert first.stats.steps_run_by == f"torch (not captured: {said})"
    assert first.token_ids == expected
    assert capsys.readouterr().err.count(said) == 1
    monkeypatch.setattr(CapturedForward, "__init__", whole)
    for _ in range(AGAIN_AFTER):
        last = engine.generate(PROMPTS[0], max_new_tokens=12)
        assert last.token_ids == expected
    assert last.stats.steps_run_by == FIXED
    assert verifier_of(engine).refused is None


def test_steps_are_told_by_what_ran_them_where_another_shape_was_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = fixed_engine()
    expected = plain_answers("llama", PROMPTS[:1], 12)[0]
    assert engine.generate(PROMPTS[0], max_new_tokens=12).token_ids == expected
    with monkeypatch.context() as patch:

        def refuse(self: CapturedForward, *args: Any) -> None:
            raise RuntimeError("no")

        patch.setattr(CapturedForward, "__init__", refuse)
        other = engine.generate(PROMPTS[0], max_new_tokens=12, drafter="none")
        assert other.stats.steps_run_by == "torch (not captured: no)"
        known = engine.generate(PROMPTS[0], max_new_tokens=12)
        again = engine.generate(PROMPTS[0], max_new_tokens=12, drafter="none")
    assert known.stats.steps_run_by == FIXED
    assert again.stats.steps_run_by == "torch (not captured: no)"


def test_steps_of_an_adapter_are_not_called_captured() -> None:
    plain = verifier_of(fixed_engine())
    assert plain.steps_run_by == FIXED
    layers: Any = None  # no step is run
    assert adapted(plain, plain.base, layers).steps_run_by == "torch"


def test_asked_for_where_they_cannot_be_used() -> None:
    growing = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    for options, message in [
        ({"fixed_shapes": "alway"}, "unknown"),
        ({"fixed_shapes": "never", "compiled": True}, "no meaning"),
        ({"compiled": True}, "the model is on cpu\nhint: .*--fixed-shapes always .*leave out"),
        ({"fixed_shapes": "always", "attention": "flash"}, "reads lengths on the host"),
    ]:
        with pytest.raises(ConfigError, match=message):
            build_engine(tiny_base("llama"), **options)
    model = tiny_model("llama", rope_parameters=growing)
    with pytest.raises(ConfigError, match="waits for a value on the host"):
        build_engine(wrap_model(model), fixed_shapes="always")
    assert not isinstance(build_engine(tiny_base("llama")).verifier, CapturedVerifier)
