"""The draft model as a drafter: the same answers with any model, acceptance as good as the model.

Pairs are built in code: the same weights again (every guess is right), the first layers of the
base (some are), and another model altogether (few are).
"""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
import torch
from support.partly_knowing import plain_answer
from support.small_engines import build_engine, decode_all, endless_base, random_prompt
from support.states import begun, state_from
from support.steps import result_of
from support.tiny_models import CONTEXT, STOP, tiny_base, tiny_model

from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.drafters.draft_model import loading as draft_loading
from medusa_kit.drafters.draft_model import runner as draft_runner
from medusa_kit.drafters.draft_model.drafter import DraftModelDrafter
from medusa_kit.drafters.factory import DraftContext, build_drafter
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import ConfigError, IncompatibleBaseError
from medusa_kit.infer.attention.step import current_step
from medusa_kit.infer.decode.drafter import Drafter, State
from medusa_kit.infer.decode.request import make_request
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.tree.draft_tree import DraftTree

OPTIONS: dict[str, dict[str, Any]] = {
    "always three": {"threshold": 0, "max_length": 3},
    "by confidence": {"threshold": 0.1, "num_nodes": 9},
}


def first_layers(family: str, count: int = 2, seed: int = 0, **changes: Any) -> BaseModel:
    """A draft that shares embeddings and its layers with the tiny model of `family`."""
    model = tiny_model(family, seed, **changes)
    model.model.layers = model.model.layers[:count]
    model.config.num_hidden_layers = count
    return wrap_model(model, None, f"first-{count}")


def drafter_for(
    engine: Engine, draft: BaseModel, options: dict[str, Any], rows: int = 1, **sampling: Any
) -> DraftModelDrafter:
    context = DraftContext(
        engine.verifier,
        draft_model=draft,
        batch_size=rows,
        sampling=SamplingParams(**sampling),
        memory=engine.memory,
    )
    drafter = build_drafter("draft-model", context, options)
    assert isinstance(drafter, DraftModelDrafter)
    return drafter


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gpt2", "gemma3"])
def test_answers_are_those_of_generate_in_a_batch(family: str) -> None:
    engine = build_engine(tiny_base(family))
    other = tiny_base(family, seed=1)
    drafts = [other] if family == "gpt2" else [first_layers(family), other]
    prompts = [random_prompt(length, length) for length in (3, 17, 9)]
    expected = [plain_answer(family, prompt, 24) for prompt in prompts]
    accepted = 0
    for engine.draft_model in drafts:
        for name, options in OPTIONS.items():
            call = {"max_new_tokens": 24, "drafter": "draft-model", "drafter_options": options}
            together = engine.generate(prompts, **call)
            assert [result.token_ids for result in together] == expected, name
            accepted += sum(r.stats.num_steps < len(r.token_ids) - 1 for r in together)
    assert accepted > 0


def test_the_same_weights_are_accepted_to_full_depth() -> None:
    """And each draft costs as many forwards as it has tokens: no token is read twice."""
    engine, draft = build_engine(endless_base(96)), endless_base(96)
    for length in (1, 4):
        drafter = drafter_for(engine, draft, {"threshold": 0, "max_length": length})
        row = make_request(engine.verifier, random_prompt(9, 1), SamplingParams(), 21)
        for _ in Scheduler(engine.verifier).run([row], drafter):
            pass
        steps = 20 // (length + 1)
        assert row.depth_counts == {length: steps}
        assert drafter.num_forwards == steps * length
        assert f"{length}.00 of {length}.00" in drafter.notes[0]


def test_rows_that_leave_and_advance_apart_keep_their_own_caches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A draft that is often right in a batch whose rows end at different places: each row takes the
    steps it takes alone. The draft's cache is too small at first and grows."""
    grown: list[int] = []
    grow = TreeCache.grow
    monkeypatch.setattr(
        TreeCache, "grow", lambda cache, n, *rows: (grown.append(n), grow(cache, n, *rows))
    )
    monkeypatch.setattr(draft_runner, "ROOM", 1)
    engine = build_engine(endless_base(8))
    draft = endless_base(8)
    for layer in draft.model.model.layers[1:]:
        layer.mlp.down_proj.weight.data.mul_(0.9)
    prompts = [random_prompt(length, length, 8) for length in (3, 30, 11)]
    limits, options = (9, 30, 17), {"threshold": 0, "max_length": 5}

    def run(indices: list[int]) -> list[Any]:
        rows = [
            make_request(engine.verifier, prompts[i], SamplingParams(), limits[i]) for i in indices
        ]
        for _ in Scheduler(engine.verifier).run(rows, drafter_for(engine, draft, options)):
            pass
        return [(row.token_ids, row.depth_counts) for row in rows]

    together = run([0, 1, 2])
    assert together == [run([index])[0] for index in range(3)]
    depths = {depth for _, counts in together for depth in counts}
    assert len(grown) > 1
    assert len(depths) > 2, "the test needs drafts that are accepted in part"
    plain = [engine.generate(p, max_new_tokens=n, drafter="none").token_ids
             for p, n in zip(prompts, limits, strict=True)]  # fmt: skip
    assert [tokens for tokens, _ in together] == plain


