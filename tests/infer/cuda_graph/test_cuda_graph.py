"""Steps of fixed shapes, called on the CPU as they are captured on CUDA: plain answers, no reads.

The oracle is transformers' own generate. Few tokens in the vocabulary let random heads guess right
now and then, so that stops and limits fall inside accepted paths.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from medusa_kit.infer.cuda_graph.accept import TreeTables, accept_greedy, walked
from medusa_kit.infer.cuda_graph.forward import StaticTreeStep
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
from medusa_kit.drafters import draft_with
from medusa_kit.drafters.plain import PlainDrafter
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import ConfigError
from medusa_kit.infer.accept.rules import accept
from medusa_kit.infer.attention.choice import AttentionChoice
from medusa_kit.infer.cuda_graph.guard import HostRead, NoHostReads
from medusa_kit.infer.cuda_graph.step import GraphStep
from medusa_kit.infer.decode import decode
from medusa_kit.infer.draft import Topology
from medusa_kit.infer.request import make_row
from medusa_kit.infer.tree_step import TreeStep
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.tree.dynamic import DynamicTree

FAMILIES = ["llama", "qwen3", "gemma3"]
KINDS = ["medusa", "hydra", "recurrent"]
PREFIXES = [(family, "prefix") for family in FAMILIES]  # a layer that attends as its family does
PROMPTS = [random_prompt(length, length) for length in (2, 19, 7)]
FIXED = "torch, fixed shapes (sdpa)"


def kinds_of(kind: str) -> dict[str, Any]:
    return {"kind": "hydra", "prefix_layers": 1} if kind == "prefix" else {"kind": kind}


@pytest.mark.parametrize(("family", "kind"), pairs(FAMILIES, KINDS) + PREFIXES)
def test_answers_and_steps_are_those_of_the_loop(family: str, kind: str) -> None:
    base, kinds = tiny_base(family), kinds_of(kind)
    heads = random_heads(base, **kinds)
    engine = build_engine(base, heads=heads, tree=BUSHY, fixed_shapes="always")
    expected = plain_answers(family, PROMPTS, 24)
    in_turn = engine_with_heads(tiny_base(family), **kinds)
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


@pytest.mark.parametrize("family", FAMILIES)
def test_every_stop_and_every_limit_inside_paths(family: str) -> None:
    base = wrap_model(few_words(family))
    engine = build_engine(
        base, heads=random_heads(base, kind="rooted"), tree=BUSHY, fixed_shapes="always"
    )
    prompts = [[token % 14 for token in prompt] for prompt in PROMPTS]
    answers = plain_answers(family, prompts, 14, few=True)
    stops = sorted({token for answer in answers for token in answer})
    for stop, limit in [(stop, 14) for stop in stops] + [(99, n) for n in range(1, 15)]:
        rows = [make_row(engine.verifier, p, SamplingParams(), limit) for p in prompts]
        for row in rows:
            row.stop_ids = frozenset([stop])
        list(decode(engine.verifier, draft_with(engine.heads, BUSHY), rows, engine.graphs))
        for row, answer in zip(rows, answers, strict=True):
            end = answer.index(stop) + 1 if stop in answer else limit
            assert row.token_ids == answer[: min(end, limit)], (stop, limit)
            assert row.finish_reason == ("stop" if stop in answer else "length")
    deepest = max(max(row.depth_counts) for row in rows)
    assert deepest >= 2, "no path was accepted, so none was cut: the test shows nothing"


@pytest.mark.parametrize("family", ["llama", "gpt2"])  # gpt2: no position past the last
def test_near_the_contexts_end(family: str) -> None:
    """Alone, and beside a row that is far from it."""
    base = wrap_model(few_words(family))
    engine = build_engine(base, heads=random_heads(base), tree=BUSHY, fixed_shapes="always")
    prompts = [[token % 14 for token in random_prompt(n, n)] for n in (CONTEXT - 7, CONTEXT - 1, 5)]
    expected = plain_answers(family, prompts[:1], 7, few=True)
    assert engine.generate(prompts[0], max_new_tokens=50).token_ids == expected[0]
    expected += plain_answers(family, prompts[1:2], 1, few=True)
    expected += plain_answers(family, prompts[2:], 50, few=True)
    results = engine.generate(prompts, max_new_tokens=50)
    assert [result.token_ids for result in results] == expected


@pytest.mark.parametrize(
    ("family", "kind"), pairs(FAMILIES, ["plain", "rooted", *KINDS]) + PREFIXES
)
def test_a_step_reads_nothing_on_the_host(
    family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, and on the meta device, where there are no values and mixing devices shows."""
    base = tiny_base(family)
    engine = build_engine(base, fixed_shapes="always")
    heads = None if kind == "plain" else random_heads(base, **kinds_of(kind))
    assert engine.graphs is not None
    graphs = engine.graphs.with_prefix(None if heads is None else heads.prefix)
    for device in ("cpu", "meta"):
        base.model.to(device)
        drafter: Any = PlainDrafter(base.device)
        if heads is not None:
            drafter = draft_with(heads.to(device), BUSHY)
        with torch.inference_mode():
            step = GraphStep(graphs.verifier, drafter, 4, 64)
            with no_reads(monkeypatch):
                step.advance()
            assert step.out_BX.device.type == device


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


