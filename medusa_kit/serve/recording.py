"""`--record FILE`: prompts and answers as rows that `train --quick --from FILE` trains on.

A row is one that `data generate` writes: token ids, and how they were drawn. Nothing else of a
request is written, such as its key, its address or when it came. A prompt is recorded once, with an
answer that the model alone chose and that was not cut short by its client. One thread writes, so
that no answer waits for the disk.
"""

import contextlib
import os
import secrets
from dataclasses import replace
from queue import Full, Queue
from threading import Thread
from typing import Any

from medusa_kit import console
from medusa_kit.base.model import BaseModel
from medusa_kit.base.origin import BASE_DTYPE
from medusa_kit.data.answer_settings import ACTIVATIONS, SERVED, read_settings
from medusa_kit.distill.answer_file import (
    ASKED,
    AnswerFile,
    answer_file,
    check_answer_file,
    digest_of_ids,
)
from medusa_kit.distill.generate import sampling_record
from medusa_kit.errors import ConfigError, MedusaKitError
from medusa_kit.files import link_target
from medusa_kit.infer.cpu.packed.int8_weights import refuse_int8_weights
from medusa_kit.infer.decode.request import Request
from medusa_kit.paths import expanded
from medusa_kit.settings.engine import FLOAT32
from medusa_kit.settings.sampling import DRAWING, SamplingParams
from medusa_kit.settings.serve import RECORD_MIB

MAX_BYTES = RECORD_MIB << 20
MAX_WAITING = 1024  # answers that wait for the disk; others are not recorded
PATIENCE = 5.0  # seconds
OWNER_ALONE = 0o600  # what people asked is in it


def check_recording(path: str) -> None:
    """Raises ConfigError, before anything is loaded, for a file that rows cannot be added to."""
    check_answer_file(expanded(path), "--record")
    said = read_settings(expanded(path))
    if said is not None and SERVED not in said:
        raise ConfigError(
            f"{path} holds answers of `medusa-kit data generate`; expected a file of --record, or "
            "a new one",
            hint="name another file; train --quick --from takes either kind",
        )


def chosen_by_model(sampling: SamplingParams) -> bool:
    """Whether nothing but the model decided between tokens. What a bias, a penalty, typical
    acceptance or a grammar makes of an answer is no text that the model would write. A grammar of
    tools leaves it free until it begins a call."""
    if sampling.grammar is not None and sampling.grammar.free is None:
        return False
    own = SamplingParams(**{name: getattr(sampling, name) for name in DRAWING})
    penalty = None if sampling.repetition_penalty == 1.0 else sampling.repetition_penalty
    bias = sampling.logit_bias or None
    return replace(sampling, grammar=None, repetition_penalty=penalty, logit_bias=bias) == own


class Recorder:
    """Adds rows to a file, one process at a time. `add` may be called in any thread."""

    def __init__(self, path: str, base: BaseModel, activations: str = FLOAT32) -> None:
        """`activations`: the precision in which the model answers. Raises ConfigError for a file of
        another model or another use, and for a base whose weights are rounded; MedusaKitError where
        nothing can be written."""
        refuse_int8_weights(base, "what is recorded is the model's own answers")
        base.changes()  # the file says of which weights the answers are
        self._base, self._origin = base, base.origin
        settings = {
            **self._origin,
            BASE_DTYPE: base.info.dtype,
            SERVED: True,
            **({} if activations == FLOAT32 else {ACTIVATIONS: activations}),
        }
        self._path, self._open = expanded(path), contextlib.ExitStack()
        self._file: AnswerFile = self._open.enter_context(answer_file(self._path, settings))
        self._waiting: Queue[Request | None] = Queue(MAX_WAITING)
        self._ended = False
        self._writing = Thread(target=self._write, name="medusa-kit recorder", daemon=True)
        self._writing.start()

    def add(self, request: Request) -> None:
        """Record a request that has ended, unless somebody cut it short, or the answer is not what
        the model alone would say."""
        base = self._base if request.verifier is None else request.verifier.base
        own = base.info.fingerprint == self._base.info.fingerprint
        own = own and chosen_by_model(request.sampler.params)
        if own and not self._ended and request.finish_reason in ("stop", "length"):
            with contextlib.suppress(Full):
                self._waiting.put_nowait(request)

    def close(self) -> None:
        """Write what waits, and let others have the file. A disk that does not answer is waited
        for no longer than PATIENCE."""
        with contextlib.suppress(Full):
            self._waiting.put(None, timeout=PATIENCE)
            self._writing.join(PATIENCE)
        self._open.close()

    def _write(self) -> None:
        while (request := self._waiting.get()) is not None:
            if not self._ended:
                self._write_row(request)

    def _write_row(self, request: Request) -> None:
        asked = digest_of_ids(request.prompt_ids)
        if self._file.has_asked(asked):
            return
        ended = not request.stop_ids.isdisjoint(request.token_ids[-1:])
        row: dict[str, Any] = {
            "id": f"served-{secrets.token_hex(8)}",
            ASKED: asked,
            "prompt_ids": list(request.prompt_ids),
            "response_ids": list(request.token_ids),
            # A client's stop string cuts an answer, which the model has not ended.
            "finish_reason": "stop" if ended else "length",
            # Not the grammar, in which a client describes its tools.
            "sampling": sampling_record(replace(request.sampler.params, grammar=None)),
        }
        try:
            if reason := self._reason_to_end():
                return self._end(reason)
            self._for_owner()
            self._file.append([row])
        except (MedusaKitError, OSError) as error:
            self._end(str(error))

    def _reason_to_end(self) -> str | None:
        file = link_target(self._path)
        if file.is_file() and file.stat().st_size >= MAX_BYTES:
            return f"it has {MAX_BYTES >> 20} MiB"
        self._base.changes()
        return None if self._base.origin == self._origin else "the model was changed"

    def _for_owner(self) -> None:
        """A file that is new is nobody else's to read."""
        os.close(os.open(link_target(self._path), os.O_CREAT | os.O_WRONLY, OWNER_ALONE))

    def _end(self, reason: str) -> None:
        self._ended = True
        console.warn(f"nothing more is recorded in {self._path}: {reason}")