@pytest.mark.parametrize("draft_context", [CONTEXT, 40])
def test_near_the_end_of_either_context(draft_context: int) -> None:
    """A draft model with a shorter context stops drafting where that ends."""
    engine = build_engine(tiny_base("llama"))
    engine.draft_model = wrap_model(
        tiny_model("llama", max_position_embeddings=draft_context), None, "short"
    )
    prompts = [random_prompt(CONTEXT - 11, 5), random_prompt(20, 3), random_prompt(37, 2)]
    expected = [plain_answer("llama", prompt, 30, stop=None)[: CONTEXT - len(prompt)]
                for prompt in prompts]  # fmt: skip
    engine.base.model.generation_config.eos_token_id = None
    call = {"max_new_tokens": 30, "drafter": "draft-model",
            "drafter_options": {"threshold": 0, "max_length": 6}}  # fmt: skip
    results = engine.generate(prompts, **call)
    assert [result.token_ids for result in results] == expected
    if draft_context == CONTEXT:
        assert results[0].stats.acceptance_length > 4
    else:
        alone = engine.generate(prompts[0], **call)
        assert alone.stats.acceptance_length == 1.0
        assert alone.stats.drafter_notes == []
        assert 1 < results[1].stats.acceptance_length < 4


def test_a_stop_token_ends_the_draft_and_the_answer() -> None:
    engine = build_engine(tiny_base("llama"))
    free = plain_answer("llama", random_prompt(5, 0), 20, stop=None)
    engine.base.model.generation_config.eos_token_id = stop = free[6]
    assert stop not in free[:6]
    engine.draft_model = tiny_base("llama")
    result = engine.generate(
        random_prompt(5, 0), max_new_tokens=20, drafter="draft-model",
        drafter_options={"threshold": 0, "max_length": 9},
    )  # fmt: skip
    assert result.token_ids == free[:7]
    assert "6 forwards, 6.00 of 6.00" in result.stats.drafter_notes[0]


SETTINGS = [
    SamplingParams(0.8, seed=1),
    SamplingParams(1.2, top_k=7, seed=2),
    SamplingParams(),
    SamplingParams(0.9, top_p=0.8, seed=5, repetition_penalty=1.3, frequency_penalty=0.5),
    SamplingParams(frequency_penalty=1.0),
]


def test_matched_draws_give_the_seeds_own_text() -> None:
    """With the same weights every draw is guessed, with penalties too; with others some are."""
    engine = build_engine(endless_base(96))
    prompts = [random_prompt(length, length) for length in (5, 17, 8, 3, 12)]
    expected = [
        engine.generate(prompt, max_new_tokens=25, drafter="none", **asdict(params)).token_ids
        for prompt, params in zip(prompts, SETTINGS, strict=True)
    ]
    options = {"threshold": 0, "max_length": 3}
    drafter = drafter_for(engine, endless_base(96), options, temperature=1.0)
    rows = decode_all(engine, drafter, prompts, 25, SETTINGS)
    assert [row.token_ids for row in rows] == expected
    assert all(row.depth_counts == {3: 6} for row in rows)

    few = build_engine(endless_base(8))
    params = SamplingParams(1.0, seed=3)
    expected = [few.generate(p, max_new_tokens=40, drafter="none", **asdict(params)).token_ids
                for p in ([5, 3, 7], [1, 2])]  # fmt: skip
    for options in OPTIONS.values():
        drafter = drafter_for(few, first_layers("llama", 1, vocab_size=8), options, temperature=1)
        rows = decode_all(few, drafter, [[5, 3, 7], [1, 2]], 40, [params] * 2)
        assert [row.token_ids for row in rows] == expected


def without_samplers(guess: Callable[[State], list[DraftTree]], state: State) -> list[DraftTree]:
    for request in state.requests:
        request.sampler = None
    try:
        return guess(state)
    finally:
        for request, sampler in zip(state.requests, state.samplers, strict=True):
            request.sampler = sampler


def test_foreseeing_the_noise_agrees_more_often_than_drafting_greedily() -> None:
    few, draft = build_engine(endless_base(8)), first_layers("llama", vocab_size=8)
    params = [SamplingParams(1.0, seed=seed) for seed in range(24)]

    def steps(blind: bool) -> int:
        drafter = drafter_for(few, draft, {"threshold": 0, "max_length": 3}, temperature=1.0)
        if blind:
            drafter.guess = partial(without_samplers, drafter.guess)  # type: ignore[method-assign]
        rows = decode_all(few, drafter, [[5, 3, 7]] * 24, 24, params)
        return sum(row.num_steps for row in rows)

    assert steps(blind=False) < 0.95 * steps(blind=True)


