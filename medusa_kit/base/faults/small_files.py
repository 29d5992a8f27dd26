"""Which of a model's small files keeps it from loading: libraries name the value at best."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from medusa_kit.base.faults.json_kinds import odd_values
from medusa_kit.errors import CheckpointError, MedusaKitError, in_one_line
from medusa_kit.files import parse_json

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
OF_TOKENIZERS = ("tokenizer_config.json", TOKENIZER, "special_tokens_map.json",
                 "added_tokens.json", "chat_template.jinja")  # fmt: skip
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings",
         "rms_norm_eps")  # fmt: skip
LARGEST = 2**63 - 1
COUNTS, MOST = ("layer", "layers", "experts"), 100_000  # how keys of what is built one by one end
ENDLESS = "model_max_length"  # transformers writes 10**30 where a tokenizer knows no end
AGAIN = "copy it again from where the model is from"


def small_file(
    location: str, name: str, revision: str | None = None, here: bool = False
) -> Path | None:
    """Where a small file of a model lies: in its folder, or of a Hub id in the Hub's cache, into
    which it is brought unless `here`. None where there is none."""
    if Path(location).is_dir():
        return path if (path := Path(location) / name).is_file() else None
    from transformers.utils import cached_file

    optional = {"_raise_exceptions_for_missing_entries": False,
                "_raise_exceptions_for_connection_errors": False,
                "_raise_exceptions_for_gated_repo": False}  # fmt: skip
    found = cached_file(location, name, revision=revision, local_files_only=here, **optional)
    return None if found is None else Path(found)


def check_configs(location: str, revision: str | None = None) -> None:
    """Raises CheckpointError for configs that cannot be: libraries would count for ever, or pass
    over a generation config and its stop tokens. OSError where there is no such model."""
    _check(location, revision, (CONFIG, GENERATION), here=False)


@contextmanager
def reading_tokenizer(location: str, revision: str | None = None) -> Iterator[None]:
    """A context in which a tokenizer is read. Raises CheckpointError where one of its files cannot
    be what it is to be, whether it could be read or not."""
    local = Path(location).is_dir()
    if local:
        _check(location, revision, OF_TOKENIZERS, here=True)
    try:
        yield
    except MedusaKitError:
        raise
    except Exception:
        _check(location, revision, OF_TOKENIZERS, here=True, all_of_it=True)
        raise
    if not local:  # only now they are here
        _check(location, revision, OF_TOKENIZERS, here=True)


def _check(
    location: str, revision: str | None, names: tuple[str, ...], here: bool, all_of_it: bool = False
) -> None:
    for name in names:
        if (path := small_file(location, name, revision, here)) is not None:
            check_file(path, all_of_it)


def check_file(path: Path, all_of_it: bool = False) -> None:
    """Raises CheckpointError for a small file that cannot be what it is to be. `all_of_it`: also
    where only the library that reads it can tell."""
    if wrong := _wrong(path) or (all_of_it and _unreadable(path)):
        raise CheckpointError(f"{path} {wrong}", hint=AGAIN)


def _wrong(path: Path) -> str | None:
    try:
        text = path.read_bytes()
        content = parse_json(text) if path.suffix == ".json" else {"": text.decode()}
    except (OSError, ValueError) as error:
        return f"cannot be read: {in_one_line(error)}"
    if not isinstance(content, dict):
        return f"holds {type(content).__name__}, expected an object"
    for key, value in _values(content) if path.name != TOKENIZER else ():  # it has every word
        most = MOST if path.name == CONFIG and key.endswith(COUNTS) else LARGEST
        if isinstance(value, int) and abs(value) > most and key != ENDLESS:
            return f"says {key}: a number of {len(str(abs(value))):,} digits, which is too large"
    for key, value in content.items():
        if path.name == CONFIG and key in SIZES and isinstance(value, str | dict):
            return f"says {key}: {_short(value)}, expected a number"
        if path.name == CONFIG and key in SIZES and isinstance(value, int | float) and value < 0:
            return f"says {key}: {value}, expected a number from 0 on"
    for key, value, expected in odd_values(path.name, content):
        return f"says {key}: {_short(value)}, expected {expected}"
    return None


def _unreadable(path: Path) -> str | None:
    """What the library that reads tokenizer.json says of it."""
    from tokenizers import Tokenizer

    try:
        if path.name == TOKENIZER:
            Tokenizer.from_file(str(path))
    except Exception as error:  # it raises no other
        return f"cannot be read: {in_one_line(error)}"
    return None


def _short(value: Any) -> str:
    return repr(value if value is None or isinstance(value, bool) else str(value)[:40])


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
