"""Lookahead decoding: the text stays the same, the window is the paper's, the pool helps."""

from itertools import pairwise

import pytest
import torch
from support.small_engines import build_engine, decode_all, endless_base, random_prompt
from support.states import state_from
from support.steps import result_of
from support.tiny_models import CONTEXT, tiny_base, tiny_model

from medusa_kit.drafters.factory import DraftContext, build_drafter
from medusa_kit.drafters.text.lookahead import LookaheadDrafter, Pool
from medusa_kit.errors import ConfigError
from medusa_kit.infer.decode.drafter import State
from medusa_kit.infer.forest import Forest
from medusa_kit.settings.drafters import drafter_options
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.tree.shape import path_to

CPU = torch.device("cpu")
VOCAB = 97


def options(window: int = 3, ngram: int = 3, guesses: int = 4, **more):
    return {"window": window, "ngram": ngram, "guesses": guesses, **more}


def drafter_of(**given) -> LookaheadDrafter:
    return LookaheadDrafter(drafter_options("lookahead", options(**given)), CPU)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_greedy_answers_are_those_of_plain_generate(family):
    """A batch of different lengths; rows end at their stop tokens, one at the context's end."""
    model, engine = tiny_model(family), build_engine(tiny_base(family))
    prompts = [random_prompt(length, length) for length in (2, 19, CONTEXT - 20)]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        mask, tokens = torch.ones_like(ids), min(60, CONTEXT - len(prompt))
        answer = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
        expected.append(answer[0, len(prompt) :].tolist())
    for given in (options(), options(1, 5, 1, from_prompt=False), options(4, 2, 2)):
        results = engine.generate(
            prompts, max_new_tokens=60, drafter="lookahead", drafter_options=given
        )
        assert [result.token_ids for result in results] == expected


def test_guesses_hold_and_save_steps_and_a_note_says_so():
    engine = build_engine(endless_base(24))
    prompts = [random_prompt(n, n, vocab_size=24) for n in (3, 14)]
    asked = {"max_new_tokens": 70}
    plain = engine.generate(prompts, drafter="none", **asked)
    found = engine.generate(prompts, drafter="lookahead", drafter_options=options(), **asked)
    for result, other in zip(found, plain, strict=True):
        assert result.token_ids == other.token_ids
        assert result.stats.acceptance_length > 1.3
    assert found[0].stats.drafter == "lookahead"
    assert "nodes verified a step" in found[0].stats.drafter_notes[0]


def test_a_stop_token_inside_an_accepted_path_ends_the_answer():
    engine = build_engine(endless_base(24))
    prompt = random_prompt(3, 3, vocab_size=24)
    free = engine.generate(prompt, max_new_tokens=70, drafter="none").token_ids
    for stop in set(free[1:]):
        engine.base.model.generation_config.eos_token_id = stop
        result = engine.generate(
            prompt, max_new_tokens=70, drafter="lookahead", drafter_options=options()
        )
        assert result.token_ids == free[: free.index(stop) + 1]


def test_sampled_rows_say_what_they_say_without():
    engine = build_engine(endless_base(8))
    prompts = [random_prompt(n, n, vocab_size=8) for n in (2, 9, 5)]
    sampling = [SamplingParams(0.7, seed=1), SamplingParams(), SamplingParams(1.1, top_k=4, seed=2)]
    drafters = [
        build_drafter(name, DraftContext(engine.verifier), given)
        for name, given in (("none", {}), ("lookahead", options()))
    ]
    plain, found = (decode_all(engine, one, prompts, 50, sampling) for one in drafters)
    assert [row.token_ids for row in found] == [row.token_ids for row in plain]
    assert sum(row.num_steps for row in found) < 0.8 * sum(row.num_steps for row in plain)


def follow(token: int) -> int:
    """A base model that reads the last token alone."""
    return (5 * token + 3) % VOCAB


