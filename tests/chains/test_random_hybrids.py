"""Random requests to models that carry a state: rows join, leave and are cancelled at any step,
with any drafter and sampling, and begin with what earlier ones left."""

import random
from functools import cache
from typing import Any

import pytest
import torch
from support.debug_model import small_tokenizer
from support.models.hybrids import tiny_hybrid
from support.partly_knowing import PartlyKnowing
from support.small_engines import build_engine, random_heads

from medusa_kit.base.gguf import CHATML_TEMPLATE
from medusa_kit.base.model import wrap_model
from medusa_kit.drafters.memory import Memory
from medusa_kit.engine.engine import Engine
from medusa_kit.engine.shared_batch import ANY_SAMPLING
from medusa_kit.infer.decode.batch import Batch
from medusa_kit.infer.decode.request import Request
from medusa_kit.settings.grammar import Grammar

FAMILIES = ["qwen3_5", "nemotron_h", "lfm2", "falcon_h1", "mamba2"]
DRAFTERS = ["medusa", "auto", "suffix", "recycling", "prompt-lookup", "none"]
GRAMMARS = [
    Grammar.regex("([ab]{2}[cd]){3,8}"),
    Grammar.choices(["alphabet", "alpine"]),
    Grammar.json_schema({"enum": [[1, 2], ["ab", "abab"]]}),
]
NUM_ROWS = 3  # at once


@cache
def engine_of(family: str) -> Engine:
    tokenizer = small_tokenizer(CHATML_TEMPLATE)
    context = {} if family == "mamba2" else {"max_position_embeddings": 128}
    model = tiny_hybrid(
        family, vocab_size=len(tokenizer), eos_token_id=1, bos_token_id=0, **context
    )
    model.generation_config.eos_token_id = 1
    base = wrap_model(model, tokenizer, f"random-{family}")
    return build_engine(base, heads=random_heads(base), prefix_cache="off")


def options_of(draw: random.Random) -> dict[str, Any]:
    """Sampling, stop strings and a grammar, or none of them."""
    options: dict[str, Any] = {}
    if draw.random() < 0.5:
        options |= {"temperature": draw.choice([0.3, 1.0]), "seed": draw.randrange(9)}
    if draw.random() < 0.3:
        options["grammar"] = draw.choice(GRAMMARS)
    elif draw.random() < 0.4:
        options["stop"] = draw.choice(["a", "�", "ab"])
    if draw.random() < 0.2:
        options["repetition_penalty"] = 1.2
    return options


def prompt_of(draw: random.Random, texts: list[list[int]]) -> list[int]:
    """Something new, or an earlier text as it was, its beginning, or more of it."""
    new = [draw.randrange(4, 260) for _ in range(draw.choice([1, 2, 7, 20]))]
    if not texts or draw.random() < 0.3:
        return new * draw.choice([1, 2])
    earlier = draw.choice(texts)
    kept = earlier[: draw.randrange(1, len(earlier) + 1)] if draw.random() < 0.4 else earlier
    return [*kept, *(new if draw.random() < 0.7 else [])][:90]


def expected(engine: Engine, prompt: list[int], tokens: int, options: dict[str, Any]) -> list[int]:
    """By transformers' generate where it has the same options, else plain decoding alone."""
    if options:
        found = engine.generate(prompt, max_new_tokens=tokens, drafter="none", **options)
        return list(found.token_ids)
    ids_1T = torch.tensor([prompt])
    whole_1T = engine.base.model.generate(
        ids_1T, attention_mask=torch.ones_like(ids_1T), max_new_tokens=tokens, do_sample=False
    )
    return whole_1T[0, len(prompt) :].tolist()


def run_case(family: str, seed: int, num_requests: int) -> dict[str, int]:
    """What was met, by its name."""
    draw, engine = random.Random(seed), engine_of(family)
    engine.memory = Memory()
    batch = Batch(engine.verifier, NUM_ROWS)
    steps = engine.scheduler.steps
    batch.cost = None if steps is None else steps.cost
    texts, running = list[list[int]](), list[tuple[Request, list[int], int | None, str]]()
    truths: dict[tuple[int, ...], list[int]] = {}
    knowing = PartlyKnowing(truths, seed)
    met = dict.fromkeys(("answers", "reused", "cancelled", "guessed", "near-ties"), 0)
    waiting = num_requests
    while waiting or running:
        while waiting and len(running) < NUM_ROWS + 1 and draw.random() < 0.6:
            waiting -= 1
            options, tokens = options_of(draw), draw.choice([1, 5, 16, 28])
            prompt = prompt_of(draw, texts)
            stop = options.get("stop")
            sampling = {name: one for name, one in options.items() if name != "stop"}
            row, _, _ = engine.request_for("test", prompt, tokens, stop, sampling)
            wanted = truths[tuple(prompt)] = expected(engine, prompt, tokens, options)
            name = draw.choice(DRAFTERS)
            own = engine.drafter_for(name, None, NUM_ROWS, ANY_SAMPLING)
            batch.add(row, draw.choice([knowing, own]))
            told = f"{family}, seed {seed}: {name}, {options}, {prompt}"
            running.append((row, wanted, draw.choice([None, None, draw.randrange(8)]), told))
        batch.step()
        batch.raise_error()
        for entry in list(running):
            row, wanted, until, told = entry
            if until is not None and row.num_steps >= until and row.finish_reason is None:
                row.cancel()
            if row.finish_reason is not None:
                running.remove(entry)
                if row.finish_reason == "cancelled":
                    wanted = wanted[: len(row.token_ids)]
                assert row.token_ids == wanted or row.near_ties, told
                texts.append([*row.prompt_ids, *row.token_ids])
                met["answers"] += 1
                met["reused"] += row.num_cached > 0
                met["cancelled"] += row.finish_reason == "cancelled"
                met["guessed"] += len(row.token_ids) > row.num_steps + 1
                met["near-ties"] += row.near_ties > 0
    return met


@pytest.mark.parametrize(("seed", "family"), list(enumerate(FAMILIES)))
def test_random_requests(seed: int, family: str) -> None:
    met = run_case(family, seed, 8)
    assert met["answers"] == 8
    assert met["reused"] + met["cancelled"] + met["guessed"] > 1, "proves too little"