class Sharing(Drafter):
    """A drafter that merges the draft model's guesses with a wrong one, and drafts on its own now
    and then."""

    name, num_nodes = "sharing", 8

    def __init__(self, source: DraftModelDrafter) -> None:
        self.source, self.turn = source, 0
        self.begin, self.finish = source.begin, source.finish  # type: ignore
        self.observe = source.observe  # type: ignore[method-assign]

    def propose(self, state: State) -> Forest:
        self.turn += 1
        if self.turn % 3 == 0:
            return Forest.chains([[root, 0] for root in state.roots_B], torch.device("cpu"))
        trees = self.source.guess(state)
        for tree in trees:
            assert tree.keys[1][0] == "draft-model"
            tree.add(0, 0, 0.1)
        return Forest.of_drafts(trees, torch.device("cpu"))


def test_as_a_source_of_anothers_tries() -> None:
    engine, draft = build_engine(endless_base(96)), endless_base(96)
    prompts = [random_prompt(length, length) for length in (4, 11)]
    plain = [engine.generate(p, max_new_tokens=30, drafter="none").token_ids for p in prompts]
    source = drafter_for(engine, draft, {"threshold": 0, "max_length": 4}, rows=2)
    rows = decode_all(engine, Sharing(source), prompts, 30, [SamplingParams()] * 2)
    assert [row.token_ids for row in rows] == plain
    assert "4.00 of 4.00" in source.notes[0]
    assert rows[0].num_steps < 10


def test_loaded_once_for_an_engine_and_warned_about_when_larger(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, loads = build_engine(load_base_model("debug-tiny", device="cpu")), []

    def load(name: str, **where: Any) -> BaseModel:
        loads.append((name, where))
        return load_base_model(name, **where)

    monkeypatch.setattr(draft_loading, "base_for_decoding", load)
    engine.draft_model = "debug-tiny"
    for _ in range(2):
        engine.generate("Hi", max_new_tokens=4, drafter="draft-model")
    assert loads == [("debug-tiny", {"dtype": "float32", "device": "cpu"})]
    assert "warning" not in capsys.readouterr().err

    small = build_engine(first_layers("llama", 1))
    small.draft_model = tiny_base("llama")
    for _ in range(2):
        small.generate([5, 3], max_new_tokens=4, drafter="draft-model")
    said = capsys.readouterr().err
    assert said.count("tiny-llama has 0.0M parameters, more than") == 1


def test_what_cannot_be_is_refused() -> None:
    engine = build_engine(tiny_base("llama"))
    with pytest.raises(ConfigError, match="no draft model is named for 'tiny-llama'"):
        engine.generate([5], drafter="draft-model")
    engine.draft_model = tiny_base("llama")
    wrong = {
        "lengths = 'heuristic' is no longer there": {"lengths": "heuristic"},
        "no option 'treshold'": {"treshold": 0.5},
        "expected a draft_model": {"staged": {"drafter": "draft-model"}},
    }
    for message, options in wrong.items():
        with pytest.raises(ConfigError, match=message):
            engine.generate([5], drafter="draft-model", drafter_options=options)


def test_observing_a_step_it_had_no_part_in_counts_nothing() -> None:
    engine = build_engine(endless_base(8))
    drafter = drafter_for(engine, endless_base(8), {})
    state = begun(drafter, state_from([[1, 2]], [3]))
    draft = Forest.chains([[3]], torch.device("cpu"))
    drafter.observe(result_of(draft, [[]], [4], state.requests))
    assert drafter.notes == []
    assert STOP not in engine.base.stop_token_ids


def test_a_draft_model_that_was_changed_before_its_first_answer() -> None:
    """Its check is of the model as it is: this one's forwards mind how the nodes of rows lie, and
    pass once they are padded."""
    draft, prompt = tiny_base("llama"), random_prompt(9, 9)
    layer = draft.model.model.layers[1].mlp

    def by_row(_: torch.nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor | None:
        step = current_step(layer)
        as_one = step is not None and args[0].shape[0] < len(step.lengths)
        return out * 1.5 if as_one else None

    layer.register_forward_hook(by_row)
    engine = build_engine(tiny_base("llama"))
    assert drafter_for(engine, draft, {}).runner.verifier.pads
    engine.draft_model = draft
    result = engine.generate(prompt, max_new_tokens=12, drafter="draft-model")
    assert result.token_ids == plain_answer("llama", prompt, 12)


def test_a_draft_model_that_is_changed_while_it_is_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What fails amid the change is not the model's fault; where nothing was changed, it is."""
    engine, draft = build_engine(endless_base(96)), endless_base(96, seed=1)
    weight, prepared, tries = draft.model.lm_head.weight, draft_loading.prepare_backends, []

    def amid_a_change(*arguments: Any, **options: Any) -> Any:
        tries.append(1)
        if len(tries) == 1:
            weight.data[5] += 1
            raise RuntimeError("half of it")
        return prepared(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(draft_loading, "prepare_backends", amid_a_change)
        drafter_for(engine, draft, {})
        assert len(tries) == 2
        tries.clear()
        weight = torch.zeros(96, 1)  # of no model
        with pytest.raises(IncompatibleBaseError, match=r"draft model 'endless-96'.*half of it"):
            drafter_for(build_engine(endless_base(96)), draft, {})
