"""Heads that draft in one C++ call, for a base whose steps run in C++.

A draft takes as long as reading its weights, so the heads' own are rounded to eight bits; a
projection of the base's rows has the base's form. What they are multiplied by is rounded to eight
bits, too. Draft tokens may differ, the text does not.

Shapes: X any leading shape, D what heads are given of a row, J tokens of the path, K heads,
C draft tokens, R rows of a call, B batch, N nodes of a tree.
"""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medusa_kit.base.fingerprint import contents_digest
from medusa_kit.errors import Live
from medusa_kit.heads import MedusaHeads
from medusa_kit.heads.draws import RowsDraws, noise_seeds
from medusa_kit.heads.guesser import Guesses, MinLogProbs, Texts
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.decoder import NativeDecoder
from medusa_kit.infer.cpu.packed.heads import COLUMNS, PackedHeads, packed_heads
from medusa_kit.infer.cpu.packed.int8_weights import rounding
from medusa_kit.infer.cpu.packed.packing import PackedMatrix
from medusa_kit.infer.cpu.recurrent import PackedRecurrent
from medusa_kit.locks import SharedLock
from medusa_kit.tree.dynamic import Grown


class NativeHeads(Live):
    """A `Guesser` for frozen heads, with packed copies of their weights."""

    def __init__(
        self, heads: MedusaHeads, decoder: NativeDecoder, folder: Path | None = None
    ) -> None:
        """`folder`: of the heads, whose packed weights are then kept in a file."""
        library = kernels.load_library()
        assert library is not None
        self._library = library
        embedding = decoder.packed.input
        packed = packed_heads(heads, decoder.output, folder)
        num_blocks = heads.config.num_blocks
        shared = PackedRecurrent(packed, num_blocks) if heads.recurrent else None
        blocks = [_blocks(packed, heads, k) for k in range(heads.num_heads)]
        projections = _projections(packed, heads, decoder)
        scale, ids = heads.base.scale_logits, heads.column_ids
        self._alive = [shared, blocks, projections, embedding, ids]  # what the structures point to
        structs = (kernels.Head * heads.num_heads)(
            *(
                kernels.Head(
                    (kernels.Matrix * len(head))(*(rounding(block) for block in head)),
                    len(head), heads.config.num_read(k), rounding(projections[k]),
                )
                for k, head in enumerate(blocks)
            )
        )  # fmt: skip
        shares_projection = len({id(projection) for projection in projections}) == 1
        hidden_size = heads.config.hidden_size
        self._struct = kernels.Heads(
            hidden_size, decoder.packed.embedding_size, shares_projection,
            scale.factor / scale.divisor, scale.cap or 0.0, structs,
            embedding.struct, 0 if ids is None else ids.data_ptr(),
            ctypes.pointer(shared.struct) if shared else None,
        )  # fmt: skip
        matrices = [matrix for head in [*blocks, projections] for matrix in head]
        own = {id(matrix): matrix for matrix in matrices if matrix is not decoder.output}
        self.num_bytes = sum(matrix.num_bytes for matrix in own.values())  # beside the base's
        self.num_bytes += shared.num_bytes if shared else 0
        self._one_pass = heads.one_pass
        self._heat, self._smoothing = lru_cache(_floats), lru_cache(_doubles)
        self._num_read = [heads.config.num_read(k) for k in range(heads.num_heads)]
        self._work = [
            (shared.work if shared else 0)
            + sum(block.struct.outputs * block.struct.inputs for block in [*head, projections[k]])
            for k, head in enumerate(blocks)
        ]

    def __call__(
        self,
        heads: Sequence[int],
        hidden_XD: Tensor,
        path_XJ: Tensor | None,
        count: int,
        temperatures: Sequence[float] | None = None,
    ) -> Guesses | None:
        """Guesses_KXC of these heads, in rising order; None for more rows than the kernels take."""
        K, shape = len(heads), hidden_XD.shape[:-1]
        rows = hidden_XD[..., 0].numel()
        longest = max(self._num_read[k] for k in heads)
        if K * rows > kernels.MAX_ROWS or hidden_XD.dtype != torch.float32:
            return None
        hidden_RD = hidden_XD.contiguous()
        head_R = torch.tensor([k for k in heads for _ in range(rows)])
        given_R = torch.arange(rows).repeat(K)
        path_RJ = torch.empty(K * rows, 0, dtype=torch.int64)
        if longest:
            assert path_XJ is not None
            path_RJ = path_XJ[..., :longest].expand(K, *shape, longest).contiguous()
        ids_KXC = torch.empty(K, *shape, count, dtype=torch.int64)
        scores_KXC = torch.empty(0 if temperatures is None else ids_KXC.shape, dtype=torch.float32)
        heat_R = _floats([t for t in temperatures or () for _ in range(rows)])
        guess = kernels.Guess(
            K * rows, longest, count, head_R.data_ptr(), path_RJ.data_ptr(), given_R.data_ptr(),
            hidden_RD.data_ptr(), 0 if temperatures is None else heat_R.data_ptr(),
            ids_KXC.data_ptr(), scores_KXC.data_ptr(),
        )  # fmt: skip
        threads = kernels.threads_for(rows * sum(self._work[k] for k in heads))
        self._library.mk_guess(ctypes.byref(self._struct), ctypes.byref(guess), threads)
        return ids_KXC, scores_KXC

    def fill(
        self,
        hidden_BD: Tensor,
        roots_B: Sequence[int],
        parents_N: Tensor,
        ranks_N: Tensor,
        draws: RowsDraws | None = None,
    ) -> Tensor | None:
        """tokens_BN of a given tree; None where a depth has more rows than the kernels take."""
        B, N = len(roots_B), len(parents_N)
        if not self._takes(hidden_BD, B * N):
            return None
        roots, hidden_BD = torch.tensor(roots_B), hidden_BD.contiguous()
        tokens_BN = torch.empty(B, N, dtype=torch.int64)
        fill = kernels.Fill(
            B, N, self._one_pass, parents_N.data_ptr(), ranks_N.data_ptr(),
            roots.data_ptr(), hidden_BD.data_ptr(), tokens_BN.data_ptr(),
            *_draws(draws, len(self._num_read)),
        )  # fmt: skip
        self._library.mk_fill(ctypes.byref(self._struct), ctypes.byref(fill), self._threads(B))
        return tokens_BN

    def grow(
        self,
        hidden_BD: Tensor,
        roots_B: Sequence[int],
        num_nodes: int,
        temperatures: tuple[float, ...],
        count: int,
        beam: int,
        least: MinLogProbs,
        draws: RowsDraws | None = None,
        texts: Texts = (),
        smoothing: tuple[float, ...] = (),
    ) -> list[Grown] | None:
        """The trees of drafters/heads/dynamic.py; None for more rows than the kernels take."""
        B, N = len(roots_B), num_nodes
        if not self._takes(hidden_BD, B * (len(temperatures) if self._one_pass else beam)):
            return None
        roots, hidden_BD = (ctypes.c_int64 * B)(*roots_B), hidden_BD.contiguous()
        heat_K, smoothing_L = self._heat(temperatures), self._smoothing(smoothing)
        tokens_BN, parents_BN = (torch.empty(B, N, dtype=torch.int64) for _ in range(2))
        counts_B, scores_BN = (
            torch.empty(B, dtype=torch.int64),
            torch.empty(B, N, dtype=torch.float32),
        )
        grow = kernels.Grow(
            B, N, self._one_pass, len(temperatures), count, beam, ctypes.addressof(roots),
            hidden_BD.data_ptr(), heat_K.data_ptr(), counts_B.data_ptr(), tokens_BN.data_ptr(),
            parents_BN.data_ptr(), scores_BN.data_ptr(), *least,
            *_draws(draws, len(temperatures)), _texts(texts),
            smoothing_L.data_ptr(), len(smoothing),
        )  # fmt: skip
        self._library.mk_grow(ctypes.byref(self._struct), ctypes.byref(grow), self._threads(B))
        parts = (counts_B, tokens_BN, parents_BN, scores_BN)
        rows = zip(*(part.tolist() for part in parts), strict=True)
        return [
            (tokens[:count], parents[:count], scores[:count])
            for count, tokens, parents, scores in rows
        ]

    def _takes(self, hidden_BD: Tensor, rows: int) -> bool:
        return rows <= kernels.MAX_ROWS and hidden_BD.dtype == torch.float32

    def _threads(self, rows: int) -> int:
        return kernels.threads_for(rows * self._work[0])


