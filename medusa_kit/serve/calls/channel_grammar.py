"""Grammars of calls for models that write them as messages of their own (channels)."""

import re

from medusa_kit.serve.calls.reasoning import Channels
from medusa_kit.settings.grammar import Free, Grammar, quoted

CALL_RULE = re.compile(r'^call_(\d+): .*?"\\"([\w-]+)\\"" SP ","', re.MULTILINE)
KEPT = re.compile(r"^(?:one|arguments_\d+|answer): .*", re.MULTILINE)
CONSTRAIN = "<|constrain|>"  # which may come before the name of a format


def in_channels(grammar: Grammar, channels: Channels) -> Grammar:
    """A grammar of calls_grammar, with a call as a message to its function. It is the last one of
    an answer."""
    rules = [
        *KEPT.findall(grammar.text),
        *(
            f"call_{n}: {quoted(name)} head arguments_{n}"
            for n, name in CALL_RULE.findall(grammar.text)
        ),
        'head: (tag_0 WORD)? (" " WORD | " "? tag_1 WORD)? tag_2',
        f"called: (tag_0 WORD)? {quoted(' ' + channels.recipient)} one",
        "WORD: /[a-z]{1,20}/",
        *(f"tag_{n}: {quoted(tag)}" for n, tag in enumerate(_tags(channels))),
    ]
    if grammar.free is not None:
        rules.insert(0, "start: called\nbehind: one")
        return Grammar("lark", "\n".join(rules), _tags(channels), Free(channels.recipient))
    has_answer = any(rule.startswith("answer:") for rule in rules)
    rules.insert(0, "start: tag_3? answer | called" if has_answer else "start: called")
    return Grammar("lark", "\n".join(rules), _tags(channels))


def _tags(channels: Channels) -> tuple[str, ...]:
    return channels.head, CONSTRAIN, channels.head_end, channels.aloud + channels.head_end
