"""Trees to try, what plain transformers answers, and a drafter that knows it in part."""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from medusa_kit.engine.engine import Engine
from medusa_kit.infer.decode.batch import Batch
from medusa_kit.infer.decode.drafter import Drafter, State
from medusa_kit.infer.decode.request import Request, make_request
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.infer.forest import Forest
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.tree.candidate_tree import CandidateTree
from support.small_engines import BUSHY
from support.tiny_models import STOP, VOCAB, tiny_model

TREES = {
    "root": CandidateTree.root_only(),
    "chain": CandidateTree.chain(3),
    "wide": CandidateTree([(rank,) for rank in range(9)]),
    "bushy": BUSHY,
}


def plain_answer(
    family: str, prompt: Sequence[int], max_new_tokens: int, stop: int | None = STOP
) -> list[int]:
    return list(_plain_answer(family, tuple(prompt), max_new_tokens, stop))


@cache
def _plain_answer(
    family: str, prompt: tuple[int, ...], max_new_tokens: int, stop: int | None
) -> list[int]:
    """Several tests ask for the same, of a model that nobody else has."""
    ids, model = torch.tensor([prompt]), _model(family)
    model.generation_config.eos_token_id = stop
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


_model = cache(tiny_model)


class PartlyKnowing(Drafter):
    """Knows the true answer and hides it among wrong guesses: random trees that hold the truth to a
    random depth, another one for each row and step, of another size."""

    name = "partly-knowing"
    num_nodes = 12

    def __init__(self, truths: dict[tuple[int, ...], list[int]], seed: int = 0) -> None:
        self.truths, self.random = truths, random.Random(seed)
        self.most_accepted = 0

    def propose(self, state: State) -> Forest:
        rows = [self._row(tokens, root) for tokens, root in
                zip(state.tokens, state.roots_B, strict=True)]  # fmt: skip
        tokens, parents = zip(*rows, strict=True)
        return Forest.of(tokens, parents, torch.device("cpu"))

    def _row(self, committed: list[int], root: int) -> tuple[list[int], list[int]]:
        prompt = next(p for p in self.truths if tuple(committed[: len(p)]) == p)
        done = len(committed) - len(prompt) + 1
        truth = self.truths[prompt][done : done + self.random.randrange(6)]
        tokens, parents, tip = [root], [-1], 0
        for token in truth:
            while self.random.random() < 0.4 and len(tokens) < self.num_nodes - 6:
                tokens.append(self.random.choice([t for t in range(VOCAB) if t != token]))
                parents.append(self.random.randrange(len(parents)))
                if (tokens[-1], parents[-1]) in zip(tokens[:-1], parents[:-1], strict=True):
                    del tokens[-1], parents[-1]  # a sibling with the same token
            tokens.append(token)
            parents.append(tip)
            tip = len(tokens) - 1
        return tokens, parents

    def observe(self, step: Any) -> None:
        self.most_accepted = max(self.most_accepted, *(len(path) for path in step.paths))


Truths = dict[tuple[int, ...], list[int]]


def answered(
    engine: Engine, truths: Truths, prompts: list[list[int]], tokens: int
) -> list[Request]:
    """Rows that were decoded together, with drafts that are right now and then."""
    rows = [make_request(engine.verifier, prompt, SamplingParams(), tokens) for prompt in prompts]
    for _ in Scheduler(engine.verifier).run(rows, PartlyKnowing(truths)):
        pass
    return rows


def answered_in(batch: Batch, truths: Truths, tokens: int) -> list[Request]:
    """The same in a batch that may hold what came before."""
    rows = [make_request(batch.verifier, list(p), SamplingParams(), tokens) for p in truths]
    drafter = PartlyKnowing(truths)
    for row in rows:
        batch.add(row, drafter)
    while batch.num_requests:
        batch.step()
        batch.raise_error()
    return rows
