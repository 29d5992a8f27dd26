"""What a model writes around its thoughts, and whether a prompt has written it already."""

from typing import Any, NamedTuple

from medusa_kit.base.tokenizer.thought_marks import LAST_MARK
from medusa_kit.base.tokenizer.thought_ways import Thoughts
from medusa_kit.base.tokenizer.thoughts import thoughts_of
from medusa_kit.data.template import chat_template
from medusa_kit.infer.decode.text.heard import ThoughtMarks

# Around thoughts that a template does not show.
NAMED = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"),
         ("<|START_THINKING|>", "<|END_THINKING|>"), ("◁think▷", "◁/think▷"),
         ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"))  # fmt: skip
ENDINGS = {
    "[BEGIN FINAL RESPONSE]": "[END FINAL RESPONSE]"
}  # of answers, by what comes before them
KIMI, OF_KIMI = Thoughts("◁think▷", "◁/think▷"), "<|im_middle|>"  # whose templates name no tags

CHANNEL_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")  # tokens of gpt-oss
CHANNELS = Thoughts("<|channel|>analysis<|message|>", "<|end|><|start|>assistant",
                    "<|channel|>final<|message|>")  # fmt: skip


class Channels(NamedTuple):
    """Thoughts, answer and calls are messages of their own, each behind a head that says which it
    is. `head`: what begins a head; `head_end`: what ends it; `end`: a message. `thoughts`, `aloud`:
    what the heads of thoughts and of the answer say; `recipient`: what stands before the name of a
    function, empty where calls are written in another form."""

    head: str
    head_end: str
    end: str
    thoughts: str
    aloud: str
    recipient: str


class Reasoning(NamedTuple):
    """What a model that has thoughts writes around them. `opened`: the prompt ends behind the
    opening; `closed`: behind the closing. `aloud`, `ending`: what may come before and behind the
    words of the answer.
    """

    opening: str
    closing: str
    opened: bool = False
    closed: bool = False
    aloud: str = ""
    ending: str = ""
    channels: Channels | None = None

    @property
    def in_text(self) -> ThoughtMarks:
        return ThoughtMarks(self.opening, self.closing, self.opened, self.aloud)

    @property
    def marks(self) -> list[str]:
        return [mark for mark in (*self[:2], self.aloud, self.ending) if mark]


def reasoning_of(tokenizer: Any, prompt: str) -> Reasoning | None:
    """How the template shows thoughts; else the tags that it or the added tokens name; None: no
    thoughts are known. `prompt`: its text."""
    found = thoughts_of(tokenizer) or _named(tokenizer)
    if found is None:
        return None
    opening, closing, aloud, *_ = found
    end = prompt.rstrip()
    opened = bool(opening) and end.endswith(opening)
    closed = end.endswith(closing + aloud)
    return Reasoning(
        opening, closing, opened, closed, aloud, ENDINGS.get(closing, ""), _channels(found)
    )


def _named(tokenizer: Any) -> Thoughts | None:
    known = chat_template(tokenizer) or ""
    added = {token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
    for opening, closing in NAMED:
        if closing in known or {opening, closing} <= added:
            return Thoughts(opening, closing)
    if {*CHANNEL_MARKS} <= added:
        return CHANNELS
    return KIMI if OF_KIMI in known else None


def _channels(found: Thoughts) -> Channels | None:
    """Where the heads of thoughts and of the answer end alike."""
    ends = [LAST_MARK.search(head) for head in (found.opening, found.aloud)]
    if ends[0] is None or ends[1] is None or ends[0][1] != ends[1][1]:
        return None
    head_end = ends[0][1]
    named = [head.removesuffix(head_end) for head in (found.opening, found.aloud)]
    if not all(named):
        return None
    recipient = found.call if found.call.startswith("to=") else ""
    head = first_mark(found.aloud)
    return Channels(head, head_end, first_mark(found.closing), named[0], named[1], recipient)


def channels_of(tokenizer: Any) -> Channels | None:
    """The channels of a template that writes calls as messages to functions."""
    found = thoughts_of(tokenizer)
    channels = None if found is None else _channels(found)
    return channels if channels is not None and channels.recipient else None


def first_mark(text: str) -> str:
    return text[: text.index(">") + 1] if text.startswith("<") and ">" in text else text
