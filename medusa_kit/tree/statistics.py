"""Rank statistics: the rank at which each head had the true token, at every calibration position.

A rank is a token's place by logit descending, token id ascending, from 0, as in drafting. Answers
are stored one after the other. An answer of T tokens has T rows, the first at its last prompt
token: row p (from 0) comes just before answer token p, its root, and head k's true token there is
answer token p + 1 + k. Past the end of the answer there is none.

Where dynamic trees were grown too, an entry is the number of nodes from which on such a tree holds
the true path as far as a head. Dynamic trees are nested, so one number serves all sizes.

Shapes: P positions (rows of all answers), K heads, R ranks, A answers.
"""

import hashlib
import io
import json
import pathlib
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from medusa_kit.equal_rows import groups_of, held_out
from medusa_kit.errors import CheckpointError, TreeError
from medusa_kit.files import atomic_write, parse_json
from medusa_kit.paths import expanded

NOT_AVAILABLE = -1  # the answer ends before that token
MISSING = 32767  # not among the head's first num_ranks draft tokens, or not in its projection

FORMAT = "medusa-kit-statistics"
VERSION = 1


@dataclass(frozen=True, eq=False)
class RankStatistics:
    """Ranks of the true tokens.

    ranks_PK    int16 (other integers are converted), NOT_AVAILABLE past the end of the answer;
                ranks >= num_ranks are stored as MISSING
    starts      int64, first row of each answer, rising, starts[0] == 0
    num_ranks   draft tokens of each head that were considered, 1 to 32767
    meta        where the numbers come from (base model, fingerprint, heads, text); JSON values
    entries_PK  int16, the fewest nodes, root included, with which a dynamic tree holds the true
                tokens of heads 0 to k; MISSING where no tree grown does; None: not recorded.
                meta["dynamic"] says how those trees were grown
    contents_A2 int64, digests of each answer's prompt and text (equal_rows.py), by which a split
                keeps equal answers together; None: not recorded, each is one of its own

    Raises CheckpointError when these contradict each other.
    """

    ranks_PK: np.ndarray
    starts: np.ndarray
    num_ranks: int
    meta: dict[str, Any] = field(default_factory=dict)
    entries_PK: np.ndarray | None = None
    contents_A2: np.ndarray | None = None
    path: pathlib.Path | None = field(default=None, compare=False)  # that they were read from

    def __post_init__(self) -> None:
        ranks_PK, starts = np.asarray(self.ranks_PK), np.asarray(self.starts)
        _check_arrays(ranks_PK, starts, self.num_ranks)
        ranks_PK = np.where(ranks_PK >= self.num_ranks, MISSING, ranks_PK).astype(np.int16)
        object.__setattr__(self, "ranks_PK", ranks_PK)
        object.__setattr__(self, "starts", starts.astype(np.int64))
        _check_ends(ranks_PK, self.lengths())
        if self.entries_PK is not None:
            entries_PK = np.asarray(self.entries_PK)
            _check_entries(entries_PK, ranks_PK)
            object.__setattr__(self, "entries_PK", entries_PK.astype(np.int16))
        if self.contents_A2 is not None and self.contents_A2.shape != (self.num_answers, 2):
            raise CheckpointError(
                f"contents have shape {self.contents_A2.shape}, expected {(self.num_answers, 2)}"
            )

    @property
    def num_positions(self) -> int:
        return int(self.ranks_PK.shape[0])

    @property
    def num_heads(self) -> int:
        return int(self.ranks_PK.shape[1])

    @property
    def num_answers(self) -> int:
        return len(self.starts)

    def lengths(self) -> np.ndarray:
        """int64 [A]: the number of rows, and so of tokens, of each answer."""
        return np.diff(self.starts, append=self.num_positions)

    @cached_property
    def digest(self) -> str:
        """Of the ranks: what a tree that was found from them says. Nodes of dynamic trees follow
        from the same answers."""
        digest = hashlib.sha256(f"{self.ranks_PK.shape} {self.num_ranks}".encode())
        digest.update(self.ranks_PK.tobytes())
        digest.update(self.starts.tobytes())
        return digest.hexdigest()[:32]

    @cached_property
    def sorted_rows(self) -> np.ndarray:
        """int64 [P]: rows in the order of their ranks, the first head's first."""
        return np.lexsort(self.ranks_PK.T[::-1])

    def marginals(self, weights_P: np.ndarray | None = None) -> np.ndarray:
        """float64 [K, R]: how often head k had the true token at rank r, where there is one.

        The paper searches its tree from these (arXiv 2401.10774, §2.3.3). `weights_P`: the weight
        of each position.
        """
        shares_KR = np.zeros((self.num_heads, self.num_ranks))
        for k in range(self.num_heads):
            # Bins: no token at all, each rank, not found.
            places_P = np.minimum(self.ranks_PK[:, k], self.num_ranks) - NOT_AVAILABLE
            counts = np.bincount(places_P, weights_P, minlength=self.num_ranks + 2)
            total = counts[1:].sum()
            shares_KR[k] = counts[1:-1] / total if total else 0.0
        return shares_KR

    def split(self, fraction: float, seed: int) -> tuple["RankStatistics", "RankStatistics"]:
        """(fit, held_out) by whole answers; `fraction` of the answers, at least one, are held out.

        The same seed gives the same split. Answers keep their order; equal ones stay on one side.
        Raises TreeError for fewer than two answers that differ or a fraction outside (0, 1).
        """
        if not 0.0 < fraction < 1.0:
            raise TreeError(f"held-out fraction {fraction}, expected a number between 0 and 1")
        groups = self._groups()
        if len(groups) < 2:
            same = ", all of them the same," if self.num_answers > 1 else ""
            raise TreeError(
                f"statistics of {self.num_answers} answers{same} cannot be split, expected at "
                "least 2 that differ",
                hint="calibrate on more answers",
            )
        num_held_out = min(max(round(fraction * self.num_answers), 1), self.num_answers - 1)
        order = np.random.default_rng(seed).permutation(len(groups)).tolist()
        chosen = held_out(groups, order, num_held_out)
        fit = [answer for answer in range(self.num_answers) if answer not in chosen]
        return self._answers(np.array(fit)), self._answers(np.array(sorted(chosen)))

    def _groups(self) -> list[list[int]]:
        if self.contents_A2 is None:
            return groups_of(range(self.num_answers))
        rows = [(prompt, text) for prompt, text in self.contents_A2.tolist()]
        return groups_of(rows, [[("prompt", prompt), ("answer", text)] for prompt, text in rows])

    def _answers(self, answers: np.ndarray) -> "RankStatistics":
        """The statistics of these answers alone, in the order given."""
        lengths_A = self.lengths()[answers]
        ends_A = np.cumsum(lengths_A)
        first_A = self.starts[answers]
        rows_P = np.arange(lengths_A.sum()) + np.repeat(first_A - (ends_A - lengths_A), lengths_A)
        entries_PK = None if self.entries_PK is None else self.entries_PK[rows_P]
        starts = ends_A - lengths_A
        contents_A2 = None if self.contents_A2 is None else self.contents_A2[answers]
        return replace(
            self, ranks_PK=self.ranks_PK[rows_P], starts=starts, entries_PK=entries_PK,
            contents_A2=contents_A2,
        )  # fmt: skip

    @classmethod
    def concat(cls, parts: Sequence["RankStatistics"]) -> "RankStatistics":
        """The answers of all parts, in order. Parts must agree in heads, num_ranks and meta."""
        if not parts:
            raise CheckpointError("no statistics to join, expected at least one part")
        first = parts[0]
        for part in parts[1:]:
            for name in ("num_heads", "num_ranks", "meta"):
                expected, actual = getattr(first, name), getattr(part, name)
                if expected != actual:
                    raise CheckpointError(
                        f"statistics with {name} {actual} do not join those with {name} {expected}",
                        hint="join only statistics of the same heads on the same base model",
                    )
        sizes = [part.num_positions for part in parts]
        offsets = np.cumsum([0, *sizes[:-1]])
        starts = [part.starts + offset for part, offset in zip(parts, offsets, strict=True)]
        ranks_PK = np.concatenate([part.ranks_PK for part in parts])
        entries = [part.entries_PK for part in parts if part.entries_PK is not None]
        entries_PK = np.concatenate(entries) if len(entries) == len(parts) else None
        contents = [part.contents_A2 for part in parts if part.contents_A2 is not None]
        contents_A2 = np.concatenate(contents) if len(contents) == len(parts) else None
        return replace(
            first, ranks_PK=ranks_PK, starts=np.concatenate(starts), entries_PK=entries_PK,
            contents_A2=contents_A2,
        )  # fmt: skip

    def save(self, path: str | pathlib.Path) -> None:
        """Write one .npz file, atomically."""
        with atomic_write(expanded(path)) as temporary:
            temporary.write_bytes(self.as_bytes())

    def as_bytes(self) -> bytes:
        """The bytes that `save` writes."""
        header = {"format": FORMAT, "version": VERSION, "num_ranks": self.num_ranks}
        text = json.dumps({**header, "meta": self.meta})
        arrays = {"ranks_PK": self.ranks_PK, "starts": self.starts, "header": np.array(text)}
        if self.entries_PK is not None:
            arrays["entries_PK"] = self.entries_PK
        if self.contents_A2 is not None:
            arrays["contents_A2"] = self.contents_A2
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
        return buffer.getvalue()

    @classmethod
    def load(cls, path: str | pathlib.Path) -> "RankStatistics":
        """Read what `save` wrote. Raises CheckpointError when the file is missing or malformed."""
        try:
            with expanded(path).open("rb") as file:
                fields = _read_fields(np.load(file, allow_pickle=False))
                return cls(*fields, path=pathlib.Path(path))
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error.message}", hint=error.hint) from error
        except FileNotFoundError as error:
            raise CheckpointError(f"no statistics file at {path}") from error
        except _UNREADABLE as error:
            raise CheckpointError(
                f"{path}: not a medusa-kit statistics file ({error})", hint="run calibration again"
            ) from error


