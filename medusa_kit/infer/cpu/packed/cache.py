"""A model packed once from its files, tensor by tensor, and mapped from the cache folder since.

The file is named by the weights' SHA-256, the config's, its layout and the version of transformers,
which decides what a config means. It is made again where it is damaged.
"""

import contextlib
import copy
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from medusa_kit import console
from medusa_kit.base import families, fingerprint
from medusa_kit.base.gguf import gguf_digest
from medusa_kit.base.gguf_files.parts import stem
from medusa_kit.base.model import CHECKPOINT, FINAL_NORM_NAMES, INT8, VARIANT_KEY
from medusa_kit.base.quantization import num_weights
from medusa_kit.base.remembered_configs import settings_of
from medusa_kit.base.stored_tensors import (
    GGUFTensors,
    StoredTensors,
    safetensors_files,
    skeleton_of,
    stored_tensors,
)
from medusa_kit.errors import CheckpointError
from medusa_kit.files import file_digest
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.packed.describe import describe
from medusa_kit.infer.cpu.packed.file import (
    DIGEST,
    FILE,
    LAYOUT,
    MemorySink,
    Sink,
    mapped,
    write_file,
)
from medusa_kit.infer.cpu.packed.gguf_blocks import blocks_in_order, read_factors, read_scales
from medusa_kit.infer.cpu.packed.int8_weights import GROUP, int8_blocks, none_fits, report_rounded
from medusa_kit.infer.cpu.packed.model import PackedModel, opened
from medusa_kit.infer.cpu.packed.packing import Blocks, Rows
from medusa_kit.infer.cpu.packed.packing_up import Packing, model_of, row_pieces
from medusa_kit.infer.cpu.packed.stored_rows import StoredRows, stored_rows
from medusa_kit.infer.mkl_linear import plain_linears
from medusa_kit.infer.model_parts import ModelParts, Unsupported, check_family
from medusa_kit.store.builds import NotUsable, Origin, announce_work, make_file_once
from medusa_kit.store.records import cache_folder, content_digest


def packed_model(
    checkpoint: Path,
    config: Any,
    weights: str = CHECKPOINT,
    check: bool = False,
    begun: Callable[[], None] = lambda: None,
) -> PackedModel:
    """The packed weights of a GGUF file or a folder of safetensors; packed now, where they have not
    been. `config`: of the transformers model. `weights`: checkpoint, or rounded to int8. `check`:
    read the file whole, to see whether it is damaged. `begun`: called when it is being packed and
    C++ is known to run the model.

    Raises Unsupported where C++ cannot run the model, CheckpointError for unreadable files,
    ConfigError for weights that cannot be rounded.
    """
    packed = _packed_model(checkpoint, config, weights, check, begun)
    if (rounded := packed.rounded) is not None:
        share = rounded["numbers"] / packed.info["num_parameters"]
        report_rounded(rounded["layers"], share, rounded["left"])
    return packed


def _packed_model(
    checkpoint: Path, config: Any, weights: str, check: bool, begun: Callable[[], None]
) -> PackedModel:
    check_family(config.get_text_config())
    if kernels.load_library() is None:
        raise Unsupported("the C++ kernels are not available")
    contents = _contents(checkpoint)
    folder = _folder_of(checkpoint, contents, config, weights)
    older = _folder_of(checkpoint, contents, config, weights, named_with=[])
    doing = f"packing {checkpoint.name}, once on this machine"

    def tell() -> None:
        announce_work(doing, folder)
        begun()

    def write(sink: Sink) -> dict[str, Any]:
        return _packed(checkpoint, config, weights, sink, tell)

    def make(path: Path) -> None:
        if not _took(older, path):
            write_file(path, write)

    try:
        return make_file_once(
            folder / FILE,
            DIGEST,
            doing,
            make,
            opened,
            Origin(checkpoint, [*contents, *_of_config(checkpoint)]),
            check,
            announce=False,
        )
    except OSError as error:
        console.note(
            f"{checkpoint.name} is packed into memory, since {folder} cannot be written: {error}"
        )
    sink = MemorySink()
    return model_of(_packed(checkpoint, config, weights, sink, begun), sink.arrays)


