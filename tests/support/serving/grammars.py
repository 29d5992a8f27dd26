"""Bases that can write text, and plain transformers under the same grammar, for what follows one.

The oracle asks llguidance itself, with a matcher made anew for each token.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from medusa_kit.base.gguf import CHATML_TEMPLATE
from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.settings.grammar import Grammar
from support.debug_model import small_tokenizer
from support.tiny_models import tiny_model

STOPS = [1, 3]  # </s> and <|im_end|>
PADDED = 264  # logits: a few more than the tokenizer has tokens


@cache
def tokenizer() -> Any:
    return small_tokenizer(CHATML_TEMPLATE)


def writing_model(seed: int = 0, context: int = 512) -> Any:
    model = tiny_model("llama", seed, vocab_size=PADDED, max_position_embeddings=context)
    model.generation_config.eos_token_id = STOPS
    return model


def writing_base(seed: int = 0, context: int = 512) -> BaseModel:
    return wrap_model(writing_model(seed, context), tokenizer(), "writing")


@cache
def _matcher(grammar: Grammar) -> Any:
    known = llguidance.hf.from_tokenizer(tokenizer(), n_vocab=PADDED, eos_token=STOPS)
    make = getattr(llguidance.LLMatcher, f"grammar_from_{grammar.kind}")
    return llguidance.LLMatcher(known, make(grammar.text))


def allowed_after(grammar: Grammar, answer: Sequence[int]) -> set[int]:
    """The tokens that may follow `answer`."""
    matcher = _matcher(grammar).deep_copy()
    assert matcher.consume_tokens(list(answer)), matcher.get_error()
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return set(np.nonzero(bits)[0].tolist())


class OracleMask(LogitsProcessor):
    def __init__(self, grammar: Grammar, prompt_length: int) -> None:
        self.grammar, self.prompt_length = grammar, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        allowed = sorted(allowed_after(self.grammar, input_ids[0, self.prompt_length :].tolist()))
        masked = torch.full_like(scores, float("-inf"))
        masked[:, allowed] = scores[:, allowed]
        return masked


def plain_under(
    grammar: Grammar, prompt: Sequence[int], max_new_tokens: int, **settings: Any
) -> list[int]:
    """The greedy answer of transformers' own generate on an untouched second model."""
    mask = LogitsProcessorList([OracleMask(grammar, len(prompt))])
    return plain(prompt, max_new_tokens, logits_processor=mask, **settings)


_oracle = cache(writing_model)  # a model that nobody else has


def plain(prompt: Sequence[int], max_new_tokens: int, **settings: Any) -> list[int]:
    """The same without a grammar."""
    ids = torch.tensor([list(prompt)])
    out = _oracle().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False,
        **settings,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether a whole answer may be this."""
    matcher = _matcher(grammar).deep_copy()
    ids = tokenizer()(text, add_special_tokens=False).input_ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
