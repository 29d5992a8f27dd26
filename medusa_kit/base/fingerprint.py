"""Which base model a thing was made with, in one line: `2:WHOLE:OUTPUT`, `2q:…` of a quantised one.

WHOLE   digest of every tensor of the model: XXH3-128 over the sorted lines "name digest", a
        tensor's digest being XXH3-128 over its shape and its numbers, row by row, rounded to
        bfloat16 (little-endian), so that the load dtype is no matter. A tensor may come in pieces,
        so weights that are packed or spread over processes can be read one after the other
OUTPUT  digest of final norm and 64 rows of the output embedding, which quantisation leaves alone

Version 1 was OUTPUT by itself: files that carry it can be compared by that part only.

Shapes: V vocabulary, D hidden.
"""

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from medusa_kit.base.quantization import is_quantised, raw_bytes, stored_parts

VERSION, QUANTISED = "2", "q"
OLD_NOTE = (
    "its fingerprint is an old one, of output embedding and final norm alone; these are the "
    "base's, and whether the other weights are cannot be told"
)
PIECE = 1 << 18  # numbers converted at a time: they stay in the processor's cache
OUTPUT_ROWS = 64
READ_WHOLE, SAMPLES = 1 << 30, 1000  # bytes that are read in less than 0.1 s; else numbers a tensor


class Match(enum.Enum):
    SAME = "the same model"
    COPY = "a quantised copy of it: output embedding and final norm are the same"
    OLD = "one of them is of version 1, and all that it reads is the same"
    OTHER = "another model"


@dataclass(frozen=True)
class Fingerprint:
    whole: str | None  # None in version 1
    output: str
    quantised: bool = False

    @classmethod
    def parse(cls, text: str) -> "Fingerprint":
        """Of whatever a file says; what is not of our form equals nothing but itself."""
        version, _, digests = text.partition(":")
        whole, _, output = digests.partition(":")
        if version not in (VERSION, VERSION + QUANTISED) or not output:
            return cls(None, text)
        return cls(whole, output, version.endswith(QUANTISED))

    def __str__(self) -> str:
        if self.whole is None:
            return self.output
        return f"{VERSION}{QUANTISED if self.quantised else ''}:{self.whole}:{self.output}"

    def adapted(self, variant: str, output: str) -> "Fingerprint":
        """Of this model with the adapter of digest `variant`, merged in whatever dtype."""
        whole = _xxh3_128(f"{self.whole} {variant}".encode()).hexdigest()
        return Fingerprint(whole, output, self.quantised)


def compare(one: Any, other: Any) -> Match:
    """What two fingerprints say of each other, in the form in which they stand in files."""
    first, second = Fingerprint.parse(str(one)), Fingerprint.parse(str(other))
    if first == second:
        return Match.SAME
    if first.output != second.output:
        return Match.OTHER
    if first.whole is None or second.whole is None:
        return Match.OLD
    return Match.COPY if first.quantised or second.quantised else Match.OTHER


def whole_digest(digests: Mapping[str, str], variant: str | None = None) -> str:
    """Of all tensors, by name. `variant`: the mark of a model that Medusa-2 trained."""
    lines = [f"{name} {digest}\n" for name, digest in sorted(digests.items())]
    return _xxh3_128("".join([*lines, variant or ""]).encode()).hexdigest()


def tensor_digest(shape: Sequence[int], pieces: Iterable[Tensor]) -> str:
    """Of one tensor in floating point, whose numbers come in order, in pieces of any size."""
    digest = _xxh3_128(repr(tuple(shape)).encode())
    for piece in pieces:
        digest.update(piece.bfloat16().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def digests_of(
    model: Any, made_whole: Callable[[Tensor], AbstractContextManager[Any]] = nullcontext
) -> dict[str, str]:
    """name -> digest of every tensor that a checkpoint of `model` holds.

    `made_whole`: what to do around reading a tensor that is spread over processes.
    """
    found: dict[int, str] = {}  # tied weights have two names
    digests = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            continue
        if id(tensor) not in found:
            with made_whole(tensor):
                found[id(tensor)] = _stored_digest(tensor.detach())
        digests[name] = found[id(tensor)]
    return digests


def output_digest(weights: Sequence[Tensor], variant: str | None = None) -> str:
    """Of output embedding and norms: all of version 1, so it must stay as it is, byte for byte."""
    weight_VD, *norms = weights
    rows = torch.linspace(0, weight_VD.shape[0] - 1, OUTPUT_ROWS).long()
    digest = sha256(raw_bytes(weight_VD[rows.to(weight_VD.device)].bfloat16()))
    for weight in norms:
        digest.update(raw_bytes(weight.bfloat16()))
    if variant:
        digest.update(variant.encode())
    return digest.hexdigest()[:32]


def contents_digest(model: Any) -> str:
    """Of the numbers that `model` holds now, to tell within milliseconds whether they changed.

    Of a large model a thousand numbers of every tensor count: training, merging and loading change
    them all over, while a single number that is written by hand may go unnoticed.
    """
    tensors = [*model.parameters(), *model.buffers()]
    sampled = sum(tensor.nbytes for tensor in tensors) > READ_WHOLE
    digest = _xxh3_128()
    for tensor in tensors:
        for part in stored_parts(tensor):
            flat = part.detach().flatten()
            if sampled and len(flat) > SAMPLES:
                flat = flat[torch.arange(SAMPLES, device=flat.device) * len(flat) // SAMPLES]
            digest.update(flat.cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _xxh3_128(data: bytes = b"") -> Any:
    """Imported where a digest is made: a base whose fingerprint is known needs none."""
    from xxhash import xxh3_128

    return xxh3_128(data)


def _stored_digest(tensor: Tensor) -> str:
    """Quantised weights count as they are stored: what they expand to is their library's affair."""
    if tensor.is_floating_point() and not is_quantised(tensor):
        return tensor_digest(tensor.shape, _pieces(tensor))
    digest = _xxh3_128(repr(tuple(tensor.shape)).encode())
    for part in stored_parts(tensor):
        digest.update(f"{part.dtype} {tuple(part.shape)}".encode())
        digest.update(part.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    yield from tensor.flatten().split(PIECE)