def packed_folder(checkpoint: Path, config: Any, weights: str) -> Path:
    """The folder of a checkpoint's packed weights. Raises CheckpointError for files that cannot be
    read."""
    return _folder_of(checkpoint, _contents(checkpoint), config, weights)


def _took(older: Path, path: Path) -> bool:
    """Whether `path` is now the file of an earlier version of the kit, which named those of all
    versions of transformers alike and wrote that inside."""
    with contextlib.suppress(OSError, NotUsable):
        kept = older / FILE
        if (older / DIGEST).read_text() == file_digest(kept):
            if mapped(kept)[0].get("made_with") != _made_with():
                return False
            try:
                os.link(kept, path)
            except OSError:  # no links on this file system
                shutil.copyfile(kept, path)
            return True
    return False


def _contents(checkpoint: Path) -> list[str]:
    """Digests of the checkpoint's files."""
    try:
        if checkpoint.suffix == ".gguf":
            return [gguf_digest(checkpoint)]
        return [content_digest(file) for file in safetensors_files(checkpoint)]
    except OSError as error:
        raise CheckpointError(
            f"{checkpoint} cannot be read: {error}", hint="check the path"
        ) from error


def _of_config(checkpoint: Path) -> list[str]:
    """The digest of the config's file, by which packs of an earlier one are known. How it is read
    depends on versions, each of which keeps a pack of its own."""
    path = checkpoint / "config.json"
    return [content_digest(path)] if path.is_file() else []


def _folder_of(
    checkpoint: Path,
    contents: Sequence[str],
    config: Any,
    weights: str,
    named_with: Sequence[str] | None = None,
) -> Path:
    if named_with is None:
        named_with = [*_made_with(), f"layout {LAYOUT}", f"fingerprint {fingerprint.VERSION}"]
    digest = hashlib.sha256(json.dumps([weights, settings_of(config)]).encode())
    for part in (*contents, *named_with):
        digest.update(f"{part}\n".encode())
    name = stem(checkpoint) if checkpoint.suffix == ".gguf" else checkpoint.name
    return cache_folder() / "packed" / f"{name}-{digest.hexdigest()[:16]}"


def _made_with() -> list[str]:
    from importlib.metadata import version

    return [f"transformers {version('transformers')}"]


