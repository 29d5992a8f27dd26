"""Whether a text can fit a context, found before it is rendered and encoded.

Both take seconds for megabytes that could never be answered.
"""

from typing import Any

from medusa_kit.data.template import encode_text
from medusa_kit.errors import ContextLengthError

MAX_PER_TOKEN = 32  # characters of any text; usual ones have 2 to 5
USUAL_PER_TOKEN = 8  # a text of no more is encoded at once
SLACK = 64  # tokens by which the beginning of a text may have more than the same part of it all


def check_size(context: int, *values: Any) -> None:
    """Raises ContextLengthError for more text than a context of so many tokens could hold.
    `values`: JSON values whose strings are rendered."""
    length = sum(map(_length, values))
    if length > MAX_PER_TOKEN * context:
        raise ContextLengthError(
            f"the prompt has {length:,} characters; the model's context holds {context:,} tokens, "
            "answer included",
            hint="shorten the prompt",
        )


def _length(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(name) + _length(item) for name, item in value.items())
    return sum(map(_length, value)) if isinstance(value, list | tuple) else 1


def check_fits(tokenizer: Any, context: int, text: str) -> None:
    """Raises ContextLengthError for a text that is too long by its beginning alone."""
    check_size(context, text)
    size = USUAL_PER_TOKEN * context
    while size < len(text):
        if len(encode_text(tokenizer, text[:size])) > context + SLACK:
            raise ContextLengthError(
                f"the prompt has more than {context:,} tokens; the model's context holds "
                f"{context:,}, answer included",
                hint="shorten the prompt",
            )
        size *= 2
