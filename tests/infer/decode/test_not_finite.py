"""A token after which the model's scores are no numbers ends the requests that hold it, and no
other: those beside them, and those to which it is only a draft token, get what they get alone.

The oracle is transformers' own generate on a sound model. The damage is one row of the embedding,
which no check at load sees.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from support.batches import Serving
from support.models.hybrids import tiny_hybrid
from support.small_engines import BUSHY, build_engine, random_heads, random_prompt
from support.tiny_models import tiny_model

from medusa_kit.base.model import wrap_model
from medusa_kit.drafters.factory import DraftContext, build_drafter
from medusa_kit.drafters.heads.choice import draft_with
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import CheckpointError, NotFiniteError
from medusa_kit.heads import MedusaHeads
from medusa_kit.infer.decode.drafter import Drafter, State
from medusa_kit.infer.decode.request import Request, make_request
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.infer.details import OutputOptions
from medusa_kit.infer.forest import Forest
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.tree.dynamic import DynamicTree

NAN, TOKENS, VOCAB = float("nan"), 12, 400
RUNNERS = ["C++", "torch", "captured", "chains"]
FAMILY = {"C++": "qwen3", "torch": "llama", "captured": "llama", "chains": "qwen3_5"}
GREEDY = SamplingParams()
DRAWN = SamplingParams(0.9, seed=5)
RULES = {
    "greedy": GREEDY,
    "drawn": DRAWN,
    "drawn from few": SamplingParams(0.9, top_k=5, top_p=0.9, seed=5),
    "penalised": SamplingParams(presence_penalty=0.5),
    "typical": SamplingParams(0.7, acceptance="typical"),
}


def model_for(runner: str) -> Any:
    """With more tokens than the self-check reads."""
    if runner == "chains":
        return tiny_hybrid("qwen3_5", vocab_size=VOCAB)
    return tiny_model(FAMILY[runner], vocab_size=VOCAB)


@cache
def sound_answer(runner: str, prompt: tuple[int, ...]) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out_1T = model_for(runner).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False
        )
    answer: list[int] = out_1T[0, len(prompt) :].tolist()
    return answer


PROMPTS = [random_prompt(length, length) for length in (5, 19, 11)]


@cache
def unused(runner: str) -> int:
    """A token of no prompt, and of no answer."""
    used = {
        token
        for prompt in PROMPTS
        for rule in RULES
        for token in (*prompt, *alone(runner, rule, tuple(prompt)))
    }
    return next(
        token for token in range(100, VOCAB) if token not in used and can_be_bad(runner, token)
    )


def can_be_bad(runner: str, token: int) -> bool:
    try:
        engine_on(runner if runner != "captured" else "torch", token)
    except CheckpointError:  # the self-check has read it
        return False
    return True


@cache
def engine_on(runner: str, bad: int) -> Engine:
    """An engine whose base has no numbers in the embedding's row of this token."""
    model = model_for(runner)
    model.get_input_embeddings().weight.data[bad] = NAN
    base = wrap_model(model.to("cuda") if runner == "captured" else model)
    return build_engine(base, heads=random_heads(base), tree=BUSHY)


@pytest.fixture
def engine(runner: str, request: pytest.FixtureRequest) -> Iterator[Engine]:
    if runner == "captured":
        request.getfixturevalue("cuda_stand_in")
        engine_on.cache_clear()
    found = engine_on(runner, unused(runner))
    assert runner != "C++" or found.verifier.steps_run_by.startswith("C++")
    yield found
    if runner == "captured":
        engine_on.cache_clear()


def heads_of(engine: Engine) -> MedusaHeads:
    assert engine.heads is not None
    return engine.heads


class Guesses(Drafter):
    """Guesses what is right, beside and behind a token."""

    name, num_nodes = "guesses", 5

    def __init__(self, token: int, answers: dict[tuple[int, ...], list[int]], device: Any) -> None:
        self.token, self.answers, self.device = token, answers, device

    def propose(self, state: State) -> Forest:
        trees, parents = [], []
        for one in state.requests:
            right = self.answers.get(tuple(one.prompt_ids), [])[len(one.token_ids) :]  # type: ignore[attr-defined]
            first, second = [*right, 3, 3][:2]
            trees.append([one.root, self.token, first, second, self.token])
            parents.append([-1, 0, 0, 2, 2])
        return Forest.of(trees, parents, self.device)