def test_acceptance_equals_the_walk() -> None:
    generator = random.Random(3)
    for _ in range(200):
        N, V = generator.randrange(1, 12), 3
        parents = [-1, *(generator.randrange(node) for node in range(1, N))]
        tokens = [0] * N
        for node in range(1, N):  # siblings hold different tokens; no room left: a new word
            taken = {tokens[other] for other in range(node) if parents[other] == parents[node]}
            tokens[node] = generator.choice([t for t in range(V + N) if t not in taken][:2])
        likeliest = [generator.randrange(V) for _ in range(N)]
        max_depth = generator.randrange(5)
        path, root = accept(tokens, parents, likeliest.__getitem__, max_depth)
        tree = TreeTables.of(Topology.from_parents(parents, torch.device("cpu")))
        found = accept_greedy(
            tree, torch.tensor([tokens]), torch.tensor([likeliest]), torch.tensor([max_depth])
        )
        assert found.nodes_BJ[0, : found.counts_B[0]].tolist() == [0, *path]
        assert (int(found.roots_B[0]), int(found.last_B[0])) == (root, [0, *path][-1])
        row = [*found.emitted_BJ[0].tolist(), int(found.counts_B[0])]
        assert walked(row) == [*(tokens[node] for node in path), root]
        rest = range(len(path) + 1, tree.longest)
        assert found.nodes_BJ[0, found.counts_B[0] :].tolist() == list(rest)


@pytest.mark.parametrize("window", [None, 4, 7])
def test_the_mask_is_that_of_a_tree_step(window: int | None) -> None:
    tree = Topology.from_parents((-1, 0, 0, 1, 2, 2, 3), torch.device("cpu"))
    depths, sees = tree.depths_N.expand(3, -1), tree.sees_NN.expand(3, -1, -1)
    lengths = [5, 0, 13]
    expected = TreeStep(lengths, depths, sees).mask(window)
    mask = StaticTreeStep(torch.tensor(lengths), depths, sees, 40, None).mask(window)
    assert torch.equal(mask[..., :20], expected)
    assert not mask[..., 20:].any()


def static_engine() -> Engine:
    base = tiny_base("llama")
    return build_engine(base, heads=random_heads(base), tree=BUSHY, fixed_shapes="always")


def test_what_steps_cannot_do_goes_through_the_loop() -> None:
    engine, loop = static_engine(), engine_with_heads()
    for options in ({"temperature": 0.8}, {"repetition_penalty": 1.3}):
        result = engine.generate(PROMPTS[1], max_new_tokens=12, **options)
        assert result.stats.steps_run_by == "torch"
        assert result.token_ids == loop.generate(PROMPTS[1], max_new_tokens=12, **options).token_ids
    engine.use_tree(DynamicTree(6, (1.0, 1.0, 1.0)))
    assert engine.generate(PROMPTS[1], max_new_tokens=12).stats.steps_run_by == "torch"
    assert engine.generate([1, 5], drafter="none", max_new_tokens=4).stats.steps_run_by == FIXED


def test_an_answer_asked_for_while_another_streams() -> None:
    engine = static_engine()
    first, second = plain_answers("llama", PROMPTS[1:], 20)
    rows = [make_row(engine.verifier, PROMPTS[1], SamplingParams(), 20)]
    streaming = decode(engine.verifier, draft_with(engine.heads, BUSHY), rows, engine.graphs)
    next(streaming), next(streaming)
    between = engine.generate(PROMPTS[2], max_new_tokens=20)
    assert (between.token_ids, between.stats.steps_run_by) == (second, "torch")
    list(streaming)
    assert rows[0].token_ids == first
    rows = [make_row(engine.verifier, PROMPTS[1], SamplingParams(), 20)]
    abandoned = decode(engine.verifier, draft_with(engine.heads, BUSHY), rows, engine.graphs)
    next(abandoned), next(abandoned)
    assert engine.graphs is not None
    assert engine.graphs.lent is not None
    abandoned.close()
    assert engine.generate(PROMPTS[2], max_new_tokens=20).stats.steps_run_by == FIXED


def test_a_capture_that_fails_leaves_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = static_engine()

    def refuse(self: GraphStep) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(GraphStep, "advance", refuse)
    expected = plain_answers("llama", PROMPTS[:1], 6)
    for _ in range(2):
        result = engine.generate(PROMPTS[0], max_new_tokens=6)
        assert (result.token_ids, result.stats.steps_run_by) == (expected[0], "torch")
    assert engine.graphs is not None
    assert engine.graphs.refused == "operation not permitted when stream is capturing"


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
    assert build_engine(tiny_base("llama")).graphs is None


def test_statistics_name_the_attention_that_computed() -> None:
    """Steps of fixed shapes have a choice of backends of their own."""

    class Elsewhere(AttentionChoice):
        name = "triton"

    engine = static_engine()
    assert engine.graphs is not None
    engine.graphs.verifier.attention.__class__ = Elsewhere
    steps = engine.generate(PROMPTS[0], max_new_tokens=4).stats
    assert (steps.attention, engine.attention.name) == ("triton", "triton")
    loop = engine.generate(PROMPTS[0], max_new_tokens=4, temperature=0.8).stats
    assert (loop.steps_run_by, loop.attention) == ("torch", "sdpa")
