"""The tokenizer's chat template: which one it is, what it renders, how it ends a turn."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from typing import Any

from medusa_kit.data.readers import Message
from medusa_kit.errors import DataError


def chat_template(tokenizer: Any) -> str | None:
    """The template that chats are written by; of several with names the one named default.

    Raises DataError where there are several and none is.
    """
    found = getattr(tokenizer, "chat_template", None)
    if not isinstance(found, dict):
        return found or None
    if "default" not in found:
        raise DataError(
            f"the tokenizer's chat templates are named {', '.join(map(repr, found))}; expected one "
            "named 'default'",
            hint="set the tokenizer's chat_template to the one to use, and save it",
        )
    return found["default"]


def end_of_turn_id(tokenizer: Any) -> int | None:
    """The token that the assistant ends its turn with: the chat template's, else the tokenizer's.

    It is the first special one of what the template writes after whatever the answer is: more may
    follow, as Phi-3's template ends a text after its last turn. A template without one, or that
    refuses one question and its answer, leaves the tokenizer's.
    """
    tail: list[int] = []
    with suppress(DataError):
        tail = _behind_any_answer(tokenizer)
    specials = special_ids(tokenizer)
    return next((token for token in tail if token in specials), tokenizer.eos_token_id)


def _behind_any_answer(tokenizer: Any) -> list[int]:
    """What two conversations that differ in the answer alone have in common after it."""
    if chat_template(tokenizer) is None:
        return []
    question: Message = {"role": "user", "content": "Is it?"}
    one, other = (
        render(tokenizer, [question, {"role": "assistant", "content": answer}])
        for answer in ("Yes", "no")
    )
    if one == other:  # the answer is left out
        return []
    pairs = zip(reversed(one), reversed(other), strict=False)
    return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)][::-1]


def special_ids(tokenizer: Any) -> set[int]:
    """Tokens that stand for no text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(i for i, t in added.items() if t.special)}


def render(
    tokenizer: Any, messages: Sequence[Message], add_generation_prompt: bool = False
) -> list[int]:
    """Token ids of the conversation. Raises DataError where the template refuses it."""
    with refusals():
        ids = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=add_generation_prompt, return_dict=False
        )
    return list(ids)


@contextmanager
def refusals() -> Iterator[None]:
    """What a template raises about a conversation is a fault of the row."""
    from jinja2.exceptions import TemplateError

    try:
        yield
    except (TemplateError, ValueError, TypeError, KeyError, IndexError) as error:
        raise DataError(f"the chat template refuses the conversation: {error}") from error
