"""`--record FILE`: prompts and answers as rows that `train --quick --from FILE` trains on.

A row is one that `data generate` writes: token ids, and how they were drawn. Nothing else of a
request is written, such as its key, its address or when it came. A prompt is recorded once, and
answers that ended by themselves or at their length alone. One thread writes, so that no answer
waits for the disk.
"""

import contextlib
import os
import secrets
from queue import Full, Queue
from threading import Thread
from typing import Any

from medusa_kit import console
from medusa_kit.base.model import BaseModel
from medusa_kit.base.origin import BASE_DTYPE
from medusa_kit.data.answer_settings import SERVED
from medusa_kit.distill.answer_file import (
    ASKED,
    AnswerFile,
    answer_file,
    check_answer_file,
    digest_of_ids,
)
from medusa_kit.distill.generate import sampling_record
from medusa_kit.errors import MedusaKitError
from medusa_kit.files import link_target
from medusa_kit.infer.cpu.packed.int8_weights import refuse_int8_weights
from medusa_kit.infer.decode.request import Request
from medusa_kit.paths import expanded

MAX_BYTES = 256 << 20  # some twenty million tokens, more than heads are trained on
MAX_WAITING = 1024  # answers that wait for the disk; others are not recorded
PATIENCE = 5.0  # seconds
OWNER_ALONE = 0o600  # what people asked is in it


def check_recording(path: str) -> None:
    """Raises ConfigError, before anything is loaded, for a file that rows cannot be added to."""
    check_answer_file(expanded(path), "--record")


class Recorder:
    """Adds rows to a file, one process at a time. `add` may be called in any thread."""

    def __init__(self, path: str, base: BaseModel) -> None:
        """Raises ConfigError for a file of another model or another use, and for a base whose
        weights are rounded; MedusaKitError where nothing can be written."""
        refuse_int8_weights(base, "what is recorded is the model's own answers")
        base.changes()  # the file says of which weights the answers are
        self._base, self._origin = base, base.origin
        settings = {**self._origin, BASE_DTYPE: base.info.dtype, SERVED: True}
        self._path, self._open = expanded(path), contextlib.ExitStack()
        self._file: AnswerFile = self._open.enter_context(answer_file(self._path, settings))
        self._waiting: Queue[Request | None] = Queue(MAX_WAITING)
        self._ended = False
        self._writing = Thread(target=self._write, name="medusa-kit recorder", daemon=True)
        self._writing.start()

    def add(self, request: Request) -> None:
        """Record a request that has ended, unless somebody cut it short, or the answer is that of
        the model with an adapter."""
        base = self._base if request.verifier is None else request.verifier.base
        own = base.info.fingerprint == self._base.info.fingerprint
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
        row: dict[str, Any] = {
            "id": f"served-{secrets.token_hex(8)}",
            ASKED: asked,
            "prompt_ids": list(request.prompt_ids),
            "response_ids": list(request.token_ids),
            "finish_reason": request.finish_reason,
            "sampling": sampling_record(request.sampler.params),
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
