"""The chat template of a multimodal checkpoint whose tokenizer has none: its processor's.

Older ones keep it in chat_template.json, which transformers reads for processors alone; newer ones
in chat_template.jinja, which tokenizers read too.
"""

from pathlib import Path
from typing import Any

from medusa_kit.files import parse_json

FILE = "chat_template.json"


def with_template(tokenizer: Any, path: Path | None) -> Any:
    """The tokenizer, which has no template, with that of the processor in the file at `path`."""
    if path is not None:
        try:
            found = parse_json(path.read_bytes())["chat_template"]
        except (OSError, ValueError, KeyError, TypeError):
            return tokenizer  # then there is none, which those who need one report
        tokenizer.chat_template = found if isinstance(found, str | dict) else None
    return tokenizer