def requests_of(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[Request]:
    return [make_request(engine.verifier, prompt, params, TOKENS) for prompt in prompts]


def served(engine: Engine, rows: list[Request], drafter: Drafter, slots: int = 4) -> None:
    scheduler = Serving(engine.verifier, slots, reuse_prefixes=True)
    for row in rows:
        scheduler.add(row, drafter)
    for _ in range(200):
        if all(row.finish_reason for row in rows):
            return
        scheduler.step()
    raise AssertionError("somebody starves")


@cache
def alone(runner: str, rule: str, prompt: tuple[int, ...]) -> list[int]:
    """What a sound model answers by plain decoding."""
    if rule == "greedy":
        return sound_answer(runner, prompt)
    model = model_for(runner)
    engine = build_engine(wrap_model(model))
    (row,) = requests_of(engine, [list(prompt)], RULES[rule])
    list(
        Scheduler(engine.verifier).run([row], build_drafter("none", DraftContext(engine.verifier)))
    )
    return row.token_ids


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("runner", RUNNERS)
def test_a_prompt_with_the_token(runner: str, rule: str, engine: Engine) -> None:
    bad = unused(runner)
    prompts = [PROMPTS[0], [*PROMPTS[1][:9], bad, *PROMPTS[1][9:]], PROMPTS[2]]
    rows = requests_of(engine, prompts, RULES[rule])
    for row in rows:
        row.output_options = OutputOptions(2)
    drafter = draft_with(heads_of(engine), BUSHY) if rule != "typical" else None
    served(engine, rows, drafter or build_drafter("none", DraftContext(engine.verifier)))
    assert isinstance(rows[1].error, NotFiniteError)
    assert "NaN or infinite" in str(rows[1].error)
    assert (rows[1].finish_reason, rows[1].token_ids) == ("error", [])
    for row in (rows[0], rows[2]):
        assert (row.error, row.token_ids) == (None, alone(runner, rule, tuple(row.prompt_ids)))


@pytest.mark.parametrize("runner", ["C++", "torch"])
def test_one_of_a_list_fails_the_call_and_one_of_a_shared_batch_itself(
    runner: str, engine: Engine
) -> None:
    prompts = [PROMPTS[0], [*PROMPTS[1][:9], unused(runner)], PROMPTS[2]]
    with pytest.raises(NotFiniteError, match="NaN or infinite"):
        engine.generate(prompts, max_new_tokens=TOKENS)
    with engine.shared_batch(max_rows=3) as shared:
        answers = [shared.submit(one, max_new_tokens=TOKENS) for one in prompts]
        with pytest.raises(NotFiniteError, match="NaN or infinite"):
            answers[1].result()
        for number in (0, 2):
            expected = sound_answer(runner, tuple(prompts[number]))
            assert answers[number].result().token_ids == expected


@pytest.mark.parametrize("rule", ["greedy", "drawn"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_an_answer_with_the_token(runner: str, rule: str, request: pytest.FixtureRequest) -> None:
    """It ends behind the token, as plain decoding would; its neighbour goes on."""
    if runner == "captured":
        request.getfixturevalue("cuda_stand_in")
        engine_on.cache_clear()
    answers = [alone(runner, rule, tuple(prompt)) for prompt in PROMPTS]
    bad, at, row_of = next(
        (token, answer.index(token), index)
        for index, answer in enumerate(answers)
        for token in answer[2:-1]
        if not any(token in other for other in (*PROMPTS, *answers) if other is not answer)
        and can_be_bad(runner, token)
    )
    engine = engine_on(runner, bad)
    engine_on.cache_clear()
    rows = requests_of(engine, PROMPTS, RULES[rule])
    own = dict(zip(map(tuple, PROMPTS), answers, strict=True))
    served(engine, rows, Guesses(7, own, engine.verifier.base.device))
    for index, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        if index == row_of:
            assert isinstance(row.error, NotFiniteError)
            assert row.token_ids == answer[: at + 1]
        else:
            assert (row.error, row.token_ids) == (None, answer)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("runner", RUNNERS)
def test_the_token_is_guessed(runner: str, rule: str, engine: Engine) -> None:
    """Its keys and values are hidden from all other nodes, and still multiplied by 0."""
    rows = requests_of(engine, PROMPTS, RULES[rule])
    answers = {tuple(prompt): alone(runner, rule, tuple(prompt)) for prompt in PROMPTS}
    served(engine, rows, Guesses(unused(runner), answers, engine.verifier.base.device))
    for row in rows:
        assert row.error is None
        if rule != "typical":  # whose answers depend on what is drafted
            assert row.token_ids == answers[tuple(row.prompt_ids)]


@pytest.mark.parametrize("runner", RUNNERS)
def test_nobody_goes_on_after_its_text(runner: str, engine: Engine) -> None:
    """Neither after a request has failed nor while it is being read."""
    bad, shared = unused(runner), [*PROMPTS[1], *PROMPTS[1]]
    good = [*shared, 7]
    drafter = draft_with(heads_of(engine), BUSHY)
    for slots in (1, 3):
        prompts = [[*shared, bad, 9], good, [*shared, bad, 11], good]
        rows = requests_of(engine, prompts, GREEDY)
        served(engine, rows, drafter, slots)
        assert [type(row.error) for row in rows[::2]] == [NotFiniteError] * 2
        for row in rows[1::2]:
            assert (row.error, row.token_ids) == (None, sound_answer(runner, tuple(good)))


@pytest.mark.parametrize("number", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("where", ["one", "all"])
def test_logits_of_a_step(number: float, rule: str, where: str) -> None:
    """Of torch, in the middle of an answer: one of them or all."""
    model, broken = tiny_model("llama"), [False]

    def breaks(_: Any, inputs: Any, out: torch.Tensor) -> torch.Tensor:
        if not broken[0]:
            return out
        return out.index_fill(-1, torch.tensor(50), number) if where == "one" else out * 0 + number

    model.lm_head.register_forward_hook(breaks)
    engine = build_engine(wrap_model(model))
    (row,) = requests_of(engine, [PROMPTS[0]], RULES[rule])
    scheduler = Serving(engine.verifier, 1)
    scheduler.add(row, build_drafter("none", DraftContext(engine.verifier)))
    for _ in range(3):
        scheduler.step()
    broken[0], done = True, list(row.token_ids)
    scheduler.step()
    if where == "one" and number == -float("inf"):  # a token that is impossible
        assert len(row.token_ids) > len(done)
        return
    assert isinstance(row.error, NotFiniteError)
    assert row.token_ids == done


@pytest.mark.parametrize("tree", ["static", "dynamic"])
@pytest.mark.parametrize("runner", ["C++", "torch"])
def test_heads_that_compute_no_numbers(runner: str, tree: str) -> None:
    base = wrap_model(model_for(runner))
    heads = random_heads(base)
    for block in heads.blocks.parameters():
        block.data.fill_(NAN)
    engine = build_engine(base, heads=heads, tree=BUSHY)
    drafter = draft_with(heads, BUSHY if tree == "static" else DynamicTree(5, (1.0, 1.0, 1.0)))
    for rule in ("greedy", "drawn"):
        rows = requests_of(engine, PROMPTS, RULES[rule])
        served(engine, rows, drafter)
        for row in rows:
            assert (row.error, row.token_ids) == (None, alone(runner, rule, tuple(row.prompt_ids)))
            if tree == "dynamic":
                assert row.num_nodes == row.num_steps, "nothing is drafted"


@pytest.mark.parametrize("drafter", ["medusa", "auto"])
@pytest.mark.parametrize("tree", ["static", "dynamic"])
@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.parametrize("runner", ["C++", "torch"])
def test_heads_that_compute_no_numbers_are_told_once(
    runner: str, kind: str, tree: str, drafter: str
) -> None:
    base = wrap_model(model_for(runner))
    heads = random_heads(base, kind=kind)
    own = BUSHY if tree == "static" else DynamicTree(5, (1.0, 1.0, 1.0))
    engine, given = build_engine(base, heads=heads, tree=own), {"max_new_tokens": 24}
    found = engine.generate(PROMPTS[0], drafter=drafter, **given)
    assert "NaN" not in " ".join(found.stats.drafter_notes)
    for block in heads.blocks.parameters():
        block.data.fill_(NAN)
    again = engine.generate(PROMPTS[0], drafter=drafter, **given)
    assert again.token_ids == found.token_ids
    notes = [note for note in again.stats.drafter_notes if "NaN or infinite" in note]
    assert [note.partition(":")[0] for note in notes] == ["heads"]


@pytest.mark.parametrize("name", ["recycling", "suffix", "auto"])
@pytest.mark.parametrize("runner", RUNNERS[:3])
def test_drafters_that_learn_from_its_scores(runner: str, name: str, engine: Engine) -> None:
    bad = unused(runner)
    drafter = build_drafter(name, DraftContext(engine.verifier, engine.heads, tree=BUSHY))
    prompts = [[*PROMPTS[0], bad, *PROMPTS[0]], *PROMPTS]
    for _ in range(2):  # what the first have left is drafted for the second
        rows = requests_of(engine, prompts, GREEDY)
        served(engine, rows, drafter)
        assert isinstance(rows[0].error, NotFiniteError)
        for row in rows[1:]:
            expected = sound_answer(runner, tuple(row.prompt_ids))
            assert (row.error, row.token_ids) == (None, expected)


@pytest.mark.parametrize("damage", ["one row", "all"])
@pytest.mark.parametrize("rule", ["greedy", "drawn"])
def test_a_draft_model_without_numbers(rule: str, damage: str) -> None:
    base = wrap_model(model_for("torch"))
    engine = build_engine(base)
    draft = tiny_model("llama", 1, vocab_size=VOCAB)
    weight = draft.get_input_embeddings().weight.data
    draft_base = wrap_model(draft)
    options = {"tokenizer": "same", "max_length": 3}
    context = DraftContext(engine.verifier, draft_model=draft_base)
    drafter = build_drafter("draft-model", context, options)
    weight[sound_answer("torch", tuple(PROMPTS[0]))[3] if damage == "one row" else slice(None)] = (
        NAN
    )
    rows = requests_of(engine, PROMPTS, RULES[rule])
    served(engine, rows, drafter)
    for row in rows:
        assert (row.error, row.token_ids) == (None, alone("torch", rule, tuple(row.prompt_ids)))
    if damage == "all":
        told = [note for note in drafter.notes if "NaN or infinite" in note]
        assert told == drafter.notes[:1]
