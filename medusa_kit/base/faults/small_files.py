"""Which of a model's small files keeps it from loading: libraries name the value at best."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from medusa_kit.errors import CheckpointError, in_one_line
from medusa_kit.files import parse_json

CONFIG = "config.json"
FILES = (CONFIG, "generation_config.json", "tokenizer_config.json", "tokenizer.json",
         "special_tokens_map.json", "added_tokens.json")  # fmt: skip
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings",
         "rms_norm_eps")  # fmt: skip
LARGEST = 2**63 - 1
ENDLESS = "model_max_length"  # transformers writes 10**30 where a tokenizer knows no end
AGAIN = "copy it again from where the model is from"


def check_sizes(folder: Path) -> None:
    """Raises CheckpointError for configs with a number that no model can be built by: libraries
    would try for ever."""
    for path in (folder / CONFIG, folder / "generation_config.json"):
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
        if isinstance(value, int) and abs(value) > LARGEST and key != ENDLESS:
            return f"says {key}: a number of {len(str(abs(value))):,} digits, which is too large"
    sizes = {key: content[key] for key in SIZES if path.name == CONFIG and key in content}
    odd = [key for key, value in sizes.items() if isinstance(value, str | dict)]
    return f"says {odd[0]}: {str(sizes[odd[0]])[:40]!r}, expected a number" if odd else None


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
