"""Which keys of a row mean what. A key that changes what the model reads, or what is trained on, is
honoured, or the row is refused.

Keys of a message that are listed nowhere refuse the row too. Keys of the row itself that are listed
nowhere are columns of their data set: they are left out, with a note.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from medusa_kit.data.rows import Message
from medusa_kit.errors import DataError

TURN_KEYS = ("messages", "conversations", "conversation")
PROMPT_KEYS = ("instruction", "prompt", "question", "query")
CONTEXT_KEYS = ("input", "context")  # further text of the prompt
ANSWER_KEYS = ("output", "completion", "response", "answer")
SYSTEM_KEYS = ("system", "system_prompt")

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # of a message, all the first one's
EXTRA_KEYS = ("tool_calls", "reasoning_content", "name")  # of a message, for the template to show

# Of a row: with them the model would read something else, or another part would be trained on.
MEANINGFUL_KEYS = frozenset(
    (*SYSTEM_KEYS, "tools", *PROMPT_KEYS, *CONTEXT_KEYS, *REASONING_KEYS, "system_message",
     "system_instruction", "system_instructions", "sys_prompt", "preprompt", "custom_instruction",
     "custom_instructions",
     "instructions", "persona", "choices", "options", "history", "functions", "function_call",
     "documents", "knowledge", "passage", "chat_template", "chat_template_kwargs",
     "enable_thinking", "image", "images", "audio", "audios", "video", "videos", "response_format",
     "weight", "weights", "loss", "loss_weight", "loss_mask", "mask", "train")
)  # fmt: skip
# Of a row: what it says then is as if the key was not there.
USUAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "weight": (1,), "label": (True,), "role": ("user", "human", "prompter"),
}  # fmt: skip
# Of a row or of a message: they say where it is from, or how it was rated.
HARMLESS_KEYS = frozenset(
    ("annotations", "category", "conversation_hash", "conversation_id", "country", "created",
     "created_at", "dataset", "date", "difficulty", "domain", "hash", "hashed_ip", "header", "id",
     "idx", "index", "lang", "language", "length", "license", "message_id", "meta", "metadata",
     "model", "moderation", "num_tokens", "num_turns", "openai_moderation", "origin",
     "parallel_tool_calls", "prompt_id", "quality", "question_id", "question_type", "rating",
     "redacted", "reference", "score", "scores", "source", "split", "state", "subset", "tags",
     "task", "timestamp", "title", "token_count", "tokens", "tool_call_id", "topic", "toxic",
     "turn", "turn_identifier", "type", "url", "uuid", "version")
)  # fmt: skip


def is_empty(value: Any) -> bool:
    """Whether a key says nothing: data sets fill missing columns with nothing."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def check_message(turn: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises DataError for a key of a message that is not known."""
    for key, value in turn.items():
        if key not in known and key not in HARMLESS_KEYS and not is_empty(value):
            raise DataError(
                f"a message has {key!r}, and it is not known what that changes",
                hint="remove it where it changes neither what the model reads nor what is "
                "trained on",
            )


def refuse_extras(messages: Sequence[Message], tools: Any = None) -> None:
    """Raises DataError for tools, and messages with more than role and content, where nothing would
    show them to the model."""
    extras = ["tools"] if tools else []
    extras += [key for message in messages for key in EXTRA_KEYS if key in message]
    if extras:
        raise DataError(
            f"it has {extras[0]!r}, which is not shown to the model here",
            hint="remove it, or give messages of role and content",
        )


def unused(item: Mapping[str, Any], used: Collection[str]) -> tuple[str, ...]:
    """The keys that are left out. Raises DataError where one of them changes what the model reads
    or what is trained on."""
    remaining = [key for key, value in item.items() if key not in used and not is_empty(value)]
    for key in remaining:
        if _changes(key.lower(), item[key]):
            raise DataError(
                f"{key!r} of the row cannot be honoured alongside its {_named(used)}",
                hint="put what the model reads into messages, or remove the key",
            )
    return tuple(
        key for key in remaining if key not in HARMLESS_KEYS and not _is_usual(key, item[key])
    )


def _changes(key: str, value: Any) -> bool:
    if key == "label":  # of an answer that was rated (KTO); other labels are those of classes
        return value is False
    return (key in MEANINGFUL_KEYS or key in USUAL_VALUES) and not _is_usual(key, value)


def _is_usual(key: str, value: Any) -> bool:
    return value in USUAL_VALUES.get(key, ())


def _named(used: Collection[str]) -> str:
    return " and ".join(repr(key) for key in sorted(used))
