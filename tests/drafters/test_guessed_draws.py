"""Heads guess what the row's own noise will pick."""

from typing import Any

import pytest
import torch
from support.small_engines import build_engine, decode_all, endless_base, random_heads
from support.states import state_from
from support.tiny_models import tiny_base, tiny_model

from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.drafters.heads.choice import draft_with
from medusa_kit.drafters.heads.dynamic import DynamicDrafter
from medusa_kit.drafters.heads.source import DRAWN, HeadsSource
from medusa_kit.heads import MedusaHeads
from medusa_kit.heads import draws as module
from medusa_kit.heads.draws import SHARPER
from medusa_kit.heads.noise import gumbel_noise
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.decode.accept.sampler import Sampler
from medusa_kit.infer.decode.drafter import State
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.dynamic import DynamicTree

VOCAB, HEADS = 24, 3
KINDS = ["medusa", "hydra", "recurrent"]
WARM = SamplingParams(1.3, seed=5)
TREES = [CandidateTree.chain(3), DynamicTree(8, (1.0,) * HEADS, 6)]


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return endless_base(VOCAB)


@pytest.fixture(params=[*KINDS, "reduced"])
def heads(base: BaseModel, request: pytest.FixtureRequest) -> MedusaHeads:
    if request.param != "reduced":
        return random_heads(base, HEADS, kind=request.param)
    some = torch.arange(3, VOCAB, 2)
    return random_heads(base, HEADS, kind="hydra", projection="reduced", reduced_ids=some)


def state_of(base: BaseModel, *rows: SamplingParams) -> State:
    hidden_BD = 3 * torch.randn(len(rows), base.info.hidden_size)
    samplers = [Sampler(base, params, [1], 9) for params in rows]
    tokens = [[1] * (2 + row) for row in range(len(rows))]
    return state_from(tokens, [5 + row for row in range(len(rows))], hidden_BD, samplers)


def expected(heads: MedusaHeads, state: State, row: int, k: int, path: list[int]) -> list[int]:
    """The tokens that head k guesses after this path from the root on, by hand."""
    path_XJ = torch.tensor([[*path, *[0] * HEADS][:HEADS]])
    with torch.no_grad():
        logits_R = heads.project(heads.transform(state.hidden_BD[row][None], k, path_XJ), k)[0]
    ids_R = heads.to_ids(torch.arange(len(logits_R)))
    params, place = state.samplers[row].params, len(state.tokens[row]) + 1 + k
    noise_R = gumbel_noise(params.seed, place, ids_R)
    scores_R = logits_R / (SHARPER * params.temperature) + noise_R
    return ids_R[scores_R.argsort(descending=True)].tolist()


@pytest.mark.parametrize("tree", TREES, ids=["chain", "dynamic"])
def test_guesses_are_what_the_noise_picks(heads: MedusaHeads, tree: Any) -> None:
    """Every node, after its own path, in a batch with a row that is not drawn."""
    state = state_of(heads.base, WARM, SamplingParams(), SamplingParams(0.6, seed=9))
    draft = draft_with(heads, tree).propose(state)
    greedy = draft_with(heads, tree).propose(State(state.requests[1:2]))
    trees = draft.token_lists()
    assert trees[1] == greedy.token_lists()[0]
    for row in (0, 2):
        tokens, parents = trees[row], draft.shapes[row].parents
        for node in range(1, len(parents)):
            above, parent = list[int](), parents[node]
            while parent >= 0:
                above, parent = [tokens[parent], *above], parents[parent]
            siblings = [n for n in range(1, len(parents)) if parents[n] == parents[node]]
            guessed = expected(heads, state, row, len(above) - 1, above)
            assert sorted(tokens[n] for n in siblings) == sorted(guessed[: len(siblings)])


def test_chances_are_below_one_and_fall(heads: MedusaHeads) -> None:
    drafter, state = draft_with(heads, TREES[1]), state_of(heads.base, WARM)
    assert isinstance(drafter, DynamicDrafter)
    for num_nodes in (2, 8):
        drafter = draft_with(heads, DynamicTree(num_nodes, (1.0,) * HEADS, 6))
        assert isinstance(drafter, DynamicDrafter)
        (*_, scores), *_ = drafter.grow(state.hidden_BD, state.roots_B, draws=state.draws())
        assert scores[0] == 0 > scores[1]
        assert sorted(scores, reverse=True) == scores


