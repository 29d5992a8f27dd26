"""Steps of fixed shapes for trees from the host: `auto` through them, against plain transformers.

Shapes: B batch, N nodes with root, R likeliest tokens after a node, V vocabulary.
"""

import random
from typing import Any

import pytest
import torch
from medusa_kit.infer.cuda_graph.host_trees import (
    SEES,
    HostTreeSize,
    HostTreeSpec,
    HostTreeStep,
    Tree,
    accept_host_trees,
    packed,
)
from support.host_reads import few_words, no_reads, plain_answers
from support.samples import pairs
from support.small_engines import BUSHY, build_engine, endless_base, random_heads, random_prompt
from support.tiny_models import CONTEXT, VOCAB, tiny_base

from medusa_kit.base.model import wrap_model
from medusa_kit.drafters import draft_with
from medusa_kit.drafters.mixed import auto
from medusa_kit.drafters.mixed.auto import AutoDrafter
from medusa_kit.drafters.mixed.step import best_size
from medusa_kit.engine.engine import Engine
from medusa_kit.infer.accept.rules import accept
from medusa_kit.infer.cuda_graph import runner
from medusa_kit.infer.decode import decode
from medusa_kit.infer.draft import StepResult, path_to
from medusa_kit.infer.node_choice.cost import ASSUMED, StepCost
from medusa_kit.infer.request import make_row
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.dynamic import DynamicTree

FAMILIES = ["llama", "qwen3", "gemma3", "gpt2"]
KINDS = ["medusa", "rooted", "hydra", "recurrent"]
FIXED = "torch, fixed shapes (sdpa)"
SENT = "draft tokens sent to steps of 1, 4, 8, 16 nodes"
LOOPING = [[token % 14 for token in random_prompt(n, n)] * 3 for n in (4, 6, 3)]


