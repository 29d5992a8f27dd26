"""The marks around a model's thoughts, found by rendering a message that has some.

Some templates show thoughts beside calls alone, and some only drop them from the content of earlier
answers.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from medusa_kit.base.tokenizer.content_parts import as_taken
from medusa_kit.base.tokenizer.thought_ways import KEY, WAYS, Message, Thoughts

# Words that no template writes or changes.
QUESTION, THOUGHT, ANSWER, CALLED = "Zuquestion", "Zuthought", "Zuanswer", "zucalled"
MARK = r"<[^<>]*>|\[[^\[\]]*\]"
FIRST_MARK, LAST_MARK = re.compile(rf"\s*({MARK})"), re.compile(rf"({MARK})\s*\Z")
# Some name what begins between two marks: <|open|>think<|sep|>
LAST_MARKS = re.compile(rf"((?:(?:{MARK})[^\s<>\[\]]+)?(?:{MARK}))\s*\Z")
BEGUN_MARK = re.compile(r"[<\[][^<>\[\]]*\Z")
QUOTED = re.compile(r"""['"]\Z""")
SPLIT = re.compile(r"""\.split\(\s*(?:'([^'\\]+)'|"([^"\\]+)")""")


def find_thoughts(tokenizer: Any) -> Thoughts | None:
    """How a tokenizer's chat template writes thoughts."""
    template = _Template(tokenizer)
    return next(_shown(template), None) or _dropped(template)


class _Template:
    """Renders conversations of a question and an answer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        template = tokenizer.chat_template
        self.source = template.get("default", "") if isinstance(template, dict) else template

    def text(self, answer: Message | None, ask: bool = False) -> str:
        """What stands behind the question; empty where the template refuses it."""
        question = {"role": "user", "content": QUESTION}
        messages: list[Message] = [question] if answer is None else [question, answer]
        with suppress(Exception):  # templates and tokenizers with code of their own raise any kind
            text = str(
                self._tokenizer.apply_chat_template(
                    as_taken(self._tokenizer, messages), tools=_tools(messages),
                    add_generation_prompt=ask, tokenize=False,
                )
            )  # fmt: skip
            return text.rpartition(QUESTION)[2]
        return ""

    def answer(self, content: str, thought: bool, call: bool, way: str = KEY) -> str:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if call:
            function = {"name": CALLED, "arguments": {}}
            message["tool_calls"] = [{"id": "zucall000", "type": "function", "function": function}]
        return self.text(WAYS[way]({**message, KEY: THOUGHT}) if thought else message)


def _tools(messages: Sequence[Message]) -> list[Any] | None:
    if not any("tool_calls" in message for message in messages):
        return None
    nothing = {"type": "object", "properties": {}, "required": []}
    function = {"name": CALLED, "description": "", "parameters": nothing}
    return [{"type": "function", "function": function}]


def _shown(template: _Template) -> Iterator[Thoughts]:
    """By each way in which the template shows thoughts: before words, beside a call, or before a
    call alone."""
    for way in WAYS:
        for content, call in ((ANSWER, False), (ANSWER, True), ("", True)):
            head, thought, rest = template.answer(content, True, call, way).partition(THOUGHT)
            middle, word, _ = rest.partition(content or CALLED)
            shows_once = thought and word and THOUGHT not in rest
            # Where the thought is quoted, the message is shown as it is.
            if not shows_once or QUOTED.search(head) or (content and CALLED in middle):
                continue
            if not content:
                middle = _without_call(template, middle)
            if middle.strip():
                yield _thoughts(template, head, middle, way, bool(content))


def _thoughts(
    template: _Template, head: str, middle: str, way: str, before_words: bool
) -> Thoughts:
    """`middle`: between thoughts and words, unless it was found before a call."""
    opening = _opening(template, head, middle.strip())
    before_call = template.answer("", True, True, way).partition(THOUGHT)[2].partition(CALLED)[0]
    closing = middle
    if before_words and before_call:
        closing = cut_mark(middle[: num_common(middle, before_call)])
    closing, aloud = closing.strip(), middle[len(closing) :].strip()
    own = "" if aloud else _before_words(template)
    if own and closing.endswith(own) and closing != own:
        closing, aloud = closing.removesuffix(own).rstrip(), own
    call = before_call.strip().removeprefix(closing).strip() if aloud else ""
    return Thoughts(opening, closing or middle.strip(), aloud if closing else "", way, call)


def _without_call(template: _Template, middle: str) -> str:
    """What closes thoughts, of what stands between them and the name of a function."""
    alone = template.answer("", False, True).partition(CALLED)[0]
    own = middle[: len(middle) - num_common(middle[::-1], alone[::-1])]
    first = FIRST_MARK.match(middle)
    return own if own.strip() or first is None else first[1]


def _before_words(template: _Template) -> str:
    """What the model writes before the words of an answer without thoughts."""
    asked = template.text(None, ask=True)
    plain = template.answer(ANSWER, False, False).partition(ANSWER)[0]
    return plain[len(asked) :].strip() if plain.startswith(asked) else ""


def _opening(template: _Template, head: str, closing: str) -> str:
    """What is written before thoughts. `head`: with what precedes every answer."""
    asked = template.text(None, ask=True)
    plain = template.answer(ANSWER, False, False).partition(ANSWER)[0]
    called = template.answer("", False, True).partition(CALLED)[0]
    befores = [text for text in (asked, plain, called) if text]
    shared = min((num_common(head, text) for text in befores), default=0)
    own = head[len(cut_mark(head[:shared])) :].strip()
    if own:
        return own
    if asked.startswith(head) and asked != head and not asked.rstrip().endswith(closing):
        return asked[len(head) :].strip()
    marks = LAST_MARKS.search(head)
    return marks[1] if marks else ""


def _dropped(template: _Template) -> Thoughts | None:
    """By what the template looks for in an answer's content, to leave out what precedes it."""
    plain = template.answer(ANSWER, False, False)
    asked = template.text(None, ask=True).rstrip()
    for match in SPLIT.finditer(template.source):
        closing = (match[1] or match[2]).strip()
        if not closing or ("/" not in closing and not asked.endswith(closing)):
            continue
        text = template.answer(THOUGHT + closing + ANSWER, False, False)
        if ANSWER in text and THOUGHT not in text and text == plain:
            return Thoughts(closing.replace("/", "", 1), closing)
    return None


def num_common(first: str, second: str) -> int:
    """How many characters two texts begin with in common."""
    same = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        same += 1
    return same


def cut_mark(text: str) -> str:
    """A text without a mark that has only begun at its end."""
    return BEGUN_MARK.sub("", text)