def test_near_temperature_zero_trees_are_those_of_greedy_rows(heads: MedusaHeads) -> None:
    drafter = draft_with(heads, DynamicTree(12, (1.3, 0.8, 1.6), 6))
    assert isinstance(drafter, DynamicDrafter)
    state, greedy = (
        state_of(heads.base, SamplingParams(temperature)) for temperature in (1e-9, 0.0)
    )
    state.hidden_BD = greedy.hidden_BD
    found, expected = (
        drafter.grow(one.hidden_BD, one.roots_B, draws=one.draws()) for one in (state, greedy)
    )
    for (*ours, own), (*theirs, scores) in zip(found, expected, strict=True):
        assert ours == theirs
        assert own == pytest.approx(scores, abs=1e-3)


@pytest.fixture(scope="module")
def blind() -> BaseModel:
    """It says the same whatever it reads, so that an untrained head knows its distribution."""
    model = tiny_model("llama", vocab_size=VOCAB)
    model.generation_config.eos_token_id = None
    embedding = model.get_input_embeddings().weight.data
    embedding.copy_(embedding[:1].expand_as(embedding))
    model.get_output_embeddings().weight.data.mul_(3)
    return wrap_model(model, None, "blind")


def acceptance(base: BaseModel, tree: Any, *rows: SamplingParams) -> list[float]:
    heads = MedusaHeads.for_base(base, HEADS).requires_grad_(False)
    engine = build_engine(base, heads=heads, tree=tree)
    done = decode_all(engine, draft_with(heads, tree), [[3, 4]] * len(rows), 61, rows)
    return [60 / row.num_steps for row in done]


def test_heads_that_know_the_distribution_guess_every_draw(
    blind: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [WARM, SamplingParams(0.7, seed=1)]
    monkeypatch.setattr(module, "SHARPER", 1.0)
    assert acceptance(blind, TREES[0], *rows) == [HEADS + 1] * 2
    monkeypatch.setattr(module, "SHARPER", SHARPER)
    known = acceptance(blind, TREES[0], *rows)
    monkeypatch.setattr(Sampler, "draws_after", lambda *_: None)
    likeliest = acceptance(blind, TREES[0], *rows)
    assert all(ours > 1.3 * theirs for ours, theirs in zip(known, likeliest, strict=True))


def test_what_is_drawn_is_counted_apart(base: BaseModel) -> None:
    drafter = draft_with(random_heads(base, HEADS, kind="hydra"), TREES[1])
    trees = HeadsSource(drafter).guess(state_of(base, WARM, SamplingParams()))
    drawn = [[DRAWN in key for key in tree.keys[1:] if isinstance(key, tuple)] for tree in trees]
    assert all(drawn[0])
    assert not any(drawn[1])
    assert all(drawn)


def test_no_draws_where_tokens_are_not_drawn(base: BaseModel) -> None:
    typical = SamplingParams(0.7, acceptance="typical")
    assert state_of(base, SamplingParams(), typical).draws() is None
    first, second = state_of(base, SamplingParams(), WARM).draws() or [None, None]
    assert first is None
    assert second is not None
    assert second.heat == pytest.approx(SHARPER * 1.3)


def test_the_temperature_is_the_requests_whatever_the_base_adds() -> None:
    """A processor that the draw in C++ does not know, behind the temperature."""
    base = tiny_base("llama")
    base.model.generation_config.typical_p = 0.5
    (found,) = state_of(base, WARM).draws() or [None]
    assert found is not None
    assert found.heat == pytest.approx(SHARPER * 1.3)


@pytest.mark.slow
@pytest.mark.skipif(kernels.load_library() is None, reason="the C++ kernels are not available")
def test_learned_chances_and_kernels_leave_the_text_alone(base: BaseModel) -> None:
    heads = random_heads(base, HEADS, kind="recurrent")
    texts = []
    for guesses in ("all", "paying"):
        for drafter in ("none", "medusa", "auto"):
            engine = build_engine(base, heads=heads, tree=TREES[1], guesses=guesses)
            found = [
                engine.generate([3, 4, 5], max_new_tokens=24, drafter=drafter, **options).token_ids
                for options in ({"temperature": 1.1}, {"temperature": 0.8, "top_p": 0.9})
            ]
            texts.append(found)
    assert texts == [texts[0]] * len(texts)
