"""Which of a model's small files keeps it from loading: libraries name the value at best."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from medusa_kit.errors import CheckpointError, in_one_line
from medusa_kit.files import parse_json

CONFIG, GENERATION = "config.json", "generation_config.json"
FILES = (CONFIG, GENERATION, "tokenizer_config.json", "tokenizer.json",
         "special_tokens_map.json", "added_tokens.json")  # fmt: skip
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings",
         "rms_norm_eps")  # fmt: skip
LARGEST = 2**63 - 1
COUNTS, MOST = ("layer", "layers", "experts"), 100_000  # how keys of what is built one by one end
ENDLESS = "model_max_length"  # transformers writes 10**30 where a tokenizer knows no end
AGAIN = "copy it again from where the model is from"


def check_configs(folder: Path) -> None:
    """Raises CheckpointError for configs that cannot be: libraries would count for ever, or pass
    over a generation config and its stop tokens."""
    for path in (folder / CONFIG, folder / GENERATION):
        if path.is_file() and (wrong := _wrong(path)):
            raise CheckpointError(f"{path} {wrong}", hint=AGAIN)


def wrong_file(folder: Path) -> str | None:
    """The first file of a folder that cannot be what it is to be, and why."""
    for path in (folder / name for name in FILES):
        if path.is_file() and (wrong := _wrong(path)):
            return f"{path} {wrong}"
    return None


def _wrong(path: Path) -> str | None:
    try:
        content = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        return f"cannot be read: {in_one_line(error)}"
    if not isinstance(content, dict):
        return f"holds {type(content).__name__}, expected an object"
    for key, value in _values(content):
        most = MOST if key.endswith(COUNTS) else LARGEST
        if isinstance(value, int) and abs(value) > most and key != ENDLESS:
            return f"says {key}: a number of {len(str(abs(value))):,} digits, which is too large"
    for key, value in content.items():
        if path.name == CONFIG and key in SIZES and isinstance(value, str | dict):
            return f"says {key}: {str(value)[:40]!r}, expected a number"
        if path.name == GENERATION and key.endswith("_token_id") and not _are_ids(value):
            return f"says {key}: {str(value)[:40]!r}, expected token ids"
    return None


def _are_ids(value: Any) -> bool:
    ids = value if isinstance(value, list) else [value]
    return all(isinstance(one, int | None) for one in ids)


def _values(content: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Each number or text with the nearest key above it."""
    waiting = [(key, content)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += [(key, one) for one in value]
        else:
            yield key, value