# What numpy, zipfile, zlib and json raise for files that are cut off, damaged or of another kind.
_UNREADABLE = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error, struct.error, MemoryError),
)


def _read_fields(arrays: Any) -> tuple[np.ndarray, np.ndarray, int, dict[str, Any], Any, Any]:
    """The fields of RankStatistics, in order, from an opened .npz file."""
    header = parse_json(str(arrays["header"]))
    version = (header["format"], header["version"])
    if version != (FORMAT, VERSION):
        raise CheckpointError(
            f"format {version[0]!r} version {version[1]!r}, expected {FORMAT!r} version {VERSION}"
        )
    further = [arrays[name] if name in arrays.files else None
               for name in ("entries_PK", "contents_A2")]  # fmt: skip
    meta = dict(header["meta"])
    return arrays["ranks_PK"], arrays["starts"], header["num_ranks"], meta, *further


def _check_arrays(ranks_PK: np.ndarray, starts: np.ndarray, num_ranks: Any) -> None:
    if type(num_ranks) is not int or not 1 <= num_ranks <= MISSING:
        raise CheckpointError(f"num_ranks is {num_ranks!r}, expected a number from 1 to {MISSING}")
    if ranks_PK.ndim != 2 or not np.issubdtype(ranks_PK.dtype, np.integer):
        raise CheckpointError(
            f"ranks have shape {ranks_PK.shape} and dtype {ranks_PK.dtype}, "
            "expected integers [positions, heads]"
        )
    num_positions = len(ranks_PK)
    # np.asarray([]) makes floats of an empty list of answers.
    whole = np.issubdtype(starts.dtype, np.integer) or starts.size == 0
    bounds = [*starts.tolist(), num_positions] if starts.ndim == 1 else []
    rising = all(low < high for low, high in pairwise(bounds))
    if not bounds or not whole or not rising or bounds[0] != 0:
        raise CheckpointError(
            f"first rows of the answers are {starts}, "
            f"expected rising whole numbers from 0 to below {num_positions}"
        )


