"""Fingerprints: which base model something was made with, as `3:WHOLE:OUTPUT:VECTORS` (quantised:
`3q:…`).

WHOLE   digest of every tensor of the model: XXH3-128 over the sorted lines "name digest". A
        tensor's digest is XXH3-128 over its shape and its numbers, row by row, rounded to bfloat16
        (little-endian), so that the load dtype does not matter. A tensor may come in pieces, so
        weights that are packed or spread over processes can be read one after the other
OUTPUT  digest of final norm and 64 rows of the output embedding, which quantisation in memory
        leaves alone
VECTORS digest of all norms and biases, rounded to bfloat16: no quantisation rounds them, that of
        GGUF files neither, and training all weights changes them

A fingerprint without VECTORS is of version 2, `2:WHOLE:OUTPUT`: earlier versions of the kit wrote
such, and so does this one where norms and biases tell nothing (`vectors_digest`) and for models
that are known to be others though these may be the same: with an adapter, or trained by Medusa-2.
Version 1 was OUTPUT alone, so files that carry it are compared by that part only.

Shapes: V vocabulary, D hidden.
"""

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor

from medusa_kit.base.quantization import is_quantised, raw_bytes, stored_parts

VERSION, QUANTISED = "3", "q"
WITHOUT_VECTORS = "2"
OLD_NOTE = (
    "its fingerprint is an old one, which covers output embedding and final norm only; these are "
    "the base's, the other weights could not be compared"
)
PIECE = 1 << 18  # numbers converted at a time: they stay in the processor's cache
OUTPUT_ROWS = 64
VECTOR_NAMES = (".weight", ".bias")  # how names of norms and biases end
# Smaller numbers count as 0 in VECTORS: converters that add 1 to a norm round them away, and so
# does float16. Between two numbers of bfloat16, so that rounding does not move one across.
SMALL = 2.0**-13 * (1 + 2.0**-9)
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # by their bytes


class Match(enum.Enum):
    SAME = "the same model"
    COPY = "a quantised copy of it: output embedding and final norm are the same"
    SAME_NORMS = "another quantisation of it, or fine-tuned with norms and biases left as they were"
    OLD = "one of them is of version 1, and the part that it covers is the same"
    OTHER = "another model"


# Where a model's own text or figures count: norms alone do not show that it is the same one.
SAME_MODEL = (Match.SAME, Match.COPY, Match.OLD)


@dataclass(frozen=True)
class Fingerprint:
    whole: str | None  # None in version 1
    output: str
    quantised: bool = False
    vectors: str | None = field(default=None, compare=False)  # None: they tell nothing

    @classmethod
    def parse(cls, text: str) -> "Fingerprint":
        """From the text in a file; text of another form equals nothing but itself."""
        version, _, digests = text.partition(":")
        parts, number = digests.split(":"), version.removesuffix(QUANTISED)
        if {WITHOUT_VECTORS: 2, VERSION: 3}.get(number) != len(parts) or not all(parts):
            return cls(None, text)
        whole, output, *vectors = parts
        return cls(whole, output, version.endswith(QUANTISED), *vectors)

    def __str__(self) -> str:
        if self.whole is None:
            return self.output
        version = WITHOUT_VECTORS if self.vectors is None else VERSION
        version += QUANTISED if self.quantised else ""
        parts = (version, self.whole, self.output, self.vectors)
        return ":".join(part for part in parts if part is not None)

    @property
    def of_weights(self) -> str:
        """Without VECTORS, as version 2 has it: for what belongs to these very weights."""
        return str(replace(self, vectors=None))

    def adapted(self, variant: str, output: str) -> "Fingerprint":
        """The fingerprint of this model with the adapter of digest `variant`, merged in any
        dtype."""
        whole = _xxh3_128(f"{self.whole} {variant}".encode()).hexdigest()
        return Fingerprint(whole, output, self.quantised)


def compare(one: Any, other: Any) -> Match:
    """How two fingerprints relate, each as text or as parsed from a file."""
    first, second = Fingerprint.parse(str(one)), Fingerprint.parse(str(other))
    if first == second:
        return Match.SAME
    if first.output == second.output and None in (first.whole, second.whole):
        return Match.OLD
    if first.output == second.output and (first.quantised or second.quantised):
        return Match.COPY
    same_norms = first.vectors is not None and first.vectors == second.vectors
    return Match.SAME_NORMS if same_norms else Match.OTHER


def whole_digest(digests: Mapping[str, str], variant: str | None = None) -> str:
    """The digest of all tensors, given theirs by name. `variant`: the mark of a Medusa-2 model."""
    lines = [f"{name} {digest}\n" for name, digest in sorted(digests.items())]
    return _xxh3_128("".join([*lines, variant or ""]).encode()).hexdigest()


