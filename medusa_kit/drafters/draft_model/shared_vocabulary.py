"""Which tokens a base and its draft model share, and how one's tokens are mapped to the other's.

`same`: ids mean the same to both. `text`: the draft's tokens are converted through text. The answer
is the base model's in every case.

Shapes: V vocabulary of the base, U of the draft.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa_kit import console
from medusa_kit.base.model import BaseModel
from medusa_kit.errors import ConfigError

SAME_SHARE = 0.99  # the share for `same`: a few added tokens may differ
BYTE_SPACE, SENTENCE_SPACE = "Ġ", "▁"

Surface = bytes | str  # the text of a token; for a special token its name


@dataclass(frozen=True)
class Overlap:
    """Tokens of equal text. `agrees`: each has the same id in both vocabularies."""

    base_ids: list[int]
    draft_ids: list[int]
    share: float  # of the base's tokens

    @property
    def agrees(self) -> bool:
        return self.share >= SAME_SHARE and self.base_ids == self.draft_ids


@dataclass(frozen=True)
class Vocabulary:
    """From the draft's ids to the base's and back."""

    kind: str  # same | text
    base_size: int
    draft_size: int

    @property
    def reads_text(self) -> bool:
        """Whether the draft reads our text through its own tokenizer."""
        return self.kind == "text"

    def to_base(self, logits_U: Tensor) -> Tensor:
        """logits_V over the base's tokens, -inf for those that the draft lacks; as text the draft's
        own."""
        if self.kind == "text" or self.base_size == self.draft_size:
            return logits_U
        missing = max(self.base_size - self.draft_size, 0)
        return torch.nn.functional.pad(logits_U[: self.base_size], (0, missing), value=-math.inf)


def shared_vocabulary(mode: str, base: BaseModel, draft: BaseModel) -> Vocabulary:
    """`mode`: auto | same | text (DraftModelOptions.tokenizer).

    Raises ConfigError for `same` with different ids, no common token, or a missing tokenizer.
    """
    sizes = base.info.vocab_size, draft.info.vocab_size
    names = f"{base.info.name!r} and {draft.info.name!r}"
    if base.tokenizer is None or draft.tokenizer is None:
        # A folder that lacks one has lost it, or never had it: nobody knows what its ids mean.
        lost = base.tokenizer is not None and draft.info.source != "memory"
        if sizes[0] == sizes[1] and (mode == "same" or (mode == "auto" and not lost)):
            return Vocabulary("same", *sizes)
        raise ConfigError(
            f"tokens of {names} cannot be mapped: their vocabularies have {sizes[0]} and "
            f"{sizes[1]} tokens, and one has no tokenizer (tokenizer = {mode!r})",
            hint="give both models with their tokenizers"
            + (
                "; --drafter-option tokenizer=same takes the ids as they are"
                if sizes[0] == sizes[1]
                else ""
            ),
        )
    overlap = measure_overlap(base.tokenizer, draft.tokenizer, *sizes)
    if not overlap.share:
        raise ConfigError(
            f"the tokenizers of {names} have no token in common",
            hint="choose a draft model of the same family, or another drafter",
        )
    if mode == "auto":
        mode = _announced(overlap, base, draft)
    if mode == "same" and not overlap.agrees:
        raise ConfigError(
            f"the tokenizers of {names} are not the same: {overlap.share:.1%} of the base's tokens "
            "are in both, with other ids or too few; expected equal ids for equal tokens",
            hint="use --drafter-option tokenizer=text, or auto",
        )
    return Vocabulary(mode, *sizes)


def _announced(overlap: Overlap, base: BaseModel, draft: BaseModel) -> str:
    """The kind that fits, with a note where the tokenizers differ."""
    if overlap.agrees:
        return "same"
    console.note(
        f"{draft.info.name} has {overlap.share:.1%} of {base.info.name}'s tokens, so drafts are "
        "exchanged as text"
    )
    return "text"


def measure_overlap(base: Any, draft: Any, base_size: int, draft_size: int) -> Overlap:
    """The tokens that two tokenizers share; ids that a model has no row for do not count."""
    base_ids = {text: i for text, i in surfaces(base).items() if i < base_size}
    draft_ids = {text: i for text, i in surfaces(draft).items() if i < draft_size}
    pairs = sorted((i, draft_ids[text]) for text, i in base_ids.items() if text in draft_ids)
    share = len(pairs) / max(len(base_ids), 1)
    return Overlap([i for i, _ in pairs], [i for _, i in pairs], share)


def surfaces(tokenizer: Any) -> dict[Surface, int]:
    """The text of each token -> its id. Byte-level and sentencepiece spellings become bytes, so
    `Ġthe` and `▁the` are the same token. Of two tokens with the same text, the one that the
    tokenizer uses: byte tokens come last, lower ids first."""
    special = set(tokenizer.all_special_ids) | {
        i for i, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    known = tokenizer.get_vocab()
    marks = [sum(text.startswith(mark) for text in known) for mark in (BYTE_SPACE, SENTENCE_SPACE)]
    spell = _byte_level if marks[0] >= marks[1] else _sentence_piece
    result: dict[Surface, int] = {}
    for text, i in sorted(known.items(), key=lambda item: (_is_byte(item[0]), item[1])):
        result.setdefault(text if i in special else spell(text), i)
    return result


def _byte_level(text: str) -> Surface:
    values = [_BYTE_OF.get(char) for char in text]
    return text.encode() if None in values else bytes(v for v in values if v is not None)


def _sentence_piece(text: str) -> Surface:
    if _is_byte(text):
        return bytes([int(text[3:5], 16)])
    return text.replace(SENTENCE_SPACE, " ").encode()


def _is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def _byte_letters() -> dict[str, int]:
    """The letters that byte-level tokenizers write for bytes (GPT-2's)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in plain]
    letters = {chr(value): value for value in plain}
    return letters | {chr(256 + index): value for index, value in enumerate(others)}


_BYTE_OF = _byte_letters()