@pytest.fixture(autouse=True)
def nodes_cost_little(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, and the same each time: what is verified follows from the clock else."""
    if "costs" not in request.node.name:
        monkeypatch.setattr(StepCost, "seconds", lambda self, nodes: 1 + 0.001 * nodes)


def auto_engine(family: str, **options: Any) -> Engine:
    base = wrap_model(few_words(family))
    heads = random_heads(base, kind=options.pop("kind", "medusa"))
    return build_engine(
        base, heads=heads, tree=BUSHY, drafter="auto", fixed_shapes="always", **options
    )


@pytest.mark.parametrize(("family", "kind"), pairs(FAMILIES, KINDS))
def test_answers_are_those_of_plain_decoding(family: str, kind: str) -> None:
    """Alone and together; guesses were right now and then, several in a row."""
    engine = auto_engine(family, kind=kind)
    expected = plain_answers(family, LOOPING, 40, few=True)
    alone = [engine.generate(prompt, max_new_tokens=40) for prompt in LOOPING]
    together = engine.generate(LOOPING, max_new_tokens=40)
    for results in (alone, together):
        assert [result.token_ids for result in results] == expected
        assert {result.stats.steps_run_by for result in results} == {FIXED}
        assert all(SENT in result.stats.drafter_notes for result in results)
    assert any(len(one.stats.acceptance_by_depth) > 2 for one in alone), "no path was accepted"
    assert "medusa" in together[0].stats.drafter
    assert "recycling" in together[0].stats.drafter


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_steps_of_different_sizes_in_turn(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one size wrote and left behind, the next one reads."""
    generator, engine = random.Random(1), auto_engine(family)
    monkeypatch.setattr(auto, "best_size", lambda *_: (generator.choice([1, 2, 5, 9, 16]), 1.0))
    ran: list[int] = []
    run = HostTreeSize.run

    def counted(self: HostTreeSize, trees: Any) -> Any:
        ran.append(self.num_nodes)
        return run(self, trees)

    monkeypatch.setattr(HostTreeSize, "run", counted)
    results = engine.generate(LOOPING, max_new_tokens=60)
    assert [result.token_ids for result in results] == plain_answers(family, LOOPING, 60, few=True)
    assert set(ran) == {1, 4, 8, 16}


def test_text_alone_is_sent_where_there_are_no_heads() -> None:
    base = wrap_model(few_words("llama"))
    engine = build_engine(base, drafter="auto", fixed_shapes="always")
    result = engine.generate(LOOPING[0], max_new_tokens=40)
    assert [result.token_ids] == plain_answers("llama", LOOPING[:1], 40, few=True)
    assert (result.stats.steps_run_by, result.stats.num_steps < 39) == (FIXED, True)
    assert SENT in result.stats.drafter_notes


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_every_stop_and_every_limit_inside_paths(family: str) -> None:
    engine = auto_engine(family)
    answers = plain_answers(family, LOOPING, 14, few=True)
    stops, deepest = sorted({token for answer in answers for token in answer}), 0
    for stop, limit in [(stop, 14) for stop in stops] + [(99, n) for n in range(1, 15)]:
        rows = [make_row(engine.verifier, p, SamplingParams(), limit) for p in LOOPING]
        for row in rows:
            row.stop_ids = frozenset([stop])
        list(decode(engine.verifier, engine._drafter(None, None, len(rows)), rows, engine.graphs))
        for row, answer in zip(rows, answers, strict=True):
            end = answer.index(stop) + 1 if stop in answer else limit
            assert row.token_ids == answer[: min(end, limit)], (stop, limit)
            assert row.steps_run_by == FIXED
        deepest = max(deepest, *(max(row.depth_counts, default=0) for row in rows))
    assert deepest >= 2, "no path was accepted, so none was cut: the test shows nothing"


@pytest.mark.parametrize("family", ["llama", "gpt2"])  # gpt2: no position past the last
def test_near_the_contexts_end(family: str) -> None:
    """Alone, and beside a row that is far from it and goes on in a smaller step."""
    engine = auto_engine(family)
    text = [token % 14 for token in random_prompt(5, 5)] * CONTEXT
    prompts = [text[:length] for length in (CONTEXT - 7, CONTEXT - 1, 5)]
    expected = plain_answers(family, prompts[:1], 7, few=True)
    assert engine.generate(prompts[0], max_new_tokens=50).token_ids == expected[0]
    expected += plain_answers(family, prompts[1:2], 1, few=True)
    expected += plain_answers(family, prompts[2:], 50, few=True)
    results = engine.generate(prompts, max_new_tokens=50)
    assert [result.token_ids for result in results] == expected


def test_rows_that_go_on_move_to_a_smaller_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "WORTH_A_STEP", 1)
    engine = auto_engine("llama")
    rows = [make_row(engine.verifier, p, SamplingParams(), n)
            for p, n in zip([*LOOPING, LOOPING[0]], (3, 30, 5, 4), strict=True)]  # fmt: skip
    list(decode(engine.verifier, engine._drafter(None, None, 4), rows, engine.graphs))
    expected = plain_answers("llama", [*LOOPING, LOOPING[0]], 30, few=True)
    assert [row.token_ids for row in rows] == [
        answer[:n] for answer, n in zip(expected, (3, 30, 5, 4), strict=True)
    ]
    assert engine.graphs is not None
    assert sorted(step.batch_size for step in engine.graphs._steps) == [1, 4]
    engine.generate(LOOPING[0], max_new_tokens=4)
    assert len(engine.graphs._steps) == 2, "the steps at hand are used again"


def random_tree(generator: random.Random, N: int, V: int) -> Tree:
    """Siblings hold different tokens; no room left: a new word."""
    parents = [-1, *(generator.randrange(node) for node in range(1, N))]
    tokens = [generator.randrange(V)]
    for node in range(1, N):
        taken = {tokens[other] for other in range(node) if parents[other] == parents[node]}
        tokens.append(generator.choice([t for t in range(V + N) if t not in taken][:2]))
    return Tree(tokens, parents)


