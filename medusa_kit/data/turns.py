"""Which tokens of a rendered conversation the assistant wrote.

A turn's words stand where the rendered text differs once they are others (shown.py); text is never
searched for them, so it does not matter what they are equal to. The turn begins behind what the
template writes before an answer, or with its {% generation %} mark. It ends with the first
end-of-turn token at or after its words; what follows that is the template's own. A token that
stands across the first or last character belongs to the turn.
"""

import bisect
import functools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from medusa_kit.base.tokenizer.turn_end import end_of_turn, special_ids
from medusa_kit.data.located import common_start
from medusa_kit.data.rendered import Rendered, Span
from medusa_kit.data.rows import Message
from medusa_kit.data.shown import MANY, check_shown, message_span, renderable
from medusa_kit.data.template import chat_template
from medusa_kit.errors import DataError

GENERATION_MARK = re.compile(r"{%[-+]?\s*generation\b")


class Written(NamedTuple):
    """Tokens of a conversation, and which of them the assistant wrote."""

    ids: list[int]
    mask: list[bool]
    is_edited: bool  # whether the template shows other words than the row's, without thoughts say
    turn_starts: tuple[int, ...]  # where a turn follows the end of another with nothing between


def written(view: Rendered, messages: Sequence[Message]) -> Written:
    """The tokens up to the last turn that is trained on. Raises DataError where the template
    refuses the conversation or leaves out a part of it, and where no turn is left."""
    weights = [m["role"] == "assistant" and m.get("weight", 1) for m in messages]
    messages, text = renderable(view, messages)
    turns = _Turns(view, messages, text)
    mask, last, turn_starts = [False] * len(turns.ids), 0, list[int]()
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            turns.close()
            continue
        spans = turns.find(index)
        if not weights[index]:
            continue
        for number, (start, end) in enumerate(spans):
            if not number and start and mask[start - 1] and turns.ends_with(start):
                turn_starts.append(start)
            mask[start:end] = [True] * (end - start)
            last = max(last, end)
    if not any(mask):
        raise _nothing_to_train_on(any(weights), turns.marks is not None)
    return Written(turns.ids[:last], mask[:last], turns.is_edited, tuple(turn_starts))


def _nothing_to_train_on(some_weight: bool, is_marked: bool) -> DataError:
    if not some_weight:
        return DataError("every turn of the assistant has weight 0")
    if is_marked:
        return DataError(
            "the chat template's {% generation %} marks hold none of the assistant's turns",
            hint="the marks should enclose the assistant's words",
        )
    return DataError("the assistant's turns have no tokens")


