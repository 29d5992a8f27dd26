"""Engines around tiny models, with random heads that guess badly but not never."""

import random
from collections.abc import Iterable
from typing import Any

import torch

from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.engine import load
from medusa_kit.engine.engine import Engine
from medusa_kit.heads import MedusaHeads
from medusa_kit.infer.decode.drafter import Drafter
from medusa_kit.infer.decode.request import Request, make_request
from medusa_kit.infer.decode.scheduler import KEPT_BYTES, Scheduler
from medusa_kit.infer.verifier import Verifier
from medusa_kit.settings.engine import EngineOptions
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.tree.candidate_tree import CandidateTree
from support.tiny_models import VOCAB, tiny_base, tiny_model

BUSHY = CandidateTree([(0,), (1,), (2,), (5,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 3)])


def build_engine(base: BaseModel, *, keep_layers: bool = False, **options: Any) -> Engine:
    """With options as keywords, without heads unless some are given; all guesses are verified."""
    around = EngineOptions(**{"heads": None, "guesses": "all", **options})
    return load.build_engine(base, around, keep_layers=keep_layers)


def reusing(verifier: Verifier, kept_bytes: int = KEPT_BYTES) -> Scheduler:
    """A scheduler that has not read anything yet, and keeps what it reads."""
    return Scheduler(verifier, reuse_prefixes=True, kept_bytes=kept_bytes)


def random_prompt(length: int, seed: int, vocab_size: int = VOCAB) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, vocab_size) for _ in range(length)]


def random_heads(base: BaseModel, num_heads: int = 3, **kinds: Any) -> MedusaHeads:
    heads = MedusaHeads.for_base(base, num_heads=num_heads, **kinds)
    generator = torch.Generator().manual_seed(1)
    for block in heads.blocks.parameters():
        block.data.copy_(0.1 * torch.randn(block.shape, generator=generator))
    for weight in () if heads.recurrent is None else heads.recurrent.parameters():
        noise = torch.randn(weight.shape, generator=generator).to(weight.device)
        weight.data.add_(0.1 * noise)
    return heads.requires_grad_(False).eval()


def endless_base(vocab_size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> BaseModel:
    """A tiny Llama with few tokens and no stop token: any guess is right now and then."""
    model = tiny_model("llama", seed, vocab_size=vocab_size)
    model.generation_config.eos_token_id = None
    return wrap_model(model.to(dtype), None, f"endless-{vocab_size}")


def engine_with_heads(
    base: BaseModel | None = None, tree: CandidateTree = BUSHY, **kinds: Any
) -> Engine:
    base = base or tiny_base("llama")
    return build_engine(base, heads=random_heads(base, **kinds), tree=tree)


def lively_chat_base() -> BaseModel:
    """debug-tiny with wider weights, so that answers differ from prompt to prompt."""
    tiny = load_base_model("debug-tiny", device="cpu")
    for parameter in tiny.model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(8)
    return wrap_model(tiny.model, tiny.tokenizer, "lively")


def decode_all(
    engine: Engine,
    drafter: Drafter,
    prompts: Iterable[list[int]],
    tokens: int,
    sampling: Iterable[SamplingParams],
) -> list[Request]:
    """Rows decoded together, each with its own sampling parameters."""  # fmt: skip
    rows = [
        make_request(engine.verifier, prompt, params, tokens)
        for prompt, params in zip(prompts, sampling, strict=True)
    ]
    for _ in Scheduler(engine.verifier).run(rows, drafter):
        pass
    return rows
