"""docs/words.md: what it says where a word appears exists, and each word is defined once."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import typer

from medusa_kit.cli import app
from medusa_kit.engine.result import GenerationStats
from medusa_kit.settings.recipe import TrainRecipe

PAGE = (Path(__file__).parents[2] / "docs/words.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| word |")
]


def named(pattern: str) -> list[str]:
    """What the column *where* names in this way."""
    found = [name for row in ROWS for name in re.findall(pattern, row[2])]
    assert found
    return found


def all_options(command: Any) -> set[str]:
    inner = getattr(command, "commands", {})
    own = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    return own.union(*(all_options(one) for one in inner.values()))


def test_every_option_exists() -> None:
    known = all_options(typer.main.get_command(app))
    assert [name for name in named(r"`(--[a-z-]+)") if name not in known] == []


def test_every_statistic_exists() -> None:
    known = {field.name for field in dataclasses.fields(GenerationStats)} | set(
        vars(GenerationStats)
    )
    assert [name for name in named(r"`stats\.(\w+)`") if name not in known] == []


def test_every_key_of_a_recipe_exists() -> None:
    sections: dict[str, Any] = {
        name: field.annotation for name, field in TrainRecipe.model_fields.items()
    }
    for section, key in (name.split(".") for name in named(r"`([a-z]+\.\w+)`")):
        if section != "stats":
            assert key in sections[section].model_fields, f"{section}.{key}"


def test_a_word_is_defined_once() -> None:
    words = [word.strip() for row in ROWS for word in row[0].split(",")]
    assert len(words) > 30
    assert len(words) == len(set(words))
    for word in ("prefill", "KV cache", "draft token", "request", "sequence", "slot", "held out",
                 "plain decoding", "CUDA graphs", "acceptance length", "training tokens",
                 "dynamic tree", "resume"):  # fmt: skip
        assert word in words