def test_acceptance_equals_the_walk() -> None:
    generator, V, N = random.Random(3), 3, 12
    for _ in range(60):
        trees = [random_tree(generator, generator.randrange(1, N + 1), V) for _ in range(3)]
        sent_B4N = torch.tensor([packed(tree, N) for tree in trees])
        sees_BNN = (sent_B4N[:, SEES, :, None] >> torch.arange(N)) & 1 == 1
        likeliest = [[generator.randrange(V) for _ in range(N)] for _ in trees]
        depths = [generator.randrange(5) for _ in trees]
        found = accept_host_trees(sent_B4N, sees_BNN, torch.tensor(likeliest), torch.tensor(depths))
        for row, tree in enumerate(trees):
            for node in range(len(tree.parents)):
                ancestors = sees_BNN[row, node].nonzero()[:, 0].tolist()
                assert ancestors == sorted(path_to(node, tree.parents))
            path, root = accept(tree.tokens, tree.parents, likeliest[row].__getitem__, depths[row])
            count = int(found.counts_B[row])
            assert found.nodes_BJ[row, :count].tolist() == [0, *path]
            assert found.nodes_BJ[row, count:].tolist() == list(range(count, N))
            emitted = [*(tree.tokens[node] for node in path), root]
            assert found.emitted_BJ[row, :count].tolist() == emitted


