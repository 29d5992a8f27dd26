"""A verifier whose forwards over trees are captured and replayed, over the batch's own KV cache.

Everything that decodes goes through `score`, so greedy and sampled requests, all drafters,
grammars and draft models run captured. What fits no captured forward runs as in the base class:
prompts, more nodes than MAX_NODES, the last tokens before the cache's end.

Shapes: B rows of the cache, T nodes, D hidden, V vocabulary.
"""

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Self

import torch
from torch import Tensor

from medusa_kit import console
from medusa_kit.base.model import BaseModel
from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.infer.attention.choice import AttentionChoice
from medusa_kit.infer.attention.step import TreeStep
from medusa_kit.infer.device.cache import FixedCache
from medusa_kit.infer.device.capture import GraphMemory, can_capture
from medusa_kit.infer.device.captured import (
    MAX_NODES,
    ROW_GROWTH,
    CapturedForward,
    Shape,
    fills_rows,
    fitting,
    power_of_two,
)
from medusa_kit.infer.device.compiled import check_compiled
from medusa_kit.infer.device.exact_prompts import read_as_nodes
from medusa_kit.infer.device.fused_forward import FusedForward
from medusa_kit.infer.device.fused_step import FusedStep, ancestors_in_place, checked_fused
from medusa_kit.infer.device.guard import NoHostReads
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.memory import cache_bytes_per_token
from medusa_kit.infer.outputs import NodeScores, Outputs, TextStates
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.infer.verifier import Forward, Verifier
from medusa_kit.no_gradients import no_gradients

MIN_IN_SIGHT = 256
# Enough tokens of a prompt in one forward that the device takes longer than the host, which needs
# some 30 ms for the operations of an 8B model: 512 take an H100 about 12 ms by arithmetic.
PREFILL_CHUNK = 2048
SLOTS_MULTIPLE = 64
SHARE_OF_CACHE = 0.6  # of the free memory: activations and others need some too
AGAIN_AFTER = 64  # steps until a capture that has failed is tried again, doubled each time
ROW_SIZES = (1, 4, 16, 64)  # of a row, padded: forwards for such trees are captured beforehand