class _Turns:
    def __init__(self, view: Rendered, messages: Sequence[Message], text: str) -> None:
        self._view, self._messages, self._text = view, messages, text
        self.ids, self._spans = view.tokens(text)
        self._message_spans, self.is_edited = check_shown(view, messages, text)
        marked = view.as_text and GENERATION_MARK.search(chat_template(view.tokenizer) or "")
        self.marks = view.marked(messages) if marked else None
        self._check_marks()
        self._end_id = end_of_turn(view.tokenizer)
        self._specials = special_ids(view.tokenizer)
        self._ends = {*self._specials, self._end_id}
        self._ends_of_words = [end for _, end in self._message_spans]
        self._assistants = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        self._known: dict[tuple[bool, str, str], int | None] = {}  # of turns that are alike
        self._open_end: int | None = None  # of the turn just before, where nothing ended it

    def _check_marks(self) -> None:
        for index, (message, (start, end)) in enumerate(
            zip(self._messages, self._message_spans, strict=True)
        ):
            is_marked = any(s <= start < end <= e for s, e in self.marks or ())
            if is_marked and message["role"] != "assistant":
                raise DataError(
                    "the chat template's {% generation %} marks enclose "
                    f"message {index + 1}, of the {message['role']}",
                    hint="the marks should enclose the assistant's words",
                )

    def close(self) -> None:
        """Note that another role speaks, so that no turn continues after it."""
        self._open_end = None

    def ends_with(self, end: int) -> bool:
        """Whether the token before this one ends a turn."""
        return self.ids[end - 1] in self._ends

    def find(self, index: int) -> list[Span]:
        """The tokens of a turn: none where the template's marks leave it out."""
        start, end = self._message_spans[index]
        if self.marks is None:
            first = self._first_token(self._turn_start(index))
            self._open_end = None
            return [(first, self._turn_end(index, first, end, None))]
        inside = [
            (s, e) for s, e in self.marks if (s < end and e > start) or s <= start <= end <= e
        ]
        token_spans = []
        for number, (s, e) in enumerate(inside, start=1):
            first = self._first_token(s)
            if number == len(inside) and end <= e:
                token_spans.append((first, self._turn_end(index, first, end, e)))
            else:
                token_spans.append((first, max(first, self._end_token(e))))
        return token_spans

    def _first_token(self, start: int) -> int:
        """The first token with something of the text from `start` on. One that stands for more than
        its turn's beginning, as a template's own token does with spaces behind it, is not of it."""
        index = bisect.bisect_right(self._spans, start, key=lambda span: span[1])
        own = index < len(self.ids) and self._spans[index][0] < start
        return index + (own and self.ids[index] in self._specials)

    def _end_token(self, end: int) -> int:
        """One past the last token with something of the text before `end`."""
        return bisect.bisect_left(self._spans, end, key=lambda span: span[0])

    def _alike(self, index: int, beside: int, exact: Callable[[int], int]) -> int:
        """`exact(index)`, a number of characters of the template's own between a turn and the
        message `beside` it. Where the template writes the same there between the same roles, it is
        found for the first such turn and the last, and holds for all if these agree."""
        key = self._between(index, index + beside)
        if len(self._messages) < MANY or key is None:
            return exact(index)
        if key not in self._known:
            found = exact(index)
            last = max(i for i in self._assistants if self._between(i, i + beside) == key)
            self._known[key] = found if exact(last) == found else None
        known = self._known[key]
        return exact(index) if known is None else known

    def _between(self, index: int, near: int) -> tuple[bool, str, str] | None:
        if not 0 <= near < len(self._messages):
            return None
        first, second = sorted((index, near))
        end, start = self._ends_of_words[first], self._message_spans[second][0]
        return index < near, self._messages[near]["role"], self._text[end:start]

    def _turn_start(self, index: int) -> int:
        if not index or self._messages[index - 1]["role"] == "assistant":
            return self._found_start(index)
        ends = self._ends_of_words
        return ends[index - 1] + self._alike(
            index, -1, lambda i: self._found_start(i) - ends[i - 1]
        )

    def _found_start(self, index: int) -> int:
        """The character where the model begins to write: behind what the template asks with. Some
        templates ask with more than they write before finished answers, such as the beginning of a
        thought."""
        start, end = self._message_spans[index]
        prompt_text = self._text_before(index, ask=True)
        if prompt_text and self._text.startswith(prompt_text) and len(prompt_text) <= end:
            return len(prompt_text)
        before = max((e for _, e in self._message_spans[:index] if e <= start), default=0)
        for length in range(len(header := self._header(index)), 0, -1):
            if (at := self._text.rfind(header[:length], before, start)) >= 0:
                return at + length
        joined = self._open_end  # consecutive turns may be written as one
        if joined is None or not self._view.is_blank(self._text[joined:start]):
            return start
        return joined

    def _header(self, index: int) -> str:
        """The text that the template writes before an answer: before this one, else another."""
        for turn in (index, *range(1, len(self._messages))):
            is_answer = self._messages[turn]["role"] == "assistant"
            if is_answer and (prompt_text := self._text_before(turn, ask=True)):
                return prompt_text[common_start(prompt_text, self._text_before(turn, ask=False)) :]
        return ""

    def _text_before(self, index: int, ask: bool) -> str:
        """The text up to the turn; empty where it is refused."""
        try:
            return self._view.text(self._messages[:index], ask)
        except DataError:
            return ""

    def _turn_end(self, index: int, first: int, end: int, mark: int | None) -> int:
        """One past the last token of the turn whose words end at `end`, and its mark at `mark`."""
        is_last = index + 1 == len(self._message_spans)
        following = len(self._text) if is_last else self._message_spans[index + 1][0]
        after = bisect.bisect_left(self._spans, end, first, key=lambda span: span[1])
        tokens_near = range(after, len(self.ids))
        for position in tokens_near:
            if not is_last and self._spans[position][0] >= following:
                break
            if self.ids[position] == self._end_id:
                return position + 1
        if mark is not None:
            return max(first, self._end_token(mark))
        limit = self._tail_end(index, end)
        last = bisect.bisect_right(
            self._spans, max(limit, end, following), key=lambda span: span[0]
        )
        tokens_near = range(after, last)
        for position in tokens_near:
            start, stop = self._spans[position]
            if start >= end and stop <= limit and self.ids[position] in self._ends:
                return position + (self.ids[position] != self._opening_token(first))
        if (own := self._inner_end(tokens_near, end, following)) is not None:
            return own + 1
        self._open_end = end
        inside = [i for i in tokens_near if self._spans[i][1] <= limit or self._spans[i][0] < end]
        return max(first, inside[-1] + 1) if inside else first

    def _inner_end(self, tokens_near: Sequence[int], end: int, following: int) -> int | None:
        """The token that ends a turn in the middle of a conversation alone: the first one behind
        it, where others open the next turn."""
        between = [i for i in tokens_near if end <= self._spans[i][0] < following]
        marks = [i for i in between if self.ids[i] in self._specials]
        if len(marks) < 2 or self.ids[marks[0]] in (self.ids[marks[-1]], *self._header_ids):
            return None
        before = self._text[end : self._spans[marks[0]][0]]
        return marks[0] if self._view.is_blank(before) else None

    @functools.cached_property
    def _header_ids(self) -> list[int]:
        return self._view.tokens(self._header(0))[0]

    def _tail_end(self, index: int, end: int) -> int:
        ends = self._ends_of_words
        return end + self._alike(index, 1, lambda i: self._found_tail(i, ends[i]) - ends[i])

    def _found_tail(self, index: int, end: int) -> int:
        """Where the text behind a turn ceases to be what it is where the conversation ends there:
        from there on it is that of later turns."""
        if index + 1 == len(self._message_spans):
            return len(self._text)
        until = self._messages[: index + 1]
        try:
            text = self._view.text(until)
            _, words_end = message_span(self._view, until, index, text)
        except DataError:
            return end
        return end + common_start(self._text[end:], text[words_end:])

    def _opening_token(self, first: int) -> int | None:
        """The token that opens the turn. A template that always opens another writes it behind the
        last one, too."""
        return next((i for i in reversed(self.ids[:first]) if i in self._specials), None)
