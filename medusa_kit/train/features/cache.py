"""Hidden states on disk, for runs whose features do not fit into memory or are used again.

cache_dir/index.json           which base, tokenizer and format; the shards and their rows
cache_dir/shard-XXXX.safetensors   hidden_PD [P, D] (and likeliest_PS, chances_PS, or others_P1,
                               others_PD), the positions trained on, one row of text
                               after the other

A row is identified by a digest of its tokens and positions, so equal rows are stored once, and a
cache that was interrupted or belongs to another run is completed. A shard's own header lists its
rows, says what the index says (a file may have been copied), and has a checksum, which is compared
once in each run that uses one of the rows; shards of older versions say less. A shard that is cut
off or whose bits have changed is reported, and its rows are computed again.

Shapes: P positions, D hidden, K heads, J = K + 1 tokens ahead, S likeliest tokens of the base;
`others` are runners-up (runners_up.py).
"""

import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medusa_kit import console
from medusa_kit.base.faults.finite import overflown
from medusa_kit.base.fingerprint import Fingerprint, Match, compare
from medusa_kit.base.model import BaseModel
from medusa_kit.base.origin import BASE, BASE_DTYPE, CONFIG, tell_unknown
from medusa_kit.base.origin import compare as compare_origins
from medusa_kit.base.placement import DTYPES
from medusa_kit.base.tokenizer.encoding_digest import ENCODING
from medusa_kit.data.answer_settings import ACTIVATIONS
from medusa_kit.errors import (
    ConfigError,
    IncompatibleBaseError,
    MedusaKitError,
    NotFiniteError,
)
from medusa_kit.files import parse_json, write_json
from medusa_kit.outputs import check_folder, json_object
from medusa_kit.paths import expanded
from medusa_kit.settings.engine import FLOAT32
from medusa_kit.settings.recipe import TrainRecipe
from medusa_kit.train.features.features import (
    FeatureOptions,
    Positions,
    batches,
    by_length,
    run,
    targets_of,
)
from medusa_kit.train.features.rows import HeadTargets
from medusa_kit.train.features.shards import (
    OTHER_PLACE,
    check_shards,
    read_shards,
    remove_unfinished,
    shard_files,
    write_shard,
)
from medusa_kit.train.loss.loss import SoftHidden, SoftTargets
from medusa_kit.train.processes import distributed

INDEX, WHOLE_ROWS = "index.json", "whole_rows"
RUNNERS_UP, OTHERS = "runners_up", ("others_P1", "others_PD")
UNSAID = {WHOLE_ROWS: False, RUNNERS_UP: False, ACTIVATIONS: FLOAT32}  # by older versions
SHARD_BYTES = 256 << 20
SHARD_SECONDS = 60.0  # of a slow base: what a killed run computes again, at most
SPARE_BYTES = 64 << 20  # kept free on the disk


