"""The promise: greedy answers equal plain transformers generate, token for token, in fp32.

The oracle is a second model of the same seed, asked through transformers' own generate; the answers
come from the engine. Heads are random, so that some guesses hold and most do not, and a second kind
of drafter knows the answer in part, so that long paths are accepted too.
"""

import pytest
import torch
from support.partly_knowing import TREES, PartlyKnowing, plain_answer
from support.samples import pairs
from support.small_engines import build_engine, random_prompt
from support.tiny_models import CONTEXT, FAMILIES, STOP, VOCAB, tiny_base, tiny_model
from transformers import LogitsProcessor, LogitsProcessorList

from medusa_kit.engine.engine import Engine
from medusa_kit.heads import MedusaHeads
from medusa_kit.infer.decode.drafter import Drafter, State
from medusa_kit.infer.decode.request import make_request
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.infer.forest import Forest
from medusa_kit.settings.sampling import SamplingParams


def random_heads(engine: Engine, kind: str = "medusa") -> MedusaHeads:
    """Heads that guess badly but not never."""
    heads = MedusaHeads.for_base(engine.base, num_heads=3, num_blocks=1, kind=kind)
    generator = torch.Generator().manual_seed(1)
    for parameter in heads.parameters():
        parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return heads.requires_grad_(False)


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_and_trees(family: str) -> None:
    engine = build_engine(tiny_base(family))
    engine.heads = random_heads(engine)
    prompts = [random_prompt(length, seed) for seed, length in enumerate((1, 4, 23))]
    for prompt, name in pairs(prompts, list(TREES)):
        engine.use_tree(TREES[name])
        expected = plain_answer(family, prompt, 24)
        assert engine.generate(prompt, max_new_tokens=24).token_ids == expected, name


@pytest.mark.parametrize("kind", ["hydra", "recurrent"])
@pytest.mark.parametrize("family", ["llama-tied", "gemma3", "gpt2"])
def test_heads_that_read_the_path(family: str, kind: str) -> None:
    """Alone and in a batch, whose rows stand at different places of different texts."""
    engine = build_engine(tiny_base(family))
    engine.heads = random_heads(engine, kind)
    prompts = [random_prompt(length, length) for length in (2, 19, 7)]
    expected = [plain_answer(family, prompt, 24) for prompt in prompts]
    for name, tree in TREES.items():
        engine.use_tree(tree)
        together = engine.generate(prompts, max_new_tokens=24)
        assert [result.token_ids for result in together] == expected, name
    results = [engine.generate(prompt, max_new_tokens=24) for prompt in prompts]
    assert [result.token_ids for result in results] == expected
    steps = [result.stats.num_steps for result in results]
    assert [result.stats.num_steps for result in together] == steps


@pytest.mark.parametrize("family", FAMILIES)
def test_random_trees_with_deep_acceptance_in_a_batch(family: str) -> None:
    """Rows of different length advance by different amounts; each gets what it gets alone."""
    engine = build_engine(tiny_base(family))
    prompts = [random_prompt(length, length) for length in (3, 17, 9)]
    truths = {tuple(p): plain_answer(family, p, 30) for p in prompts}
    drafter = PartlyKnowing(truths)
    rows = [make_request(engine.verifier, p, SamplingParams(), 30) for p in prompts]
    for _ in Scheduler(engine.verifier).run(rows, drafter):
        pass
    assert [row.token_ids for row in rows] == list(truths.values())
    assert drafter.most_accepted >= 3
    assert sum(row.num_steps for row in rows) < sum(len(row.token_ids) for row in rows) - 3


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gpt2", "gemma3"])
def test_near_the_contexts_end(family: str) -> None:
    """The last tokens of the context come out as plainly, and nothing comes after them."""
    engine = build_engine(tiny_base(family))
    prompt = random_prompt(CONTEXT - 11, 5)
    expected = plain_answer(family, prompt, 11)
    truth = {tuple(prompt): expected + random_prompt(8, 1)}
    row = make_request(engine.verifier, prompt, SamplingParams(), 50)
    for _ in Scheduler(engine.verifier).run([row], PartlyKnowing(truth)):
        pass
    assert row.token_ids == expected
    if STOP not in expected:
        assert row.finish_reason == "length"
        assert len(prompt) + len(row.token_ids) == CONTEXT


def test_stop_token_inside_an_accepted_path() -> None:
    """A draft that runs on past the stop token is cut at it, as plain decoding stops there."""
    engine = build_engine(tiny_base("llama"))
    for seed in range(40):
        prompt = random_prompt(5, seed)
        free = plain_answer("llama", prompt, 20, stop=None)
        stop = free[6]
        if stop in free[:6]:
            continue
        engine.base.model.generation_config.eos_token_id = [stop]
        row = make_request(engine.verifier, prompt, SamplingParams(), 20)
        for _ in Scheduler(engine.verifier).run([row], Oracle(free)):
            pass
        assert row.token_ids == free[:7]
        assert row.finish_reason == "stop"
        assert row.num_steps < 4
        return
    raise AssertionError("no prompt found whose answer has a fresh token at place 6")