class CapturedVerifier(Verifier):
    """`compiled` makes the forward to use in place of the model's, a new one for each shape.
    `guarded`: a forward that reads a value on the host raises HostRead; for the self-check."""

    captures = True

    def __init__(
        self,
        base: BaseModel,
        attention: AttentionChoice,
        compiled: Callable[[], Forward] | None = None,
        guarded: bool = False,
    ) -> None:
        how = "torch" if compiled is None else "torch.compile"
        on_cuda = can_capture(base.device)
        graph = " in a CUDA graph" if on_cuda else ""
        self._how = f"{how}, fixed shapes{graph}"
        super().__init__(base, attention, self._how)
        self._compiled, self._guarded = compiled, guarded
        # A guard looks at each operation as it is called.
        self._memory = GraphMemory(base.device) if on_cuda and not guarded else None
        self._caches: weakref.WeakSet[FixedCache] = weakref.WeakSet()
        self.refused: str | None = None  # why the newest capture failed, if it did
        self.num_captured = self.num_loose = 0  # forwards over trees: captured, and not
        self._wait, self._patience = 0, AGAIN_AFTER
        self._warned = False  # of steps with too many nodes
        self.fused: FusedForward | None = None  # where forwards run by the fused kernels
        self._mode: str | None = None  # in which they were asked for

    def new_cache(self, batch_size: int, num_positions: int) -> TreeCache:
        context = self.base.info.context_length
        max_slots = -(-(context + SLOTS_MULTIPLE - 1) // SLOTS_MULTIPLE) * SLOTS_MULTIPLE
        cache = FixedCache(self.num_layers, batch_size, num_positions, max_slots)
        with self.lock():
            self._caches.add(cache)
        return cache

    def prompt_chunk(self, num_rows: int) -> int:
        return PREFILL_CHUNK if self.base.device.type == "cuda" else super().prompt_chunk(num_rows)

    def _watcher(self, layers: tuple[int, ...]) -> Self:
        """A copy that watches these layers, not compiled: compiled code takes no hooks."""
        verifier = super()._watcher(layers)
        if verifier._compiled is not None:
            verifier._compiled = None
            verifier._how = verifier.steps_run_by = self._how.replace("torch.compile", "torch")
        verifier.fused = verifier._mode = None  # which run no hooks either
        return verifier

    def fuse(self, mode: str | None) -> None:
        """Run forwards by the fused kernels (FAST, EXACT) where the model has a description and
        they pass a check; else, and for None, as torch runs the model."""
        self._mode, self.fused = mode, None
        if mode is not None and self._compiled is None:
            self.fused, rounding = checked_fused(self, mode)
            self.rounding_tolerance = max(self.rounding_tolerance, rounding)

    def renew(self) -> None:
        super().renew()
        self.fuse(self._mode)

    def positions_of_tree(self, num_nodes: int) -> int:
        """The size that a tree is padded to; larger trees are not captured, so not padded."""
        return fitting([num_nodes])[1] if num_nodes <= MAX_NODES else num_nodes

    def check_record(self) -> None:
        """None: what is captured or compiled is checked each time."""

    @no_gradients
    def score(self, cache: TreeCache, nodes: Forest, rows: Sequence[int]) -> NodeScores:
        shape = self._shape(cache, nodes, rows)
        if shape is not None:
            with self.lock():  # graphs share their memory: what one computed is read before another
                if self._memory is not None:
                    self._memory.take_turn()
                captured = self._forward_of(cache, shape, nodes, rows)
                if captured is not None:
                    self.num_captured += 1
                    written = range(len(cache.lengths)) if fills_rows(self, cache) else rows
                    cache.reach(written, [shape.row_nodes] * len(written))
                    return captured.replay(sum(nodes.counts))
        else:
            self._name_steps(self._why_loose(nodes))
        self.num_loose += 1
        return super().score(cache, nodes, rows)

    @no_gradients
    def read_prompts(
        self,
        cache: TreeCache,
        rows: Sequence[int],
        pieces: Sequence[Sequence[int]],
        seen: dict[int, TextStates] | None = None,
    ) -> tuple[Tensor, Tensor]:
        if self.fused is not None and self.fused.exact:
            return read_as_nodes(self, cache, rows, pieces, seen)
        return super().read_prompts(cache, rows, pieces, seen)

    def run_step(
        self, forward: Forward, cache: TreeCache, step: TreeStep, tokens_BN: Tensor
    ) -> Outputs:
        """A forward of fixed shapes, captured or not."""
        with self._guard():
            return self._run_model(forward, cache, step, tokens_BN)

    def make_room(self) -> bool:
        """Free the memory of captured forwards; whether there were any."""
        with self.lock():
            caches = [cache for cache in self._caches if cache.forwards]
            for cache in caches:
                cache.forwards.clear()
        gc.collect()  # what a failed call left behind may hold tensors
        if self.base.device.type == "cuda":
            torch.cuda.empty_cache()
        return bool(caches)

    def positions_for(self, num_rows: int) -> int:
        """Slots of each row in a batch for any number of requests: as many as memory has room for
        and the context can fill, and no more once the cache has rounded them up."""
        if self.base.device.type != "cuda":
            return 0
        free, _ = torch.cuda.mem_get_info(self.base.device)
        per_slot = num_rows * cache_bytes_per_token(self.base, self.num_layers)
        max_positions = self.base.info.context_length + ROW_SIZES[-1]
        fit = int(SHARE_OF_CACHE * free) // max(per_slot, 1)
        return max_positions if fit >= max_positions else 1 << max(fit.bit_length() - 1, 0)

    @no_gradients
    def prepare(self, cache: TreeCache, num_rows: int) -> None:
        """Capture the forwards that requests will need, over a cache that holds nothing."""
        steps = usual_steps(num_rows)
        with console.progress("capturing forwards", len(steps), "shapes") as bar:
            for counts in steps:
                nodes = Forest.chains([[0] * count for count in counts], self.base.device)
                with suppress(torch.OutOfMemoryError):  # smaller ones may fit
                    self.score(cache, nodes, range(len(counts)))
                self._wait = 0
                bar.advance()

    def _shape(self, cache: TreeCache, nodes: Forest, rows: Sequence[int]) -> Shape | None:
        """The shape that these nodes need; None for what is not captured."""
        if not isinstance(cache, FixedCache) or sum(nodes.counts) > MAX_NODES:
            return None
        num_nodes, row_nodes = fitting(nodes.counts, len(cache.lengths))
        if self.fused is not None:  # which pads no row and rounds as the model's weights say
            ends = [cache.lengths[row] + n for row, n in zip(rows, nodes.counts, strict=True)]
            fits = max(ends) <= cache.num_positions and ancestors_in_place(nodes.shapes)
            rounds = torch.is_autocast_enabled(self.base.device.type)
            return Shape(num_nodes, row_nodes, cache.num_positions) if fits and not rounds else None
        filled = fills_rows(self, cache)
        writing = cache.lengths if filled else [cache.lengths[row] for row in rows]
        reached = max(writing) + row_nodes
        if reached > cache.num_positions:
            return None
        in_sight = cache.num_positions
        if self.own_attention is not None or self.attention.masks:  # it reads all that are in sight
            in_sight = min(max(MIN_IN_SIGHT, power_of_two(reached)), in_sight)
        return Shape(num_nodes, row_nodes, in_sight)

    def _why_loose(self, nodes: Forest) -> str:
        """Why no forward is captured for these nodes; a warning the first time that it matters."""
        if self.fused is not None and not ancestors_in_place(nodes.shapes):
            return "a tree too deep for the fused kernels"
        if self.fused is not None and torch.is_autocast_enabled(self.base.device.type):
            return "under autocast"
        if sum(nodes.counts) <= MAX_NODES:
            return "no room for padded trees behind the text"
        reason = f"more than {MAX_NODES} nodes in a step"
        if not self._warned:
            self._warned = True
            console.warn(f"steps run one kernel after another: {sum(nodes.counts)} nodes, {reason}")
        return reason

    def _forward_of(
        self, cache: TreeCache, shape: Shape, nodes: Forest, rows: Sequence[int]
    ) -> CapturedForward | None:
        """The forward of this shape over this cache, which these nodes were sent to. It is captured
        now if it is the first one; None where that fails."""
        assert isinstance(cache, FixedCache)
        if (known := cache.forwards.get(shape)) is not None:
            known.send(nodes, rows)
            self._name_steps(None)
            return known
        if self._wait:
            self._wait -= 1
            self._name_steps(self.refused)
            return None
        try:
            captured = self._new_forward(cache, shape, nodes, rows)
        except (RuntimeError, IncompatibleBaseError) as error:  # the model itself ran at load
            if self._guarded:
                raise
            error.__traceback__ = None  # its frames hold tensors
            self._wait, self._patience = self._patience, 2 * self._patience
            self._report(str(error).splitlines()[0])
            return None
        self._report(None)
        self._patience = AGAIN_AFTER
        cache.forwards[shape] = captured
        return captured

    def _new_forward(
        self, cache: FixedCache, shape: Shape, nodes: Forest, rows: Sequence[int]
    ) -> CapturedForward:
        forward = self._compiled() if self._compiled else self.base.hidden_and_logits
        captured = (
            CapturedForward(self, cache, shape, forward)
            if self.fused is None
            else FusedStep(self, cache, shape, self.fused)
        )
        captured.send(nodes, rows)
        if self._compiled:
            rounding = check_compiled(captured, forward, self.base)
            self.rounding_tolerance = max(self.rounding_tolerance, rounding)
        if self._memory is not None:
            captured.graph = self._memory.capture(captured.run)
        elif self._guarded:
            captured.run()
        return captured

    def _guard(self) -> AbstractContextManager[object]:
        return NoHostReads() if self._guarded else nullcontext()

    def _report(self, refused: str | None) -> None:
        """Note how the newest capture went, and warn where it failed anew."""
        if refused is not None and refused != self.refused:
            console.warn(f"steps run one kernel after another, since capturing failed: {refused}")
        self.refused = refused
        self._name_steps(refused)

    def _name_steps(self, refused: str | None) -> None:
        by = f"{self._how} ({self.attention.name})"
        if self.fused is not None:
            by = self._how.replace("torch", "fused kernels", 1)
        self.steps_run_by = by if refused is None else f"torch (not captured: {refused})"


def usual_steps(num_rows: int) -> list[list[int]]:
    """Nodes of each row in one step of every shape that up to so many rows with usual trees need.
    Large ones come first, since smaller ones then use their memory."""
    steps = list[list[int]]()
    for size in ROW_SIZES:
        total = max(1, size // ROW_GROWTH * 2)
        while total <= min(MAX_NODES, power_of_two(num_rows * size)):
            nodes = min(total, num_rows * size)
            remainder = [nodes % size] if nodes % size else []
            steps.append([size] * (nodes // size) + remainder)
            total *= 2
    return sorted(steps, key=sum, reverse=True)
