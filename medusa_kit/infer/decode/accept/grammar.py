"""Answers that follow a grammar: at each node, tokens that the grammar does not allow after the
node's own prefix are impossible. Which these are is llguidance's to say.

A mask is a transformers LogitsProcessor, so generate can use it, for one row. It keeps the matcher
at the prefix that it saw last, and takes tokens back to get to another node's.

Shapes: V vocabulary, T tokens of a prefix.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessor

from medusa_kit.errors import ConfigError, MedusaKitError
from medusa_kit.infer.decode.accept.free_text import FreeText, num_shared
from medusa_kit.infer.decode.grammars.check import exactly
from medusa_kit.infer.decode.grammars.source import (
    error_of,
    llguidance,
    parser_limits,
    refused,
)
from medusa_kit.infer.decode.grammars.source import source_of as _source
from medusa_kit.infer.decode.grammars.tokens import GrammarTokens
from medusa_kit.settings.grammar import Free, Grammar

KEPT_MASKS = 128  # of a row, so those of its newest trees
# Compiled grammars of a tokenizer, and characters of their texts; the one used longest ago goes
# first. A character takes some hundred bytes of memory.
KEPT, MAX_KEPT = 16, 400_000
MAX_FORCED = 256  # tokens that are returned at once
# Of the processor, for a row: in all, and for each mask on top. A usual one takes 0.1 ms.
SECONDS_FREE, SECONDS_EACH = 0.5, 0.02


class GrammarMask(LogitsProcessor):
    """The mask of one request. Raises MedusaKitError where no token remains."""

    def __init__(
        self,
        matcher: Any,
        prompt_length: int,
        stops: frozenset[int],
        free: FreeText | None = None,
    ) -> None:
        self._matcher, self._prompt_length, self._stops = matcher, prompt_length, stops
        self._free = free
        self._consumed: list[int] = []  # by the matcher
        self._masks: dict[tuple[int, ...], bytes] = {}  # after what it had consumed
        self._spent, self._num_timed = 0.0, 0  # seconds of the processor, and calls

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        answer = input_ids[0, self._prompt_length :].tolist()
        bound = self._bound(answer)
        # No answer gets past its end, nor past a draft token that is not allowed.
        if bound is None or not self._stops.isdisjoint(answer):
            return scores
        if not self._reach(bound):
            self._check_refusal(bound)
            return scores
        allowed_V = _allowed(self._bits(), scores.shape[-1]).to(scores.device)
        scores = scores.masked_fill(~allowed_V, float("-inf"))
        if scores.isneginf().all():
            raise MedusaKitError(
                f"no token can follow the answer's first {len(answer)}: other settings ban "
                "all that the grammar allows, or the tokenizer has none of them",
                hint="leave out the grammar or the tokens that are banned",
            )
        return scores

    def allows(self, prefix: Sequence[int]) -> bool:
        """Whether the grammar allows the answer in `prefix`, an ended one included."""
        answer = list(prefix[self._prompt_length :])
        if answer and answer[-1] in self._stops:
            bound = self._bound(answer[:-1])
            return self._allows(answer[:-1]) and (bound is None or self._matcher.is_accepting())
        return self._allows(answer)

    def forced(self, prefix: Sequence[int]) -> list[int]:
        """The tokens that have to follow `prefix`, as the tokenizer would write them."""
        answer = list(prefix[self._prompt_length :])
        if self._bound(answer) is None or not self._allows(answer):
            return []
        with self._timed():
            tokens = list(self._matcher.compute_ff_tokens())[:MAX_FORCED]
        ends = self._allows([*answer, *tokens]) and self._matcher.is_stopped()
        return [*tokens, *self._stops] if ends and len(self._stops) == 1 else tokens

    def _bound(self, answer: list[int]) -> list[int] | None:
        """The tokens of the answer that follow the grammar; None: none yet."""
        return answer if self._free is None else self._free.behind(answer)

    def _allows(self, answer: list[int]) -> bool:
        bound = self._bound(answer)
        return self._stops.isdisjoint(answer) and (bound is None or self._reach(bound))

    def _reach(self, tokens: list[int]) -> bool:
        """Let the matcher consume exactly `tokens`; returns whether the grammar allows that."""
        same = num_shared(self._consumed, tokens)
        if surplus := len(self._consumed) - same:
            self._check(self._matcher.rollback(surplus))
        with self._timed():
            consumed = self._matcher.try_consume_tokens(tokens[same:]) if same < len(tokens) else 0
        self._consumed = tokens[: same + consumed]
        self._check()
        return len(self._consumed) == len(tokens)

    def _check_refusal(self, tokens: list[int]) -> None:
        """Raises MedusaKitError where a mask allowed the token at which the matcher stopped, which
        could not consume `tokens` to their end."""
        bits, refused = self._masks.get(tuple(self._consumed)), tokens[len(self._consumed)]
        if bits is not None and bits[refused // 8] >> refused % 8 & 1:
            raise MedusaKitError(
                f"the grammar allowed token {refused} after {len(self._consumed)} tokens, and then "
                "refused it",
                hint="another wording of the grammar may do; this is a bug",
            )

    def _bits(self) -> bytes:
        key = tuple(self._consumed)
        if key not in self._masks:
            with self._timed():
                bits: bytes = self._matcher.compute_bitmask()
            self._check()
            self._masks[key] = bits
            if len(self._masks) > KEPT_MASKS:
                del self._masks[next(iter(self._masks))]
        return self._masks[key]

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Raises MedusaKitError for a grammar whose steps would hold up everybody else's."""
        began = time.thread_time()
        yield
        self._spent += time.thread_time() - began
        self._num_timed += 1
        if self._spent > SECONDS_FREE + self._num_timed * SECONDS_EACH:
            raise MedusaKitError(
                f"the grammar could not be followed after {len(self._consumed)} tokens: that took "
                f"{self._spent:.1f} seconds",
                hint="a simpler grammar has fewer states",
            )

    def _check(self, done: bool = True) -> None:
        """Raises MedusaKitError where the matcher has failed. Its limits may be met while it runs:
        then it stays failed."""
        if not done or self._matcher.is_error():
            raise MedusaKitError(
                f"the grammar could not be followed after {len(self._consumed)} tokens: "
                f"{error_of(self._matcher)}",
                hint="a simpler grammar has fewer states",
            )