class Oracle(Drafter):
    """Drafts the true continuation as a chain of five."""

    name, num_nodes = "oracle", 6

    def __init__(self, truth: list[int]) -> None:
        self.truth, self.prompt_length = truth, 5

    def propose(self, state: State) -> Forest:
        done = len(state.tokens[0]) - self.prompt_length
        chain = [state.roots_B[0], *self.truth[done + 1 : done + 6]]
        chain += [0] * (6 - len(chain))
        return Forest.chains([chain], torch.device("cpu"))


def test_oracle_drafts_are_accepted_to_full_depth() -> None:
    engine = build_engine(tiny_base("llama"))
    prompt = random_prompt(5, 3)
    truth = plain_answer("llama", prompt, 31, stop=None)
    engine.base.model.generation_config.eos_token_id = None
    row = make_request(engine.verifier, prompt, SamplingParams(), 31)
    for _ in Scheduler(engine.verifier).run([row], Oracle(truth)):
        pass
    assert row.token_ids == truth
    assert row.num_steps == 5  # 1 from the prompt, then 6 a step
    assert row.depth_counts == {5: 5}


def test_wrong_drafts_cost_a_step_each() -> None:
    engine = build_engine(tiny_base("llama"))
    engine.base.model.generation_config.eos_token_id = None
    prompt = random_prompt(5, 3)
    truth = plain_answer("llama", prompt, 20, stop=None)
    wrong = [(token + 1) % VOCAB for token in truth]
    row = make_request(engine.verifier, prompt, SamplingParams(), 20)
    for _ in Scheduler(engine.verifier).run([row], Oracle(wrong)):
        pass
    assert row.token_ids == truth
    assert row.num_steps == 19


def test_repetition_penalty_of_the_base_is_applied_along_the_path() -> None:
    """A penalty in the base's generation config changes the answer, each node by its own prefix."""
    prompt = random_prompt(6, 2)
    reference = tiny_model("llama")
    reference.generation_config.repetition_penalty = 1.6
    ids = torch.tensor([prompt])
    out = reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
    )
    expected = out[0, 6:].tolist()
    assert expected != plain_answer("llama", prompt, 24)
    engine = build_engine(tiny_base("llama"))
    engine.base.model.generation_config.repetition_penalty = 1.6
    row = make_request(engine.verifier, prompt, SamplingParams(), 24)
    for _ in Scheduler(engine.verifier).run([row], PartlyKnowing({tuple(prompt): expected})):
        pass
    assert row.token_ids == expected


class NaivePenalties(LogitsProcessor):
    """OpenAI's penalties over the answer, and a bias, written out for generate."""

    def __init__(self, params: SamplingParams, prompt_length: int) -> None:
        self.params, self.prompt_length = params, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        answer = input_ids[0, self.prompt_length :].tolist()
        for token in set(answer):
            scores[0, token] -= self.params.presence_penalty
            scores[0, token] -= self.params.frequency_penalty * answer.count(token)
        for token, bias in (self.params.logit_bias or {}).items():
            scores[0, token] += bias
        return scores


PENALTIES = [
    SamplingParams(repetition_penalty=1.4),
    SamplingParams(presence_penalty=1.5, frequency_penalty=0.5),
    SamplingParams(frequency_penalty=-0.5),
    SamplingParams(repetition_penalty=0.8, presence_penalty=-0.5, frequency_penalty=1.0,
                   logit_bias={5: 2.0, 9: -100, 40: 4.5}),
]  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_penalties_of_a_request_equal_generates_over_random_trees(family: str) -> None:
    """One batch whose rows have penalties of their own, trees that hold much of the truth."""
    engine, reference = build_engine(tiny_base(family)), tiny_model(family)
    prompts = [random_prompt(length, length) for length in (3, 17, 9, 6)]
    expected = {}
    for prompt, params in zip(prompts, PENALTIES, strict=True):
        ids = torch.tensor([prompt])
        out = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False,
            repetition_penalty=params.repetition_penalty or 1.0,
            logits_processor=LogitsProcessorList([NaivePenalties(params, len(prompt))]),
        )  # fmt: skip
        expected[tuple(prompt)] = out[0, len(prompt) :].tolist()
    assert list(expected.values()) != [plain_answer(family, prompt, 30) for prompt in prompts]
    drafter = PartlyKnowing(expected)
    rows = [
        make_request(engine.verifier, prompt, params, 30)
        for prompt, params in zip(prompts, PENALTIES, strict=True)
    ]
    for _ in Scheduler(engine.verifier).run(rows, drafter):
        pass
    assert [row.token_ids for row in rows] == list(expected.values())
    assert drafter.most_accepted >= 3