def _check_ends(ranks_PK: np.ndarray, lengths_A: np.ndarray) -> None:
    """Ranks must be present exactly where the answer still has a token for that head."""
    num_positions, num_heads = ranks_PK.shape
    ends_P = np.repeat(np.cumsum(lengths_A), lengths_A)
    remaining_P = ends_P - np.arange(num_positions)  # rows from this one to the answer's last
    past_end_PK = np.arange(1, num_heads + 1) >= remaining_P[:, None]
    wrong = np.argwhere(((ranks_PK == NOT_AVAILABLE) != past_end_PK) | (ranks_PK < NOT_AVAILABLE))
    if len(wrong):
        row, k = wrong[0].tolist()
        expected = str(NOT_AVAILABLE) if past_end_PK[row, k] else "a rank >= 0"
        raise CheckpointError(
            f"head {k} has rank {ranks_PK[row, k]} at row {row}, expected {expected} there: "
            f"the answer has {remaining_P[row] - 1} more tokens after the row's own"
        )


def _check_entries(entries_PK: np.ndarray, ranks_PK: np.ndarray) -> None:
    """Entries must be 2 or more, rise from head to head and stop at the end of the answer."""
    whole = np.issubdtype(entries_PK.dtype, np.integer)
    if entries_PK.shape != ranks_PK.shape or not whole:
        raise CheckpointError(
            f"entries have shape {entries_PK.shape} and dtype {entries_PK.dtype}, expected "
            f"integers {ranks_PK.shape}"
        )
    rising_PK = (entries_PK[:, 1:] > entries_PK[:, :-1]) | (entries_PK[:, 1:] == MISSING)
    in_range_PK = (entries_PK >= 2) & (entries_PK <= MISSING)
    past_end_PK = (ranks_PK == NOT_AVAILABLE) & (entries_PK != MISSING)
    if not rising_PK.all() or not in_range_PK.all() or past_end_PK.any():
        raise CheckpointError(
            "entries are inconsistent, expected nodes from 2 that rise from head to head, "
            f"{MISSING} where there is none",
            hint="calibrate again",
        )