@torch.no_grad()
def _packed(
    checkpoint: Path,
    config: Any,
    weights: str,
    sink: Sink,
    begun: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Writes all arrays; returns the numbers that belong to them. `begun`: called once the first
    matrix is packed, before which C++ may turn out not to be able to run the model."""
    skeleton = skeleton_of(_in_float32(config))
    try:
        stored = stored_tensors(checkpoint, skeleton)
    except CheckpointError as error:
        raise Unsupported(error.message) from error
    source = StoredWeights(stored, skeleton, weights)
    if weights == INT8 and not source.num_rounded:
        raise none_fits(checkpoint.name)
    source.read_vectors()
    parts = describe(skeleton, matrices_on="meta")
    waiting = [begun]

    def advance(millions: float) -> None:
        while waiting:
            waiting.pop()()
        bar.advance(millions)

    packing = Packing(parts, source, sink, advance)
    doing = f"packing {checkpoint.name}"
    with console.progress(doing, packing.millions, "M weights", brief=True) as bar:
        numbers = packing.numbers()
    whole = source.fingerprint(parts)
    info = _info(skeleton, parts, source, weights) | {"fingerprint": whole}
    return {**numbers, "info": info, "rounded": source.rounded()}


def _in_float32(config: Any) -> Any:
    config = copy.deepcopy(config)
    config.dtype = config.get_text_config().dtype = torch.float32
    return config


def _info(
    skeleton: Any, parts: ModelParts, source: "StoredWeights", weights: str
) -> dict[str, Any]:
    text = skeleton.config.get_text_config()
    return {
        "model_type": text.model_type,
        "hidden_size": parts.output.in_features,
        "vocab_size": parts.output.out_features,
        "num_layers": text.num_hidden_layers,
        "context_length": families.context_length(text),
        "tied_embeddings": source.name_of(parts.embedding) == source.name_of(parts.output),
        "num_parameters": num_weights(skeleton),
        "weights": weights,
    }


class _SomeRows(NamedTuple):
    """Some rows of a GGUF tensor, as `read_scales` reads it."""

    data: Any
    tensor_type: Any


class StoredWeights:
    """The weights of a skeleton's layers, read one at a time, and their digests."""

    def __init__(self, stored: StoredTensors, skeleton: Any, weights: str) -> None:
        self._stored, self._skeleton = stored, skeleton
        self._modules = {id(module): name for name, module in skeleton.named_modules()}
        self._state = skeleton.state_dict(keep_vars=True)
        by_tensor: dict[int, str] = {}
        for name, tensor in self._state.items():
            if name in stored.names:
                by_tensor.setdefault(id(tensor), name)
        self._stored_name = {name: by_tensor[id(tensor)] for name, tensor in self._state.items()}
        self._check_ties()
        self._linears = plain_linears(skeleton) if weights == INT8 else []
        self._rounded = {id(linear) for linear in self._linears if linear.in_features % GROUP == 0}
        self._digests: dict[str, str] = {}  # of stored tensors
        self._orders: dict[str, Tensor | None] = {}

    @property
    def num_rounded(self) -> int:
        return len(self._rounded)

    def name_of(self, module: nn.Module) -> str:
        """The stored tensor that is this module's weight."""
        return self._stored_name[f"{self._modules[id(module)]}.weight"]

    def read_vectors(self) -> None:
        """Fill the skeleton's norms and biases, which are described by running them."""
        for name, tensor in self._state.items():
            if isinstance(tensor, nn.Parameter) and tensor.dim() == 1:
                owner, _, leaf = name.rpartition(".")
                values = self._read(self._stored_name[name]).float()
                module = self._skeleton.get_submodule(owner)
                module.register_parameter(leaf, nn.Parameter(values, requires_grad=False))

    def whole(self, module: Any, num_heads: int = 1) -> Rows:
        name = self.name_of(module)

        def others() -> Blocks | Tensor:
            return self._rows(module, self._read(name).float(), slice(None), num_heads)

        if (stored := self._stored_rows(module, slice(None), others)) is None:
            return others()
        self._digest_stored(name, stored.numbers())
        return stored

    def pieces(self, module: Any) -> Iterator[Rows]:
        name = self.name_of(module)
        for rows in self._row_pieces(name):

            def others(rows: slice = rows) -> Blocks | Tensor:
                return self._rows(module, self._stored.read_rows(name, rows).float(), rows)

            yield self._stored_rows(module, rows, others) or others()

    def are_tied(self, embedding: nn.Embedding, output: nn.Linear) -> bool:
        return id(output) not in self._rounded and self.name_of(embedding) == self.name_of(output)

    def rounded(self) -> dict[str, Any] | None:
        """Which linear layers are rounded to int8, for reports; None where none is to be."""
        if not self._linears:
            return None
        rounded = [linear for linear in self._linears if id(linear) in self._rounded]
        unrounded = [linear for linear in self._linears if id(linear) not in self._rounded]
        return {
            "layers": len(self._rounded),
            "numbers": sum(linear.weight.numel() for linear in rounded),
            "left": [self._modules[id(linear)] for linear in unrounded],
        }

    def fingerprint(self, parts: ModelParts) -> str:
        """The fingerprint that BaseModel computes from the whole model; reads what has not been
        read yet."""
        for module in (parts.embedding, parts.output):
            self._digest_layerwise(self.name_of(module))
        for name in set(self._stored_name.values()) - self._digests.keys():
            self._read(name)
        digests = {name: self._digests[stored] for name, stored in self._stored_name.items()}
        variant = getattr(self._skeleton.config.get_text_config(), VARIANT_KEY, None)
        output = self.name_of(parts.output)
        rows_V = fingerprint.output_rows(parts.output.out_features)
        rows = torch.cat([self._stored.read_rows(output, slice(i, i + 1)) for i in rows_V.tolist()])
        decoder = self._skeleton.get_decoder()
        norms = [getattr(getattr(decoder, name, None), "weight", None) for name in FINAL_NORM_NAMES]
        whole = fingerprint.whole_digest(digests, variant)
        covered = [norm for norm in norms if norm is not None]
        output_digest = fingerprint.digest_of_rows(rows, covered, variant)
        vectors = None if variant else fingerprint.vectors_digest(self._skeleton.state_dict())
        return str(fingerprint.Fingerprint(whole, output_digest, vectors=vectors))

    def _check_ties(self) -> None:
        """Tied tensors may be stored twice; transformers unties those that differ."""
        for name, stored_name in self._stored_name.items():
            if name != stored_name and name in self._stored.names:
                pairs = zip(self._read_pieces(name), self._read_pieces(stored_name), strict=True)
                if not all(torch.equal(first, second) for (_, first), (_, second) in pairs):
                    raise Unsupported(f"{name} and {stored_name} are tied but differ")

    def _stored_rows(
        self, module: Any, rows: slice, others: Callable[[], Blocks | Tensor]
    ) -> StoredRows | None:
        """Rows of a layer as its file has them, where C++ packs them so."""
        if id(module) in self._rounded:
            return None
        return self._rows_in_file(self.name_of(module), rows, others)

    def _rows_in_file(
        self, name: str, rows: slice, others: Callable[[], Blocks | Tensor]
    ) -> StoredRows | None:
        if not isinstance(self._stored, GGUFTensors):
            return None
        if name not in self._orders:
            self._orders[name] = _order_in_file(self._stored, name)
        order_O, tensor = self._orders[name], self._stored.stored[name]
        if order_O is None:
            return None
        kind, inputs = tensor.tensor_type.name, int(tensor.shape[0])
        return stored_rows(tensor.data, kind, inputs, order_O[rows], others)

    def _rows(
        self, module: Any, weight_OI: Tensor, rows: slice, num_heads: int = 1
    ) -> Blocks | Tensor:
        if id(module) in self._rounded:
            return int8_blocks(weight_OI)
        blocks = self._gguf_blocks(self.name_of(module), weight_OI, rows, num_heads)
        return weight_OI if blocks is None else blocks

    def _gguf_blocks(
        self, name: str, weight_OI: Tensor, rows: slice, num_heads: int
    ) -> Blocks | None:
        if not isinstance(self._stored, GGUFTensors):
            return None
        tensor = self._stored.stored[name]
        chosen = _SomeRows(tensor.data[rows], tensor.tensor_type)
        scales = read_scales(chosen, len(weight_OI))
        if scales is None:
            return None
        factors = read_factors(chosen, len(weight_OI))
        return blocks_in_order(weight_OI, *scales, num_heads, factors)

    def _read(self, name: str) -> Tensor:
        tensor = self._stored.read(name)
        if name not in self._digests:
            self._digests[name] = fingerprint.stored_digest(tensor)
        return tensor

    def _digest_stored(self, name: str, numbers: Iterable[Tensor]) -> None:
        if name not in self._digests:
            self._digests[name] = fingerprint.tensor_digest(self._state[name].shape, numbers)

    def _digest_layerwise(self, name: str) -> None:
        self._digest_stored(name, self._numbers(name))

    def _numbers(self, name: str) -> Iterator[Tensor]:
        """All numbers of a large tensor in order, in pieces."""
        for rows in self._row_pieces(name):

            def others(rows: slice = rows) -> Tensor:
                return self._stored.read_rows(name, rows)

            stored = self._rows_in_file(name, rows, others)
            yield from [others().flatten()] if stored is None else stored.numbers()

    def _read_pieces(self, name: str) -> Iterator[tuple[slice, Tensor]]:
        for rows in self._row_pieces(name):
            yield rows, self._stored.read_rows(name, rows)

    def _row_pieces(self, name: str) -> Iterator[slice]:
        return (slice(*piece) for piece in row_pieces(*self._state[name].shape))


def _order_in_file(stored: GGUFTensors, name: str) -> Tensor | None:
    """Which row of the file each row of a matrix is; None where it is none of them."""
    tensor = stored.stored[name]
    whole = len(stored.parts_of(name)) == 1 and len(tensor.shape) == 2
    places_O = stored.order_of_rows(tensor) if whole else None
    return None if places_O is None else torch.from_numpy(places_O).argsort()