def step_with(drafter: LookaheadDrafter, state: State, roots: list[int]) -> Forest:
    """One step where nothing is accepted."""
    for request, root in zip(state.requests, roots, strict=True):
        request.root = root
    draft = drafter.propose(State(state.requests))
    likeliest = [[follow(token) for token in row] for row in draft.token_lists()]
    nexts = [follow(root) for root in roots]
    step = result_of(draft, [[] for _ in roots], nexts, state.requests, argmax=likeliest)
    drafter.observe(step)
    return draft


def test_the_window_is_a_chain_with_a_column_after_each_place():
    drafter = drafter_of(window=4, ngram=4, from_prompt=False)
    state = state_from([[7, 8]], [20])
    for root in (20, 30, 40, 50):
        draft = step_with(drafter, state, [root])
    window, parents = state.requests[0].kept[drafter].window, draft.shapes[0].parents
    assert len(window.ends) == 4
    for place, end in enumerate(window.ends):
        path = path_to(end, parents)
        assert len(path) == place + 3  # the chain up to here, and two tokens of its own column
        chain = path_to(window.ends[-1], parents)[: place + 1]
        assert path[: place + 1] == chain
    assert drafter.num_nodes == 4 * 3 + 4 * 3 >= len(parents)


def test_completed_ngrams_are_what_the_base_model_says_and_are_verified_next():
    """With a base that reads one token, all are right except those after an inserted root."""
    drafter = drafter_of(window=4, ngram=4, from_prompt=False)
    state = state_from([[7, 8]] * 2, [20, 21])
    for _ in range(3):
        step_with(drafter, state, [20, 21])
    for row in [one.kept[drafter] for one in state.requests]:
        others = [token for token in range(VOCAB) if token not in (20, 21)]
        ngrams = [(one, *rest) for one in others for rest in row.pool.following(one, VOCAB)]
        assert len(ngrams) >= 2
        for ngram in ngrams:
            assert all(follow(one) == other for one, other in pairwise(ngram)), ngram
    known = ngrams[0][0]
    state.requests[1].root = known
    draft = drafter.propose(State([state.requests[1]]))
    tokens, parents = draft.token_lists()[0], draft.shapes[0].parents
    paths = [[tokens[n] for n in path_to(node, parents)] for node in range(len(parents))]
    chain = [known, follow(known), follow(follow(known)), follow(follow(follow(known)))]
    assert chain in paths


def test_anothers_draft_is_left_alone():
    drafter = drafter_of()
    state = state_from([[7, 8]], [20])
    drafter.propose(state)
    window = state.requests[0].kept[drafter].window
    before = [list(column) for column in window.columns]
    other = Forest.chains([[20]], CPU)
    drafter.observe(result_of(other, [[]], [4], state.requests))
    assert window.columns == before


def test_the_pool_keeps_the_latest():
    pool = Pool(per_token=2)
    for ngram in ([1, 2, 3], [1, 4, 5], [9, 9, 9], [1, 2, 3], [1, 6, 7]):
        pool.add(ngram)
    assert pool.following(1, 8) == [(6, 7), (2, 3)]
    assert pool.following(1, 1) == [(6, 7)]
    assert pool.following(5, 8) == []


def test_likeliest_tokens_are_worked_out_where_the_loop_has_none():
    logits = torch.randn(2, 5, 11)
    draft = Forest.of([[0] * 5] * 2, [[-1, 0, 0, 0, 0]] * 2, CPU)
    step = result_of(draft, [[], []], [0, 0], logits=logits)
    assert step.trees[1].argmax_after([0, 3]) == logits[1, [0, 3]].argmax(-1).tolist()


def test_what_cannot_be_is_refused():
    engine = build_engine(endless_base(24))
    with pytest.raises(ConfigError, match=r"window=30, ngram=4 and guesses=20 make 150 nodes"):
        engine.generate([5], drafter="lookahead", drafter_options=options(30, 4, 20))
    with pytest.raises(ConfigError, match="ngram = 1"):
        engine.generate([5], drafter="lookahead", drafter_options={"ngram": 1})