def tensor_digest(shape: Sequence[int], pieces: Iterable[Tensor]) -> str:
    """The digest of a floating-point tensor, whose numbers come in order in pieces of any size."""
    digest = _xxh3_128(repr(tuple(shape)).encode())
    for piece in pieces:
        digest.update(piece.bfloat16().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def vectors_digest(tensors: Mapping[str, Tensor]) -> str | None:
    """The digest of the norms and biases among these, by name. None where each holds one number
    over and over, as before training: models of one shape have them in common."""
    lines, tell = list[str](), False
    for name, tensor in sorted(tensors.items()):
        if is_vector(name, tensor):
            numbers = tensor.detach().float()
            numbers = numbers.where(numbers.abs() > SMALL, 0.0).bfloat16()
            tell = tell or bool((numbers != numbers[:1]).any())
            lines.append(f"{name} {tensor_digest(tensor.shape, [numbers])}\n")
    return _xxh3_128("".join(lines).encode()).hexdigest() if tell else None


def is_vector(name: str, tensor: Tensor) -> bool:
    """Whether a tensor of a checkpoint is a norm or a bias."""
    named = name.endswith(VECTOR_NAMES) and tensor.dim() == 1
    return named and tensor.is_floating_point() and not is_quantised(tensor)


class Digests(NamedTuple):
    by_name: dict[str, str]
    vectors: str | None


def digests_of(
    model: Any, made_whole: Callable[[Tensor], AbstractContextManager[Any]] = nullcontext
) -> Digests:
    """The digest of every tensor that a checkpoint of `model` holds, and that of its vectors.

    `made_whole`: a context in which a tensor that is spread over processes can be read.
    """
    found: dict[int, str] = {}  # tied weights have two names
    digests, vectors = {}, {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            continue
        if id(tensor) not in found:
            with made_whole(tensor):
                found[id(tensor)] = stored_digest(_detached(tensor))
                if is_vector(name, tensor):
                    vectors[name] = _detached(tensor).clone()
        digests[name] = found[id(tensor)]
    return Digests(digests, vectors_digest(vectors))


def _detached(tensor: Tensor) -> Tensor:
    """Weights of a quantiser's class cannot be detached in the inference mode of a step."""
    with torch.inference_mode(False):
        return tensor.detach()


def output_digest(weights: Sequence[Tensor], variant: str | None = None) -> str:
    """The digest of output embedding and norms. Files of version 1 hold it: it must not change."""
    weight_VD, *norms = weights
    rows = weight_VD[output_rows(weight_VD.shape[0]).to(weight_VD.device)]
    return digest_of_rows(rows, norms, variant)


def output_rows(vocab_size: int) -> Tensor:
    """The rows of an output embedding that its digest covers."""
    return torch.linspace(0, vocab_size - 1, OUTPUT_ROWS, dtype=torch.float32).long()


def digest_of_rows(rows: Tensor, norms: Sequence[Tensor], variant: str | None = None) -> str:
    """`output_digest`, given only the rows of the output embedding that it covers."""
    digest = sha256(raw_bytes(rows.bfloat16()))
    for weight in norms:
        digest.update(raw_bytes(weight.bfloat16()))
    if variant:
        digest.update(variant.encode())
    return digest.hexdigest()[:32]


def contents_digest(tensors: Iterable[Tensor]) -> str:
    """A digest of all numbers as they are now. On a CPU it takes as long as reading them once.

    On a device their bits are added up there, by rows and by columns; what leaves all of these sums
    as they were is no change that anybody makes.
    """
    tensors = list(tensors)
    if not tensors:
        return ""
    digest, sums = _xxh3_128(), dict[Any, list[Tensor]]()
    for tensor in tensors:
        for part in stored_parts(tensor.detach()):
            if part.device.type == "cpu":
                digest.update(part.contiguous().flatten().view(torch.uint8).numpy().data)
            elif part.device.type != "meta":
                sums.setdefault(part.device, []).extend(_sums(part))
    for parts in sums.values():  # read at once: the host waits once for each device
        digest.update(torch.cat(parts).cpu().numpy().data)
    return digest.hexdigest()


def _sums(part: Tensor) -> list[Tensor]:
    rows = part.reshape(-1, part.shape[-1]) if part.dim() else part.reshape(1, 1)
    rows = rows.contiguous()
    # As few and wide integers as rows divide into: adding them up is what takes time.
    sizes = rows.shape[1] * rows.element_size(), rows.storage_offset() * rows.element_size()
    width = next(width for width in INTEGERS if all(size % width == 0 for size in sizes))
    bits = rows.view(INTEGERS[width])
    return [bits.sum(dim, dtype=torch.int64) for dim in (0, 1)]


def version_of(tensor: Tensor) -> int:
    """A number that grows where a tensor is written to, but for writes through `.data`."""
    return 0 if tensor.is_inference() else tensor._version


def _xxh3_128(data: bytes = b"") -> Any:
    """Imported only here: a base whose fingerprint is known needs no digest."""
    from xxhash import xxh3_128

    return xxh3_128(data)


def stored_digest(tensor: Tensor) -> str:
    """The digest of a tensor of a checkpoint. Quantised weights are digested as
    stored, since their expansion depends on their library."""
    if tensor.is_floating_point() and not is_quantised(tensor):
        return tensor_digest(tensor.shape, _pieces(tensor))
    digest = _xxh3_128(repr(tuple(tensor.shape)).encode())
    for part in stored_parts(tensor):
        digest.update(f"{part.dtype} {tuple(part.shape)}".encode())
        digest.update(part.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    yield from tensor.flatten().split(PIECE)
