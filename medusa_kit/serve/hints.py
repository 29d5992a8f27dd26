"""What a client gets of an error: hints for who runs the server, or for Python, are left out.

Errors come from everywhere below the server, where hints name options and files. So a hint passes
that is known to speak of the request; any other is replaced by what holds for its kind of error.
"""

import re
from collections.abc import Mapping

from medusa_kit.base.tokenizer import bounded_rendering
from medusa_kit.base.tokenizer.ids import NO_ROW
from medusa_kit.errors import (
    DID_YOU_MEAN,
    ContextLengthError,
    DeviceMemoryError,
    HubError,
    MedusaKitError,
    QueueFullError,
)
from medusa_kit.infer.decode.grammars import source
from medusa_kit.settings.option import options_of
from medusa_kit.settings.sampling import BIAS, OF_TOKENIZER, SamplingParams

SIMPLER = "a simpler schema will do: fewer patterns of one text, shorter lists and texts"
OF_REQUESTS = frozenset(
    {
        *(option.hint for option in options_of(SamplingParams).values() if option.number),
        BIAS.hint,
        source.HINT,
        bounded_rendering.HINT,
        SIMPLER,
        NO_ROW,
        "a simpler grammar has fewer states",
        "leave out the grammar or the tokens that are banned",
        'the schema of any object is {"type": "object"}',
        OF_TOKENIZER,
        "shorten the prompt",
        "shorten the prompt, or ask for fewer tokens",
        "give some text",
        "give plain text, or a model with a chat template",
        "give token ids as the prompt",
        "ask again later",
        # the server's own
        "GET /v1/models lists all",
        "GET /v1/models lists those there are",
        "give one of them",
        "leave it out",
        "leave adapter_source out",
        "use a model with one, or ask without tools",
    }
)
OF_KINDS: Mapping[type[MedusaKitError], str] = {
    ContextLengthError: "shorten the prompt, or ask for fewer tokens",
    QueueFullError: "ask again later",
    HubError: "ask again later",
    DeviceMemoryError: "ask for fewer tokens, or again later",
}
CLOSE = re.compile(re.escape(DID_YOU_MEAN).replace(r"\{\}", r"\S+"))


def hint_for_client(error: MedusaKitError) -> str | None:
    """A hint that a client can follow, or None."""
    hint = error.hint
    if hint is not None and (hint in OF_REQUESTS or CLOSE.fullmatch(hint)):
        return hint
    return next((usual for kind, usual in OF_KINDS.items() if isinstance(error, kind)), None)


def message_for_client(error: MedusaKitError) -> str:
    """An error's message, with the hint that a client can follow."""
    return str(MedusaKitError(error.message, hint=hint_for_client(error)))
