"""What drafters that know their base must keep: plain transformers' answers, whoever joins and
leaves."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from medusa_kit.engine.engine import Engine
from medusa_kit.infer.decode.drafter import RequestText, State
from medusa_kit.infer.decode.request import make_request
from medusa_kit.infer.forest import Forest
from medusa_kit.settings.sampling import SamplingParams
from support.tiny_models import CONTEXT
from support.wrapped import Wrapped

DRAWN = {"temperature": 0.7, "top_p": 0.9, "seed": 3}
Prompts = Sequence[list[int]]


def tokens_of(results: Any) -> list[list[int]]:
    return [result.token_ids for result in results]


def plain_answers(model: Any, prompts: Prompts, tokens: int) -> list[list[int]]:
    """Those of transformers' own generate, to the context's end at most."""
    answers = []
    for prompt in prompts:
        ids, room = torch.tensor([prompt]), min(tokens, CONTEXT - len(prompt))
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=room, do_sample=False
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def drafts_looked_at(
    engine: Engine, name: str, prompts: Prompts, tokens: int,
    look: Callable[[Any, RequestText, list[int]], None], **options: Any,
) -> list[list[int]]:  # fmt: skip
    """Answers. `look`: called with the drafter, a request and its chain of draft tokens, at each
    step of each request."""
    drafter = engine.drafter_for(name, options, len(prompts))

    def propose(original: Callable[[State], Forest], state: State) -> Forest:
        draft = original(state)
        for request, tokens in zip(state.requests, draft.token_lists(), strict=True):
            look(drafter, request, tokens[1:])
        return draft

    looked_at: Any = Wrapped(drafter, propose=propose)
    rows = [make_request(engine.verifier, one, SamplingParams(), tokens) for one in prompts]
    for _ in engine.scheduler.run(rows, looked_at):
        pass
    return [row.token_ids for row in rows]


def check_a_seed(engine: Engine, prompts: Prompts, drafter: str, tokens: int) -> None:
    """A seed says the same with drafts and without."""
    given: Any = {**DRAWN, "max_new_tokens": tokens}
    plain = tokens_of(engine.generate(prompts, drafter="none", **given))
    assert tokens_of(engine.generate(prompts, drafter=drafter, **given)) == plain
    assert len(set(map(tuple, plain))) == len(prompts)


def check_rows(
    engine: Engine, prompts: Prompts, expected: list[list[int]], drafter: str, tokens: int
) -> None:
    """An answer that is cancelled in the middle, two that go on beside each other, and one that
    nobody drafts for. `prompts`: three."""
    given: Any = {"drafter": drafter, "max_new_tokens": tokens}
    with engine.shared_batch(max_rows=2) as batch:
        answers = [batch.submit(one, **given) for one in (*prompts, prompts[0])]
        plain = batch.submit(prompts[0], drafter="none", max_new_tokens=tokens)
        next(iter(answers[1].submission))
        answers[1].cancel()
        found = [answer.result().token_ids for answer in answers]
        assert plain.result().token_ids == expected[0]
    assert found[0] == found[3] == expected[0]
    assert found[2] == expected[2]
    assert 0 < len(found[1]) < len(expected[1])