def _draws(draws_B: RowsDraws | None, num_heads: int) -> tuple[Any, int]:
    """(how the tokens that the first heads draft will be drawn, after each row's root; heads)."""
    if draws_B is None:
        return None, 0
    if len(draws_B) == 1 and (alone := draws_B[0]) is not None:  # numpy takes longer for few
        few = [kernels.Draw(temperature=alone.heat, top_p=1.0, seed=alone.noise_seed(k))
               for k in range(num_heads)]  # fmt: skip
        return (kernels.Draw * num_heads)(*few), num_heads
    structs = np.zeros((len(draws_B), num_heads), kernels.Draw)
    drawn = [own for own in draws_B if own is not None]
    rows = [row for row, own in enumerate(draws_B) if own is not None]
    structs["temperature"][rows] = np.array([own.heat for own in drawn])[:, None]
    structs["top_p"][rows] = 1.0
    structs["seed"][rows] = noise_seeds(drawn, range(num_heads)).T
    return (kernels.Draw * structs.size).from_buffer(structs.data), num_heads


def _texts(texts: Texts) -> Any:
    if not texts:
        return None
    structs = [
        kernels.Text() if text_T is None else kernels.Text(text_T.ctypes.data, len(text_T))
        for text_T in texts
    ]
    return (kernels.Text * len(structs))(*structs)


