"""Reading prompts for commands: from a file or data set, else those that come with the kit."""

import importlib.resources
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medusa_kit.data.rows import EXAMPLES
from medusa_kit.errors import DataError

OWN_PROMPTS = "verify_prompts.jsonl"


def asset(name: str) -> Path:
    """A file that comes with the kit."""
    return Path(str(importlib.resources.files("medusa_kit"))) / "assets" / name


def read_prompts(source: str | None, limit: int | None) -> list[list[dict[str, str]]]:
    """Messages of each prompt, up to its first user turn (MT-bench's first turn).

    Raises DataError for a source without prompts.
    """
    return [messages for messages, _ in read_prompt_set(source, limit)]


def read_prompt_set(
    source: str | None, limit: int | None
) -> list[tuple[list[dict[str, str]], str | None]]:
    """The same with each prompt's category: MT-bench, Spec-Bench and sets in their form have one.

    Raises DataError for a source without prompts.
    """
    from medusa_kit.data.readers import Conversation, read_rows
    from medusa_kit.data.row_keys import refuse_extras

    source = source or str(asset(OWN_PROMPTS))
    prompts = []
    for row in read_rows(source, limit=limit, extras=True):
        if not isinstance(row, Conversation):
            raise DataError(
                f"{source}: row {row.row} is an answer, expected a prompt", hint=EXAMPLES
            )
        asked = first_turn(row.messages)
        try:
            refuse_extras(asked, row.tools)
        except DataError as error:
            raise DataError(f"{source}:{row.row}: {error.message}", hint=error.hint) from error
        prompts.append((asked, row.category))
    return prompts


def first_turn(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The messages up to and including the first of the user."""
    for index, message in enumerate(messages):
        if message["role"] == "user":
            return messages[: index + 1]
    raise DataError("a conversation has no user turn", hint=EXAMPLES)


def load_both(
    loading: Mapping[str, Any], same_weights: bool = False, layerwise: bool | None = False
) -> tuple[Any, Any]:
    """(engine, oracle): the base model loaded twice, once for our engine and once untouched.

    `loading`: arguments of `medusa_kit.load`. `same_weights`: where ours are rounded, the oracle's
    are too. `layerwise`: whether the oracle is read layer by layer; None: if memory is too small.
    """
    from medusa_kit.bench.layerwise_oracle import oracle_beside
    from medusa_kit.engine.load import load

    engine = load(**loading)
    return engine, oracle_beside(engine.base, same_weights, layerwise)