class CachedPositions:
    """Positions of given rows, read from shards when needed."""

    def __init__(
        self,
        folder: Path,
        items: Sequence[HeadTargets],
        dtype: torch.dtype,
        options: FeatureOptions,
    ) -> None:
        self.ahead_PJ = torch.cat([torch.from_numpy(item.ahead_PJ) for item in items])
        self._dtype = dtype
        rows_by_digest, self._shards = read_shards(folder, _tensors(options))
        shard, row = [], []
        for item in items:
            index, start, count = rows_by_digest[row_digest(item)]
            shard.append(np.full(count, index, dtype=np.int32))
            row.append(np.arange(start, start + count))
        self._shard_P = torch.from_numpy(np.concatenate(shard))
        self._row_P = torch.from_numpy(np.concatenate(row))

    def rows(self, rows_P: Tensor) -> tuple[Tensor, Tensor, SoftTargets | None]:
        """(hidden_PD, ahead_PJ, soft targets) of these positions."""
        soft = None
        if "likeliest_PS" in self._shards[0]:
            rows_PK = targets_of(rows_P, self.ahead_PJ)
            parts = (self._gather(name, rows_PK.flatten()).unflatten(0, rows_PK.shape)
                     for name in ("likeliest_PS", "chances_PS"))  # fmt: skip
            soft = SoftTargets(*parts)
        return self._gather("hidden_PD", rows_P).to(self._dtype), self.ahead_PJ[rows_P], soft

    def soft_hidden(self, rows_P: Tensor) -> SoftHidden:
        rows_PK = targets_of(rows_P, self.ahead_PJ)
        names = ["hidden_PD", *(name for name in OTHERS if name in self._shards[0])]
        hidden, *others = (
            self._gather(name, rows_PK.flatten()).unflatten(0, rows_PK.shape) for name in names
        )
        if not others:
            return SoftHidden(hidden.to(self._dtype))
        return SoftHidden(hidden.to(self._dtype), others[0][..., 0], others[1].to(self._dtype))

    def _gather(self, name: str, rows_P: Tensor) -> Tensor:
        first = self._shards[0][name]
        result = torch.empty(len(rows_P), first.shape[1], dtype=first.dtype)
        shard_P, row_P = self._shard_P[rows_P], self._row_P[rows_P]
        for index in shard_P.unique().tolist():
            chosen_P = shard_P == index
            result[chosen_P] = self._shards[index][name][row_P[chosen_P]]
        return result


def cached_positions(
    base: BaseModel, items: Sequence[HeadTargets], recipe: TrainRecipe, options: FeatureOptions
) -> CachedPositions:
    """The cache of the recipe; missing rows are added first.

    Raises IncompatibleBaseError (a cache of another base, tokenizer or format), MedusaKitError
    (the disk is too small).
    """
    open_cache(base, recipe, options)
    folder = cache_folder(recipe)
    if distributed.is_main():
        remove_unfinished(folder)
    missing = {row_digest(item): item for item in items}
    identity = _identity(base, recipe, options)
    check_shards(
        folder, missing.keys(), lambda made_with: _in_words(_different(made_with, identity))
    )
    distributed.barrier()
    known, _ = read_shards(folder, _tensors(options))
    missing = {digest: item for digest, item in missing.items() if digest not in known}
    _quote(base, items, list(missing.values()), recipe, options)
    distributed.barrier()  # all processes have looked before one writes
    if missing:
        _fill(base, folder, list(missing.values()), identity, options)
    distributed.barrier()
    if distributed.is_main():
        _write_index(folder, identity)
    return CachedPositions(folder, items, base.dtype, options)


def open_cache(base: BaseModel, recipe: TrainRecipe, options: FeatureOptions) -> None:
    """Make the recipe's cache where there is none, before anything is computed.

    Raises IncompatibleBaseError for a cache that was made differently.
    """
    if distributed.is_main():
        _open(cache_folder(recipe), _identity(base, recipe, options))
    distributed.barrier()


def cache_folder(recipe: TrainRecipe) -> Path:
    return expanded(recipe.train.cache_dir or Path(recipe.output_dir) / "features")


def check_cache(recipe: TrainRecipe) -> None:
    """Raises ConfigError, before anything is loaded, where there can be no cache: something else
    lies there, or nothing can be written."""
    folder = cache_folder(recipe)
    check_folder(folder, "train.cache_dir")
    path = folder / INDEX
    index = json_object(path)
    if index is not None and index.keys().isdisjoint((BASE, "shards")):
        raise ConfigError(
            f"{path} is not that of a feature cache, and would be replaced",
            hint="choose another train.cache_dir",
        )


def row_digest(item: HeadTargets) -> str:
    digest = hashlib.sha256(np.asarray(item.input_ids, dtype=np.int32).tobytes())
    digest.update(np.asarray(item.positions_P, dtype=np.int64).tobytes())
    return digest.hexdigest()[:32]


