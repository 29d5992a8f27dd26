"""A tokenizer is looked at when its base is loaded: what does not fit the model, or does not give
text back as it was, is said on stderr. Nothing is refused."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from medusa_kit.base.tokenizer.bounded_rendering import bounded
from medusa_kit.base.tokenizer.content_parts import as_taken
from medusa_kit.base.tokenizer.say import say
from medusa_kit.base.tokenizer.turn_end import add_end_of_turn
from medusa_kit.errors import DataError

PLAIN = "Words, 1234567890 (x_1 = 2);  two spaces,    four\nand a line.\n\n\U0001f642"
MEMORY = "memory"
SHOWN = 12  # characters of what differs


def look_at_tokenizer(base: Any) -> None:
    """Notes on the tokenizer, and the end of turns (turn_end.py), when a base is loaded."""
    if base.tokenizer is None:
        return
    if base.info.source != MEMORY:  # a model that the caller built has the caller's ends
        add_end_of_turn(base)
    for find in (_missing_rows, _changed_text):
        with suppress(Exception):  # tokenizers with code of their own raise any kind
            if (found := find(base.tokenizer, base.info.vocab_size)) is not None:
                say(f"{base.info.name}: {found}")


def _missing_rows(tokenizer: Any, num_rows: int) -> str | None:
    """A fault for tokens that the model has no row for, which texts must not hold."""
    added = tokenizer.added_tokens_decoder
    # Ids of a vocabulary follow one another, and so do those of most added tokens.
    if len(tokenizer) <= num_rows and max(added, default=0) < num_rows:
        return None
    missing = sorted(i for i in {*added, *tokenizer.get_vocab().values()} if i >= num_rows)
    if not missing:
        return None
    token = tokenizer.convert_ids_to_tokens(missing[0])
    more = f" and {len(missing) - 1} more tokens" if len(missing) > 1 else ""
    return (
        f"the model has {num_rows} rows and none for {token!r} ({missing[0]}){more} of its "
        "tokenizer; text with them is refused"
    )


def _changed_text(tokenizer: Any, _: int) -> str | None:
    """A fault for a text that is another once it has been encoded and decoded."""
    if (found := _difference(tokenizer, PLAIN)) is not None:
        return f"its tokenizer does not keep text as it is: {found}"
    if template := getattr(tokenizer, "chat_template", None):
        try:
            text = bounded(template, lambda: _question(tokenizer))
        except DataError as error:
            return error.message
        # Special tokens may swallow the space around them, and decoding may add some.
        if (found := _difference(tokenizer, text, lambda said: "".join(said.split()))) is not None:
            return f"its tokenizer does not keep the chat template's text as it is: {found}"
    return None


def _question(tokenizer: Any) -> str:
    messages = as_taken(tokenizer, [{"role": "user", "content": "Words."}])
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def _difference(
    tokenizer: Any, text: str, kept: Callable[[str], str] = lambda said: said.removeprefix(" ")
) -> str | None:
    """Where a text first differs from what its tokens say. `kept`: what of them is compared; of
    SentencePiece's kind are many that put a space first."""
    ids = tokenizer(text, add_special_tokens=False).input_ids
    back = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    text, back = kept(text), kept(back)
    if text == back:
        return None
    at = next((i for i, (a, b) in enumerate(zip(text, back, strict=False)) if a != b), None)
    at = min(len(text), len(back)) if at is None else at
    start = max(at - SHOWN // 2, 0)
    was, now = (said[start : start + SHOWN] for said in (text, back))
    return f"{was!r} comes back as {now!r}"