@pytest.mark.parametrize("kind", ["plain", "medusa", "hydra", "recurrent"])
def test_a_step_reads_nothing_on_the_host(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, and on the meta device, where there are no values and mixing devices shows."""
    base = tiny_base("gemma3")
    engine = build_engine(base, fixed_shapes="always")
    heads = None if kind == "plain" else random_heads(base, kind=kind)
    assert engine.graphs is not None
    for device in ("cpu", "meta"):
        base.model.to(device)
        drafter: Any = None if heads is None else draft_with(heads.to(device), BUSHY)
        with torch.inference_mode():
            step = HostTreeStep(engine.graphs.verifier, HostTreeSpec((1, 4, 9), 5, drafter), 4, 64)
            for size in step.sizes.values():
                with no_reads(monkeypatch):
                    size.advance()
                assert size.out_BX.device.type == device


def test_what_a_step_tells_is_what_the_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Likeliest tokens after every node, and the heads' guesses, by the model itself."""
    engine, model = auto_engine("llama"), few_words("llama")
    seen: list[tuple[list[int], StepResult]] = []
    propose, observe = AutoDrafter.propose, AutoDrafter.observe

    def proposing(self: AutoDrafter, state: Any) -> Any:
        (prefix,), (root,), (guesses,) = state.tokens, state.roots_B, state.guesses
        hidden_D = engine.base.hidden_states(torch.tensor([prefix]))[:, -1]
        drafter = draft_with(engine.heads, BUSHY)
        assert list(guesses) == drafter.fill(hidden_D, torch.tensor([root]))[0].tolist()
        texts.append(list(prefix))
        return propose(self, state)

    def observing(self: AutoDrafter, step: StepResult) -> None:
        seen.append((texts[-1], step))
        observe(self, step)

    texts: list[list[int]] = []
    monkeypatch.setattr(AutoDrafter, "propose", proposing)
    monkeypatch.setattr(AutoDrafter, "observe", observing)
    engine.generate(LOOPING[0], max_new_tokens=8)
    assert len(seen) >= 2
    for prefix, step in seen:
        assert step.ranked is not None
        tokens, parents = step.draft.tokens_BN[0].tolist(), step.draft.topologies[0].parents
        for node in range(sum(parent >= -1 for parent in parents)):
            text = [*prefix, *(tokens[n] for n in path_to(node, parents))]
            logits_V = model(torch.tensor([text])).logits[0, -1]
            told = step.ranked[0, node]
            assert told.tolist() == logits_V.topk(len(told)).indices.tolist()


def test_what_cannot_be_sent_is_said() -> None:
    def notes(engine: Engine, **options: Any) -> list[str]:
        stats = engine.generate(LOOPING[0], max_new_tokens=12, **options).stats
        assert stats.steps_run_by == "torch"
        return [note for note in stats.drafter_notes if "not sent" in note]

    engine = auto_engine("llama")
    drawn = (
        "draft tokens are not sent to steps on the device: tokens are sampled or logits processed"
    )
    assert notes(engine, temperature=0.8)[0].startswith(drawn)
    assert notes(engine, repetition_penalty=1.2)[0].startswith(drawn)
    engine.use_tree(DynamicTree(6, (1.0, 1.0, 1.0), num_ranks=6))
    assert "grown anew" in notes(engine)[0]
    engine = auto_engine("llama", draft_model=endless_base(14, seed=0))
    assert "a draft model is among the sources" in notes(engine)[0]


def test_while_another_answer_streams_the_loop_decodes() -> None:
    engine = auto_engine("llama")
    row = make_row(engine.verifier, LOOPING[1], SamplingParams(), 20)
    streaming = decode(engine.verifier, engine._drafter(None), [row], engine.graphs)
    next(streaming), next(streaming)
    between = engine.generate(LOOPING[0], max_new_tokens=20)
    assert [between.token_ids] == plain_answers("llama", LOOPING[:1], 20, few=True)
    assert between.stats.steps_run_by == "torch"
    assert "none were available" in " ".join(between.stats.drafter_notes)
    list(streaming)


def test_a_compiled_forward_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []

    def stand_in(forward: Any, **options: Any) -> Any:
        compiled.append(forward)
        return forward

    monkeypatch.setattr(torch, "compile", stand_in)
    engine = auto_engine("llama", compiled=True)
    result = engine.generate(LOOPING[0], max_new_tokens=12)
    assert [result.token_ids] == plain_answers("llama", LOOPING[:1], 12, few=True)
    assert result.stats.steps_run_by == "torch.compile, fixed shapes (sdpa)"
    assert len(compiled) == 1 + 4, "one at load, and one for each size"


def test_sizes_follow_the_heads_tree_unless_given() -> None:
    base = tiny_base("llama")
    wide = [[first] for first in range(20)]
    engine = build_engine(base, heads=random_heads(base), tree=wide, fixed_shapes="always")
    assert engine._drafter("auto").host_trees.sizes == (1, 4, 8, 16, 21)
    assert engine._drafter("auto", {"max_nodes": 6}).host_trees.sizes == (1, 4, 6)
    assert engine._drafter("auto", {"max_nodes": 200}).host_trees.sizes == (1, 4, 8, 16, 32, 62)
    ranks = {"options": {"recycling": {"width": 500}}}
    assert engine._drafter("auto", ranks).host_trees.ranks == VOCAB


def test_a_size_is_worth_what_a_step_of_it_costs() -> None:
    """A fifth guess needs a step of eight nodes: it has to be worth four more."""
    cost = StepCost(0.1)  # a tenth of a one-node step for each further node
    chances = [(0, 1.0), *((node, 0.25) for node in range(1, 6))]
    assert best_size([chances], cost, 8)[0] == 6
    spec = HostTreeSpec((1, 4, 8))
    assert best_size([chances], cost, 8, spec.fitting)[0] == 4
    assert [spec.fitting(n) for n in (1, 2, 4, 5)] == [1, 4, 4, 8]


def test_the_loop_and_steps_keep_costs_apart() -> None:
    engine = auto_engine("llama")
    engine.generate(LOOPING[0], max_new_tokens=12)
    drafter: Any = engine._drafter(None)
    assert drafter.device_experience.cost.measured
    assert not drafter.experience.cost.measured
    sizes = drafter.device_experience.cost._sizes
    assert {n for n, size in sizes.items() if size.weight > ASSUMED} <= {1, 4, 8, 16}


def test_steps_are_used_again_by_whom_they_suit() -> None:
    engine = auto_engine("llama")
    graphs: Any = engine.graphs
    for options, made in [({}, 1), ({}, 1), ({"max_nodes": 6}, 2), ({"max_nodes": 6}, 2)]:
        engine.generate(LOOPING[0], max_new_tokens=4, drafter="auto", drafter_options=options)
        assert len(graphs._steps) == made
    engine.generate(LOOPING[0], max_new_tokens=4, drafter="medusa")
    assert len(graphs._steps) == 3
    other = random_heads(engine.base)
    ours, theirs = (
        HostTreeSpec((1, 4), 8, draft_with(heads, BUSHY)) for heads in (engine.heads, other)
    )
    assert ours.alike(HostTreeSpec((1, 4), 8, draft_with(engine.heads, BUSHY)))
    assert not ours.alike(theirs)
    shaped_alike = [CandidateTree([(0,), (second,)]) for second in (1, 2)]
    one, another = (
        HostTreeSpec((1, 4), 8, draft_with(engine.heads, tree)) for tree in shaped_alike
    )
    assert not one.alike(another), "the guesses would be those of another tree"
    assert not ours.alike(HostTreeSpec((1, 4), 8))
    assert not ours.alike(HostTreeSpec((1, 4), 4, ours.heads))
