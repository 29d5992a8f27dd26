"""Chats that go on: their prompts keep the ids of turns that the server answered before.

Clients send text, and the text of an answer may be encoded to other tokens than the model wrote.
With its own tokens a turn's prompt begins with all that has been read and written for the turn
before, as that of `Engine.conversation` does.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from medusa_kit.data.template import chat_template, encodes_text
from medusa_kit.data.text_size import check_fits
from medusa_kit.engine.recent_turns import RecentTurns
from medusa_kit.engine.turns import Answered, Prompt, next_prompt
from medusa_kit.serve.calls.reading import Reading, reader_of
from medusa_kit.serve.calls.reasoning import reasoning_of
from medusa_kit.serve.calls.template_calls import form_of
from medusa_kit.serve.calls.tool_calls import read_answer
from medusa_kit.serve.calls.tool_messages import Message
from medusa_kit.serve.calls.tools import Constraint, encode_shown


@dataclass(frozen=True)
class ChatPrompt:
    """A chat's prompt, and the key under which its answer is kept (`context`)."""

    prompt: Prompt
    context: str
    reading: Reading  # of the answer


class Conversations:
    """`turns`: of those answered; None: nothing is kept."""

    def __init__(self, tokenizer: Any, turns: RecentTurns | None) -> None:
        self._tokenizer, self._turns = tokenizer, turns

    def prompt(
        self, messages: Sequence[Message], constraint: Constraint, owner: str, room: int
    ) -> ChatPrompt:
        """The prompt of a chat. `owner`: whose earlier turns it may continue. `room`: tokens of the
        model's context. Raises what `Constraint.encode` raises, and ContextLengthError for what is
        far too long."""
        tokenizer = self._tokenizer
        shown, tools = constraint.shown(tokenizer, messages)
        template = chat_template(tokenizer)
        variables = constraint.variables
        rendered_with = [owner, template, None if tools is None else list(tools), dict(variables)]
        given = json.dumps(rendered_with, sort_keys=True)
        context = hashlib.sha256(given.encode()).hexdigest()
        before = None if self._turns is None else self._turns.before(context, shown)
        whole = partial(encode_shown, tokenizer, tools=tools, variables=variables)
        encode = None if template and encodes_text(tokenizer) else whole
        fits = partial(check_fits, tokenizer, room)
        prompt = next_prompt(tokenizer, shown, before, encode, tools, variables, fits)
        reasoning = reasoning_of(tokenizer, prompt.text)
        reading = Reading(constraint.calls, reasoning, form_of(tokenizer), constraint.values)
        return ChatPrompt(prompt, context, reading)

    def keep(self, chat: ChatPrompt, text: str, ids: Sequence[int]) -> None:
        """Keep an answer for the next turn. `text`: of the answer; `ids`: its own, without the stop
        token."""
        if self._turns is None or not chat.prompt.marks:
            return
        read = read_answer(text, "stop", reader_of(chat.reading))
        # Calls stay as the model wrote them, for templates that are given them as text.
        content = chat.reading.aloud(text) if read.tool_calls else read.content or ""
        message: Message = {"role": "assistant", "content": content}
        tagged = content != text or chat.reading.keeps_special(self._tokenizer)
        self._turns.keep(chat.context, Answered(chat.prompt, message, list(ids), tagged))