class _Compiled:
    """Grammars compiled for one tokenizer and one set of stop tokens. Any thread may ask."""

    def __init__(self, tokenizer: Any, vocab_size: int, stops: Sequence[int]) -> None:
        make = llguidance().LLMatcher
        self.tokens = GrammarTokens(tokenizer, vocab_size, stops)
        make = partial(make, self.tokens.for_matchers())
        self._make = partial(make, log_level=0, limits=parser_limits())
        self._kept: OrderedDict[Grammar, Any] = OrderedDict()
        self._lock = threading.Lock()

    def mask(self, grammar: Grammar, prompt_length: int, stops: frozenset[int]) -> GrammarMask:
        """A new mask for an answer that has no token yet."""
        matcher = self._matcher(grammar._replace(free=grammar.free and Free("")))
        if grammar.free is None:
            return GrammarMask(matcher, prompt_length, stops)
        begin = matcher.deep_copy()
        free = FreeText(grammar.free, self.tokens, partial(_fits, begin))
        return GrammarMask(matcher, prompt_length, stops, free)

    def _matcher(self, grammar: Grammar) -> Any:
        with self._lock:
            matcher = self._kept.get(grammar)
            if matcher is not None:
                self._kept.move_to_end(grammar)
                return matcher.deep_copy()
        matcher = self._compile(grammar)  # which others need not wait for
        with self._lock:
            self._kept[grammar] = matcher
            size = sum(len(kept.text) for kept in self._kept)
            while len(self._kept) > KEPT or (size > MAX_KEPT and len(self._kept) > 1):
                size -= len(self._kept.popitem(last=False)[0].text)
            return matcher.deep_copy()

    def _compile(self, grammar: Grammar) -> Any:
        matcher = self._make(_source(grammar, self.tokens))
        if matcher.is_error():
            raise refused(grammar, error_of(matcher))
        tried = matcher.deep_copy()
        if not any(tried.compute_bitmask()) or tried.is_error():
            raise refused(grammar, f"no answer can begin. {error_of(tried)}")
        return matcher


def prepare_grammars(tokenizer: Any, vocab_size: int, stops: frozenset[int]) -> None:
    """Read the tokenizer now, so that the first request with a grammar need not wait for that. What
    is in the way of grammars is that request's error."""
    with suppress(ConfigError):
        grammar_mask(Grammar.regex("a"), tokenizer, vocab_size, stops, 0)


def _fits(matcher: Any, tokens: list[int]) -> bool:
    return not tokens or matcher.validate_tokens(tokens) == len(tokens)


_known: "WeakKeyDictionary[Any, dict[tuple[int, tuple[int, ...]], _Compiled]]" = WeakKeyDictionary()
_knowing = threading.Lock()


def grammar_mask(
    grammar: Grammar, tokenizer: Any, vocab_size: int, stops: frozenset[int], prompt_length: int
) -> GrammarMask:
    """The mask for a request. `vocab_size`: how many logits there are; `stops`: allowed where the
    grammar may end.

    Raises ConfigError for a grammar that cannot be met or that llguidance does not know, and where
    a base has no tokenizer, no stop token, or llguidance is missing.
    """
    if tokenizer is None or not stops:
        lacking = "tokenizer" if tokenizer is None else "stop token"
        raise ConfigError(
            f"this base model came without a {lacking}, which a grammar needs",
            hint="load it with its tokenizer; answers under a grammar end with a stop token",
        )
    key = vocab_size, tuple(sorted(stops))
    with _knowing:  # a second or so for a large vocabulary, once
        per_tokenizer = _known.setdefault(tokenizer, {})
        if key not in per_tokenizer:
            per_tokenizer[key] = _Compiled(tokenizer, *key)
    return per_tokenizer[key].mask(exactly(grammar), prompt_length, stops)


def _allowed(bits: bytes, vocab_size: int) -> Tensor:
    """allowed_V of a mask with one bit a token; what it does not name is forbidden."""
    flags = _flags(bits)[:vocab_size]
    allowed_V = torch.zeros(vocab_size, dtype=torch.bool)
    allowed_V[: len(flags)] = torch.from_numpy(flags).bool()
    return allowed_V


def _flags(bits: bytes) -> Any:
    return np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
