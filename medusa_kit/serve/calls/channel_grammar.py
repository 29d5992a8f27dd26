"""Grammars of calls for models that write them as messages of their own (channels)."""

from collections.abc import Sequence

from medusa_kit.serve.calls.reasoning import Channels
from medusa_kit.settings.grammar import Free, Grammar, quoted

CONSTRAIN = "<|constrain|>"  # which may come before the name of a format


def in_channels(
    channels: Channels, names: Sequence[str], rules: Sequence[str], forced: bool, answers: bool
) -> Grammar:
    """A grammar of calls_grammar, with a call as a message to its function. It is the last one of
    an answer. `rules`: of the arguments, and of answers that fit a schema."""
    rules = [
        *rules,
        *(f"call_{n}: {quoted(name)} head arguments_{n}" for n, name in enumerate(names)),
        'head: (tag_0 WORD)? (" " WORD | " "? tag_1 WORD)? tag_2',
        f"called: (tag_0 WORD)? {quoted(' ' + channels.recipient)} one",
        "WORD: /[a-z]{1,20}/",
        *(f"tag_{n}: {quoted(tag)}" for n, tag in enumerate(_tags(channels))),
    ]
    if not forced and not answers:
        rules.insert(0, "start: called\nbehind: one")
        free = Free(channels.recipient)
        return Grammar("lark", "\n".join(rules), _tags(channels), free, exact=True)
    may_answer = answers and not forced
    rules.insert(0, "start: tag_3? answer | called" if may_answer else "start: called")
    return Grammar("lark", "\n".join(rules), _tags(channels), exact=True)


def _tags(channels: Channels) -> tuple[str, ...]:
    return channels.head, CONSTRAIN, channels.head_end, channels.aloud + channels.head_end
