"""A request's prompts as token ids. What is rendered and encoded is bounded by the context, since
both take long for a text that could never be answered.
"""

from collections.abc import Sequence
from typing import Any

from medusa_kit.base.tokenizer.ids import check_token_ids
from medusa_kit.data.text_size import check_fits, check_size
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import ConfigError
from medusa_kit.serve.calls.tools import Constraint
from medusa_kit.serve.conversations import ChatPrompt, Conversations
from medusa_kit.serve.errors import RequestError
from medusa_kit.serve.hints import hint_for_client


def encode_prompts(
    engine: Engine,
    conversations: Conversations,
    prompts: Sequence[Any],
    constraint: Constraint,
    owner: str,
) -> tuple[list[list[int]], ChatPrompt | None]:
    """(ids of each, the chat if it is one). Chats go through the template, a completion's text does
    not.

    Raises ContextLengthError for a text that is far too long; RequestError, naming the prompt, for
    one without tokens or with an id that the model has no row for; what
    `Conversations.prompt` raises.
    """
    base, encoded, chat = engine.base, list[list[int]](), None
    context = base.info.context_length
    for number, prompt in enumerate(prompts, start=1):
        which = f"prompt {number} of {len(prompts)}" if len(prompts) > 1 else "prompt"
        if not isinstance(prompt, str) and isinstance(prompt[0], int):
            ids = list(prompt)
        elif base.tokenizer is None:
            ids = engine.encode(prompt)  # which refuses it
        elif isinstance(prompt, str):
            check_fits(base.tokenizer, context, prompt)
            ids = list(base.tokenizer(prompt).input_ids)
        else:
            check_size(context, prompt, constraint.tools, constraint.variables)
            chat = conversations.prompt(prompt, constraint, owner, context)
            ids = chat.prompt.ids
        if not ids:
            raise RequestError(f"{which} has no token; expected some text", param="prompt")
        try:
            check_token_ids(ids, base.info.vocab_size, base.tokenizer)
        except ConfigError as error:
            field = "prompt" if chat is None else "messages"
            message, hint = f"{which}: {error.message}", hint_for_client(error)
            raise RequestError(message, param=field, hint=hint) from error
        encoded.append(ids)
    return encoded, chat
