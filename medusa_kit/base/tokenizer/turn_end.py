"""The token with which a chat template ends the assistant's turns, found by rendering.

Models that chat end their answers with it, whatever their files call the end of text.
"""

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from medusa_kit.base.tokenizer.bounded_rendering import bounded
from medusa_kit.base.tokenizer.content_parts import as_taken
from medusa_kit.base.tokenizer.say import say
from medusa_kit.errors import DataError

# Words that no template writes or changes.
SYSTEM, QUESTION, ANSWER, NEXT = "Zusystem", "Zuquestion", "Zuanswer", "Zunext"
ROLES = {SYSTEM: "system", QUESTION: "user", ANSWER: "assistant", NEXT: "user"}
MARK = re.compile(r"[<\[|{].+[>\]|}]", re.DOTALL)  # an added token that is no word and no space

_known: WeakKeyDictionary[Any, tuple[Any, int | None]] = WeakKeyDictionary()


def special_ids(tokenizer: Any) -> set[int]:
    """Special tokens, which stand for no text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(i for i, t in added.items() if t.special)}


def end_of_turn(tokenizer: Any) -> int | None:
    """The first special token that the chat template writes after the assistant's last words.

    A token that opens turns is none. Where the last turn has no end, what every earlier one ends
    with is taken. None without a template, and where it refuses one question and its answer, or
    ends turns with plain text or not at all.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return None
    depends_on = template, len(tokenizer)
    known = _known.get(tokenizer)
    if known is None or known[0] != depends_on:
        known = _known[tokenizer] = (depends_on, _found_in_time(tokenizer, template))
    return known[1]


def _found_in_time(tokenizer: Any, template: str | dict[str, str]) -> int | None:
    """None too where the template runs or writes for ever."""
    with suppress(DataError):
        return bounded(template, lambda: _end_of_turn(_Template(tokenizer)))
    return None


def _end_of_turn(template: "_Template") -> int | None:
    return next(
        (e for kind in template.kinds if (e := _end_among(template, kind)) is not None), None
    )


def _end_among(template: "_Template", kind: Collection[int]) -> int | None:
    """The end, if it is one of these tokens."""
    last = template.tokens(kind, [QUESTION, ANSWER], after=ANSWER)
    if last:
        return None if last[0] in _always_opened(template, kind) else last[0]
    between = template.tokens(kind, [QUESTION, ANSWER, NEXT], after=ANSWER, before=NEXT)
    return None if not between or between[0] in _openers(template, kind) else between[0]


def _always_opened(template: "_Template", kind: Collection[int]) -> list[int]:
    """The token that opens an answer, in a template that opens one whether it is asked to or not:
    it follows the last turn then. The end of text opens none: it is behind every turn where nothing
    stands before answers."""
    asked = template.text([QUESTION], ask=True)
    opened = _part(template.text([QUESTION, ANSWER]), QUESTION, ANSWER).strip()
    if asked != template.text([QUESTION]) or _part(asked, QUESTION).strip() != opened:
        return []
    opener = template.tokens(kind, [QUESTION], after=QUESTION)[-1:]
    return [] if opener == [template.end_of_text] else opener


def _openers(template: "_Template", kind: Collection[int]) -> list[int]:
    """Tokens that come before anything that could end, and the one that opens a question."""
    own = template.tokens(kind, [QUESTION], before=QUESTION)
    system = template.tokens(kind, [SYSTEM, QUESTION], before=SYSTEM)
    return [*(system or own), *own[-1:]]


def add_end_of_turn(base: Any) -> None:
    """Makes a base's answers end with the turn: its generation config gets the template's token
    where it lacks it. What somebody sets there later has the last word."""
    end, stops = end_of_turn(base.tokenizer), base.stop_token_ids
    if end is None or end in stops or end >= base.info.vocab_size:
        return
    base.generation_config.eos_token_id = [*sorted(stops), end]
    token = base.tokenizer.convert_ids_to_tokens(end)
    say(
        f"{base.info.name}: answers end with {token!r} ({end}) too, as turns do by its chat "
        f"template; its files name {sorted(stops) or 'no stop token'} alone"
    )


class _Template:
    """Renders conversations of words that it knows again."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.end_of_text = getattr(tokenizer, "eos_token_id", None)
        self._texts: dict[tuple[Any, ...], str] = {}
        added = getattr(tokenizer, "added_tokens_decoder", {})
        marks = {i for i, token in added.items() if MARK.fullmatch(str(token))}
        special = special_ids(tokenizer)
        self.kinds = special, special | marks

    def text(self, words: Sequence[str], ask: bool = False) -> str:
        """Behind a system message where the template needs one; empty where it refuses."""
        key = (*words, ask)
        if key not in self._texts:
            text = self._rendered(words, ask)
            if not text and SYSTEM not in words:
                text = self._rendered([SYSTEM, *words], ask)
            self._texts[key] = text
        return self._texts[key]

    def _rendered(self, words: Sequence[str], ask: bool) -> str:
        messages = [{"role": ROLES[word], "content": word} for word in words]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    as_taken(self._tokenizer, messages), add_generation_prompt=ask, tokenize=False
                )
            )
        except Exception:  # templates and tokenizers with code of their own raise any kind
            return ""

    def tokens(
        self, kind: Collection[int], words: Sequence[str], after: str = "", before: str = ""
    ) -> list[int]:
        """Those of a part of the text that are of this kind, and stand there as such."""
        part = _part(self.text(words), after, before)
        try:
            ids = self._tokenizer(part, add_special_tokens=False).input_ids if part else []
            return [i for i in ids if i in kind and self._tokenizer.decode([i]).strip() in part]
        except Exception:  # as above
            return []


def _part(text: str, after: str = "", before: str = "") -> str:
    """What comes after the last `after` and before the `before` behind it; empty where one of them
    is missing."""
    if after not in text:
        return ""
    rest = text.rpartition(after)[2] if after else text
    return rest.partition(before)[0] if before in rest and before else "" if before else rest
