"""What an answer's tokens add to the text of their prompt.

Some tokenizers print a token differently at the start of a text, most of them without its space.
An answer is no start where its prompt has text. So its first tokens are decoded behind the prompt's
last ones.
"""

from collections.abc import Sequence
from itertools import islice, takewhile
from typing import Any

from medusa_kit.infer.decode.text.token_bytes import decoded, token_bytes

MOST = 8  # tokens, enough for a character and for what decides about a space
CONTINUED = range(0x80, 0xC0)  # bytes within a character, three at most


def prompt_end(tokenizer: Any, prompt_ids: Sequence[int]) -> list[int]:
    """The last tokens of a prompt that are text, from the beginning of a character on."""
    if tokenizer is None:
        return []
    known = token_bytes(tokenizer)
    shown = (token for token in reversed(prompt_ids) if token not in known.special)
    end = list(islice(shown, MOST))[::-1]
    cut = 0
    while len(end) == MOST and cut < 3 and known.fallback.get(end[cut]) in CONTINUED:
        cut += 1
    return end[cut:]


def decoded_behind(
    tokenizer: Any, before: Sequence[int], ids: Sequence[int], keep_special: bool
) -> str:
    """What tokens add to the text of those before them."""
    if not before:
        return decoded(tokenizer, ids, keep_special)
    together = decoded(tokenizer, [*before, *ids], keep_special)
    return added_text(decoded(tokenizer, before, keep_special), together)


def added_text(before: str, after: str) -> str:
    """What a text has behind the one before it, the end of which may have been half a character."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))
    return after[sum(1 for _ in same) :]
