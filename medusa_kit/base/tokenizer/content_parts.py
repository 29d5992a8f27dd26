"""Chat templates of multimodal models that take a message's content as a list of parts alone.

Given text, such a template writes nothing of it and says nothing, since Jinja reads the characters
of text as parts without a type. So what a template does with text is tried.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

WORD = "Zuword"  # that no template writes or changes

_known: WeakKeyDictionary[Any, tuple[Any, bool]] = WeakKeyDictionary()


def as_taken(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages as the tokenizer's chat template takes them, whose content is text here."""
    return list(map(in_parts, messages)) if takes_parts_alone(tokenizer) else list(messages)


def in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its text as a list of one part."""
    text = message.get("content")
    if not isinstance(text, str):
        return message
    return {**message, "content": [{"type": "text", "text": text}]}


def takes_parts_alone(tokenizer: Any) -> bool:
    """Whether the chat template shows parts and no plain text."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return False
    known = _known.get(tokenizer)
    if known is None or known[0] != template:
        message = {"role": "user", "content": WORD}
        alone = not _shows(tokenizer, message) and _shows(tokenizer, in_parts(message))
        known = _known[tokenizer] = (template, alone)
    return known[1]


def _shows(tokenizer: Any, message: Mapping[str, Any]) -> bool:
    try:
        return WORD in str(tokenizer.apply_chat_template([message], tokenize=False))
    except Exception:  # templates and tokenizers with code of their own raise any kind
        return False
