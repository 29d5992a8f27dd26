"""Token ids are held against the rows of the model's embeddings."""

from collections.abc import Collection, Sequence
from numbers import Integral
from typing import Any

from medusa_kit.errors import ConfigError
from medusa_kit.shown import shown

# Servers pass it on to clients.
NO_ROW = "the model has no row for this token of its tokenizer: leave it out"


def as_token_ids(given: Sequence[Any], num_rows: int) -> list[int]:
    """Raises ConfigError for what is no id of a token that the model has a row for."""
    for token in given:
        if not isinstance(token, Integral) or isinstance(token, bool):
            raise ConfigError(
                f"token id {shown(token)} is out of range; expected 0..{num_rows - 1}"
            )
    ids = [int(token) for token in given]
    check_token_ids(ids, num_rows)
    return ids


def check_token_ids(ids: Sequence[int], num_rows: int, tokenizer: Any = None) -> None:
    """Raises ConfigError for an id that the model has no row for. `tokenizer`: knows the token's
    name."""
    if not ids or (max(ids) < num_rows and min(ids) >= 0):
        return
    wrong = next(token for token in ids if not 0 <= token < num_rows)
    known = tokenizer is not None and 0 <= wrong < len(tokenizer)
    name = f" ({tokenizer.convert_ids_to_tokens(wrong)!r})" if known else ""
    raise ConfigError(
        f"token id {wrong}{name} is out of range; expected 0..{num_rows - 1}",
        hint=NO_ROW if known else None,
    )


def check_stop_ids(ids: Collection[int], num_rows: int) -> None:
    """Raises ConfigError for a stop token that the model cannot say."""
    wrong = [token for token in ids if not 0 <= token < num_rows]
    if wrong:
        raise ConfigError(
            f"stop token id {wrong[0]} is out of range; expected 0..{num_rows - 1}",
            hint="set eos_token_id in the base's generation config",
        )
