"""What becomes of prompts to a model without a chat template."""

import re
from typing import Any

from medusa_kit import console
from medusa_kit.data.template import chat_template

CONTINUES = "this model has no chat template: it continues each message as plain text by itself"
# Words in the names of models that were trained on conversations.
TALKS = re.compile(r"(?<![a-z])(instruct|chat|it|sft|dpo)(?![a-z])", re.I)
INCOMPLETE = "; by its name it was trained on conversations, so chat_template.jinja may be missing"


def template_note(tokenizer: Any, name: str) -> str:
    """A line on a model that has no chat template; empty where it has one, or no tokenizer.
    `name`: the model's."""
    if tokenizer is None or chat_template(tokenizer) is not None:
        return ""
    return CONTINUES + (INCOMPLETE if TALKS.search(re.split(r"[/\\]", name)[-1]) else "")


def tell_template(tokenizer: Any, name: str) -> None:
    if note := template_note(tokenizer, name):
        (console.warn if note.endswith(INCOMPLETE) else console.note)(note)