def _floats(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def _doubles(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _blocks(packed: PackedHeads, heads: MedusaHeads, k: int) -> list[PackedMatrix]:
    """The blocks of head k; none where the heads share a network."""
    if heads.recurrent is not None:
        return []
    return [packed.matrices[f"blocks.{k}.{j}"] for j in range(heads.config.num_blocks)]


def _projections(
    packed: PackedHeads, heads: MedusaHeads, decoder: NativeDecoder
) -> list[PackedMatrix]:
    """The projection of each head; the same object several times where heads share it."""
    if heads.config.projection == "own":
        return [packed.matrices[f"projections.{k}"] for k in range(heads.num_heads)]
    shared = heads.config.projection == "shared"
    return [decoder.output if shared else packed.matrices[COLUMNS]] * heads.num_heads


KINDS_IN_CPP = ("medusa", "hydra", "recurrent")


class HeadsAsTheyAre(Live):
    """A `Guesser` that packs heads anew where they, or the base's weights among theirs, are no
    longer those that were packed. `current`: the decoder of the base as it is now; None where
    there is none, and the heads draft through torch."""

    def __init__(
        self,
        heads: MedusaHeads,
        decoder: NativeDecoder,
        folder: Path | None,
        current: Callable[[], NativeDecoder | None],
    ) -> None:
        self._heads, self._current = weakref.ref(heads), current
        self._lock = SharedLock()  # for what follows
        self._digest = _contents(heads)
        self._packed = decoder, NativeHeads(heads, decoder, folder)

    def look(self) -> None:
        """Before an answer begins: whether the heads' weights are those that were packed."""
        with self._lock:
            heads = self._heads()
            if heads is not None and (digest := _contents(heads)) != self._digest:
                decoder, _ = self._packed
                self._packed, self._digest = (decoder, NativeHeads(heads, decoder)), digest

    def _now(self) -> NativeHeads | None:
        packed_for, packed = self._packed
        if (decoder := self._current()) is None or decoder is packed_for:
            return None if decoder is None else packed
        with self._lock:
            heads = self._heads()
            assert heads is not None, "heads that are gone ask nothing"
            self._packed = decoder, NativeHeads(heads, decoder)
            return self._packed[1]

    @property
    def num_bytes(self) -> int:
        return self._packed[1].num_bytes

    def __call__(self, *arguments: Any, **named: Any) -> Guesses | None:
        return None if (packed := self._now()) is None else packed(*arguments, **named)

    def fill(self, *arguments: Any, **named: Any) -> Tensor | None:
        return None if (packed := self._now()) is None else packed.fill(*arguments, **named)

    def grow(self, *arguments: Any, **named: Any) -> list[Grown] | None:
        return None if (packed := self._now()) is None else packed.grow(*arguments, **named)


def _contents(heads: MedusaHeads) -> str:
    return contents_digest([*heads.parameters(), *heads.buffers()])


def install_native_heads(
    heads: MedusaHeads,
    decoder: NativeDecoder,
    folder: Path | None = None,
    current: Callable[[], NativeDecoder | None] | None = None,
) -> None:
    """Let frozen heads draft through the kernels. Heads in training stay with torch, since packed
    copies would go stale, and so do kinds that the kernels do not know: they would draft wrongly
    without a word. `folder`: where they lie, if they are as they lie there. `current`: as in
    HeadsAsTheyAre; by default always `decoder`.
    """
    frozen = not any(parameter.requires_grad for parameter in heads.parameters())
    if frozen and heads.config.kind in KINDS_IN_CPP:
        now = (lambda: decoder) if current is None else current
        heads.guesser = HeadsAsTheyAre(heads, decoder, folder, now)
