"""The chat template of a multimodal checkpoint whose tokenizer has none: its processor's.

Older ones keep it in chat_template.json, which transformers reads for processors alone; newer ones
in chat_template.jinja, which tokenizers read too.
"""

from pathlib import Path
from typing import Any

from medusa_kit.files import parse_json

FILE = "chat_template.json"


def with_template(tokenizer: Any, location: str, revision: str | None) -> Any:
    """The tokenizer, with the template of the processor at `place` where it has none itself."""
    if getattr(tokenizer, "chat_template", None):
        return tokenizer
    path = _file(location, revision)
    if path is not None:
        try:
            found = parse_json(path.read_bytes())["chat_template"]
        except (OSError, ValueError, KeyError, TypeError):
            return tokenizer  # then there is none, which those who need one report
        tokenizer.chat_template = found if isinstance(found, str | dict) else None
    return tokenizer


def _file(location: str, revision: str | None) -> Path | None:
    if Path(location).is_dir():
        return path if (path := Path(location) / FILE).is_file() else None
    from transformers.utils import cached_file

    optional = {"_raise_exceptions_for_missing_entries": False,
                "_raise_exceptions_for_connection_errors": False,
                "_raise_exceptions_for_gated_repo": False}  # fmt: skip
    found = cached_file(location, FILE, revision=revision, **optional)
    return None if found is None else Path(found)
