"""Answers of earlier requests to draft from: the newest `most_tokens` tokens, also kept on disk.

The file is a .npz of token ids with the identity of their tokenizer. It is rewritten when a request
ends, after reading what another process has written meanwhile; of two that write at the same moment
one wins. A file that cannot be read is never overwritten.

Models with one tokenizer may differ in their rows, since many are padded. Answers with tokens that
a model lacks stay in the file, for those that have them, and it drafts from the others.
"""

import hashlib
import json
import pathlib
import struct
import zipfile
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

import numpy as np

from medusa_kit import console
from medusa_kit.base.model import BaseModel
from medusa_kit.drafters.text.suffix_array import SuffixArray
from medusa_kit.drafters.text.suffix_automaton import SuffixAutomaton
from medusa_kit.errors import CheckpointError
from medusa_kit.files import atomic_write, parse_json
from medusa_kit.locks import SharedLock

FORMAT, VERSION = "medusa-kit past answers", 1
MAX_UNSORTED = 16_384  # tokens kept in an automaton until the next sorting

# What numpy, zipfile, zlib and json raise for files that are cut off, damaged or of another kind.
_UNREADABLE = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error, struct.error, MemoryError),
)


def tokenizer_identity(base: BaseModel) -> str:
    """A digest of the vocabulary, or its size for a model without a tokenizer."""
    if base.tokenizer is None:
        return f"{base.info.vocab_size} tokens"
    digest = hashlib.sha256()
    for word, token in sorted(base.tokenizer.get_vocab().items()):
        digest.update(f"{token} {word}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:32]


class PastAnswers:
    """`sorted` and `recent` together index the answers; rows keep the ones they began with.

    Old answers that are dropped stay in the index until the next sorting.
    `vocab_size`: the tokens of the model that is drafted for. `lock`: to be held while the index
    is read or changed.
    """

    def __init__(
        self,
        path: str | pathlib.Path,
        tokenizer: str,
        vocab_size: int,
        most_tokens: int,
        max_match: int,
    ) -> None:
        self.path, self.tokenizer, self.vocab_size = pathlib.Path(path), tokenizer, vocab_size
        self.lock = SharedLock()
        self.most_tokens, self.max_match = most_tokens, max_match
        self.num_tokens = 0
        self.sorted = SuffixArray([], max_match)
        self.recent = SuffixAutomaton(max_match)
        self._answers: dict[bytes, int] = {}  # ids -> number of tokens, oldest first
        self._unsaved: list[bytes] = []
        self._seen: tuple[int, ...] | None = None  # the file when last read or written
        self._begun, self._told = False, ""  # whether it was read; what was said of it since
        self._damaged: tuple[int, ...] | None = None  # the file when it could not be read

    def __iter__(self) -> "Iterator[array[int]]":
        """Those to draft from."""
        return (array("i", answer) for answer in self._answers if self._has_tokens_of(answer))

    def refresh(self) -> None:
        """Read the file if it has changed. Raises CheckpointError for a file that cannot be read
        or belongs to another tokenizer."""
        with self.lock:
            if (stamp := _stamp(self.path)) == self._seen or stamp is None:
                return
            found, known = _read(self.path, self.tokenizer), self._answers
            self._answers, self.num_tokens, self._seen = {}, 0, stamp
            for answer in [*found, *self._unsaved]:
                self._remember(answer)
            new = [answer for answer in self._answers if answer not in known]
            self._tell_of_others(new)
            self._index(new)

    def follow(self) -> None:
        """`refresh`, which raises the first time alone: a file that is damaged later is told once,
        and left alone. Requests go on with what was read before."""
        with self.lock:
            try:
                if self._begun and self._damaged is not None and self._damaged == _stamp(self.path):
                    return
                self.refresh()
                self._begun, self._damaged, self._told = True, None, ""
            except CheckpointError as error:
                if not self._begun:
                    raise
                with suppress(CheckpointError):
                    self._damaged = _stamp(self.path)
                if self._told != error.message:
                    self._told = error.message
                    console.warn(f"{error.message}; what was read before is still used")

    def add(self, answers: Iterable[Sequence[int]]) -> None:
        """Add answers as the newest; one that is there already becomes the newest again."""
        given = [array("i", ids[-self.most_tokens :]).tobytes() for ids in answers if ids]
        with self.lock:
            fresh = [answer for answer in given if self._remember(answer)]
            unsaved = [*self._unsaved, *given]
            self._unsaved = [answer for answer in unsaved if answer in self._answers]
            self._index(fresh)

    def save(self) -> None:
        """Write the file. Raises OSError, and CheckpointError as `refresh` does."""
        header = {"format": FORMAT, "version": VERSION, "tokenizer": self.tokenizer}
        with self.lock:
            self.refresh()
            tokens, lengths = array("i", b"".join(self._answers)), list(self._answers.values())
            with atomic_write(self.path) as temporary, temporary.open("wb") as file:
                np.savez(
                    file,
                    header=np.array(json.dumps(header)),
                    tokens=np.array(tokens, dtype=np.int32),
                    lengths=np.array(lengths, dtype=np.int32),
                )
            self._unsaved, self._seen = [], _stamp(self.path)

    def _remember(self, answer: bytes) -> bool:
        """Store an answer, dropping the oldest beyond the cap; returns whether it was new."""
        old = self._answers.pop(answer, 0)
        self._answers[answer] = len(answer) // array("i").itemsize
        self.num_tokens += self._answers[answer] - old
        while self.num_tokens > self.most_tokens:
            self.num_tokens -= self._answers.pop(next(iter(self._answers)))
        return not old

    def _has_tokens_of(self, answer: bytes) -> bool:
        """Whether the model has all tokens of an answer."""
        return max(array("i", answer)) < self.vocab_size

    def _tell_of_others(self, answers: Sequence[bytes]) -> None:
        others = sum(not self._has_tokens_of(answer) for answer in answers)
        if others:
            console.note(
                f"{self.path}: {others} of {len(answers)} past answers hold tokens from "
                f"{self.vocab_size} on, which this model lacks; it drafts from the others"
            )

    def _index(self, fresh: Sequence[bytes]) -> None:
        """Add a few new answers to the automaton; once there are many, sort all anew."""
        fresh = [answer for answer in fresh if self._has_tokens_of(answer)]
        waiting = self.recent.num_tokens + sum(map(len, fresh)) // array("i").itemsize
        if waiting > min(MAX_UNSORTED, self.most_tokens // 16):
            self._sort()
            return
        for answer in fresh:
            self.recent.restart()
            for token in array("i", answer):
                self.recent.read(token)

    def _sort(self) -> None:
        self.sorted = SuffixArray(self, self.max_match)
        self.recent = SuffixAutomaton(self.max_match)


def _stamp(path: pathlib.Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        raise CheckpointError(
            f"{str(path)!r}: the store of past answers cannot be read ({error})",
            hint="use another file",
        ) from error
    return status.st_ino, status.st_size, status.st_mtime_ns


def _read(path: pathlib.Path, tokenizer: str) -> list[bytes]:
    """The answers in the file, oldest first."""
    try:
        with path.open("rb") as file:
            arrays = np.load(file, allow_pickle=False)
            header = parse_json(str(arrays["header"]))
            found = (header["format"], header["version"], header["tokenizer"])
            tokens, lengths = arrays["tokens"], arrays["lengths"]
        if found[:2] != (FORMAT, VERSION):
            raise ValueError(f"format {found[0]!r} version {found[1]!r}")
        _check(tokens, lengths)
    except _UNREADABLE as error:
        raise CheckpointError(
            f"{path}: not a medusa-kit store of past answers, version {VERSION} ({error})",
            hint="move it away, or use another file: --drafter-option store=FILE",
        ) from error
    if found[2] != tokenizer:
        raise CheckpointError(
            f"{path}: past answers of another tokenizer ({found[2]}); expected {tokenizer}",
            hint="each tokenizer needs a file of its own: --drafter-option store=FILE",
        )
    ends = np.cumsum(lengths)[:-1]
    return (
        [part.astype(np.intc).tobytes() for part in np.split(tokens, ends)] if len(lengths) else []
    )


def _check(tokens: np.ndarray, lengths: np.ndarray) -> None:
    """Raises ValueError where the arrays contradict each other."""
    whole = all(np.issubdtype(part.dtype, np.integer) for part in (tokens, lengths))
    if not whole or tokens.ndim != 1 or lengths.ndim != 1:
        raise ValueError("expected two arrays of whole numbers")
    if (lengths < 1).any() or lengths.sum() != len(tokens) or (tokens < 0).any():
        raise ValueError(f"the lengths of {len(lengths)} answers do not add up to {len(tokens)}")