def _tensors(options: FeatureOptions) -> list[str]:
    """The names of a shard's tensors."""
    likeliest = ["likeliest_PS", "chances_PS"] if options.soft_top else []
    return ["hidden_PD", *likeliest, *(OTHERS if options.runners_up else ())]


def _identity(base: BaseModel, recipe: TrainRecipe, options: FeatureOptions) -> dict[str, Any]:
    tokenizer = base.tokenizer.get_vocab() if base.tokenizer is not None else {}
    vocabulary = json.dumps(sorted(tokenizer.items(), key=lambda pair: pair[1])).encode()
    return {
        **base.origin,
        BASE: Fingerprint.parse(base.info.fingerprint).of_weights,
        "tokenizer": hashlib.sha256(vocabulary).hexdigest()[:16],
        "hidden_size": base.info.hidden_size,
        "dtype": recipe.train.cache_dtype,
        BASE_DTYPE: base.info.dtype,
        "likeliest": options.soft_top,
        WHOLE_ROWS: False,
        RUNNERS_UP: options.runners_up,
        ACTIVATIONS: base.text_activations,
    }


def _open(folder: Path, identity: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / INDEX
    if not shard_files(folder):  # of a run that has kept nothing
        _write_index(folder, identity)
        return
    if not path.is_file():  # shards say themselves what they are of
        return
    try:
        stored = parse_json(path.read_text())
        if unknown := [name for name in (BASE_DTYPE, CONFIG) if stored.get(name) is None]:
            tell_unknown(path, unknown)
            stored |= {name: identity[name] for name in unknown}
            write_json(path, stored)  # it is opened more than once in a run, and told of once
    except (ValueError, TypeError, OSError) as error:
        raise IncompatibleBaseError(
            f"{path} cannot be read: {error}", hint="remove the folder, or choose another cache_dir"
        ) from error
    different = _different(stored, identity)
    outdated = _outdated(stored, identity)
    if different and different.keys() <= outdated.keys():
        why = " and ".join(outdated[key] for key in different)
        console.note(f"the feature cache in {folder} {why}: its hidden states are computed again")
        _remove_shards(folder)
        _write_index(folder, identity)
    elif different:
        raise IncompatibleBaseError(
            f"the feature cache in {folder} was made differently: {_in_words(different)} "
            "(this run ≠ cache)",
            hint=OTHER_PLACE,
        )


def _different(
    stored: Mapping[str, Any], identity: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """(here, there) by the name of each part in which an index or a shard is of something else."""
    stored = {**UNSAID, **stored}
    different = {
        key: (value, stored.get(key)) for key, value in identity.items() if stored.get(key) != value
    }
    config = compare_origins({CONFIG: stored.get(CONFIG)}, {CONFIG: identity[CONFIG]})
    if not config.unknown:  # else it is told as missing
        different.pop(CONFIG, None)
    return different | {key: (here, there) for key, (there, here) in config.other.items()}


def _in_words(different: Mapping[str, tuple[Any, Any]]) -> str:
    return "; ".join(f"{key} {here!r} ≠ {there!r}" for key, (here, there) in different.items())


def _outdated(stored: dict[str, Any], identity: dict[str, Any]) -> dict[str, str]:
    """What may differ because the cache is an old one, each with the reason in words."""
    reasons = {
        ENCODING: "was made with another tokenizer or chat template, or does not say with which",
        WHOLE_ROWS: "was made for prefix-layer heads, which were removed",
    }
    if compare(stored.get(BASE), identity[BASE]) is Match.OLD:
        reasons[BASE] = (
            "has an old fingerprint of its base, which does not show whether it is this base's"
        )
    return reasons


def _remove_shards(folder: Path) -> None:
    for path in shard_files(folder):
        path.unlink(missing_ok=True)


def _write_index(folder: Path, identity: dict[str, Any]) -> None:
    shards = [{"file": path.name, "bytes": path.stat().st_size} for path in shard_files(folder)]
    write_json(folder / INDEX, {**identity, "shards": shards})


def _quote(
    base: BaseModel,
    items: Sequence[HeadTargets],
    missing: Sequence[HeadTargets],
    recipe: TrainRecipe,
    options: FeatureOptions,
) -> None:
    """Print what it will take; refuse before anything is computed if the disk is too small."""
    folder = cache_folder(recipe)
    state = base.info.hidden_size * DTYPES[recipe.train.cache_dtype].itemsize
    each = options.states * state + 8 * options.soft_top
    new = sum(len(item.positions_P) for item in missing)
    total = sum(len(item.positions_P) for item in items)
    free = shutil.disk_usage(folder).free
    console.note(
        f"hidden states on disk: {new:,} of {total:,} training tokens are missing, "
        f"{new * each / 1e9:.3f} GB into {folder} ({free / 1e9:.1f} GB free)"
    )
    if new * each + SPARE_BYTES > free:
        raise MedusaKitError(
            f"{folder} has {free / 1e9:.1f} GB free; the hidden states need {new * each / 1e9:.1f}",
            hint="name a larger disk with train.cache_dir, train on fewer rows (data.limit), or "
            "use train.features=live",
        )


def _fill(
    base: BaseModel,
    folder: Path,
    missing: Sequence[HeadTargets],
    identity: Mapping[str, Any],
    options: FeatureOptions,
) -> None:
    """Compute this process's share of the missing rows, shard by shard."""
    dtype = DTYPES[identity["dtype"]]
    own_rows = by_length(missing)[distributed.rank() :: distributed.world()]
    total = sum(len(item.positions_P) for item in own_rows)
    pending: list[tuple[HeadTargets, Positions]] = []
    size, began = 0, time.monotonic()
    with console.progress("hidden states", total, unit="tok") as bar:
        for item, positions in _rows(base, own_rows, options):
            _check_fit(positions, dtype)
            hidden_PD, others_PD = positions.hidden_PD.to(dtype), positions.others_PD.to(dtype)
            pending.append((item, positions._replace(hidden_PD=hidden_PD, others_PD=others_PD)))
            size += hidden_PD.nbytes + others_PD.nbytes
            bar.advance(len(item.positions_P))
            if size >= SHARD_BYTES or time.monotonic() - began >= SHARD_SECONDS:
                _write(folder, pending, identity)
                pending, size, began = [], 0, time.monotonic()
        if pending:
            _write(folder, pending, identity)


def _check_fit(positions: Positions, dtype: torch.dtype) -> None:
    """Raises NotFiniteError where finite numbers would be infinite on disk."""
    named = (("a hidden state", positions.hidden_PD), ("a runner-up", positions.others_PD))
    if (found := overflown(named, dtype)) is not None:
        raise NotFiniteError(
            f"hidden states cannot be kept on disk: {found}",
            hint="set train.cache_dtype to a wider one, such as bfloat16",
        )


def _rows(
    base: BaseModel, items: Sequence[HeadTargets], options: FeatureOptions
) -> Iterator[tuple[HeadTargets, Positions]]:
    for group in batches(items, options.batch_tokens, options.packing):
        positions = run(base, group, options)
        done = 0
        for item in group:
            size = len(item.positions_P)
            yield item, Positions(*(part[done : done + size].cpu() for part in positions))
            done += size


def _write(
    folder: Path, pending: Sequence[tuple[HeadTargets, Positions]], identity: Mapping[str, Any]
) -> None:
    whole = Positions.joined([positions for _, positions in pending])
    tensors = {"hidden_PD": whole.hidden_PD.contiguous()}
    if whole.likeliest_PS.shape[1]:
        tensors |= {"likeliest_PS": whole.likeliest_PS, "chances_PS": whole.chances_PS}
    if whole.others_P1.shape[1]:
        tensors |= {name: getattr(whole, name).contiguous() for name in OTHERS}
    rows = [(row_digest(item), len(item.positions_P)) for item, _ in pending]
    write_shard(folder, rows, tensors, identity)
