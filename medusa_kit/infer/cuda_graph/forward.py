"""The base model's forward over a tree at fixed shapes: lengths are read only on the device.

Shapes: B batch, N nodes with root, S cache slots, D hidden, V vocabulary.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from medusa_kit.base.model import BaseModel
from medusa_kit.infer.attention.choice import AttentionChoice
from medusa_kit.infer.cuda_graph.cache import StaticTreeCache
from medusa_kit.infer.cuda_graph.guard import NoHostReads
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.infer.tree_step import NodeScores, TreeStep, Window, oldest_seen
from medusa_kit.infer.verifier import Forward, Verifier


class StaticTreeStep(TreeStep):
    """A TreeStep whose lengths are known only on the device; every slot of the cache is in sight.

    `lengths` is empty, so code that reads lengths on the host fails.
    """

    def __init__(
        self, lengths_B: Tensor, depths_BN: Tensor, sees_BNN: Tensor, num_slots: int, attend: Any
    ) -> None:
        super().__init__((), depths_BN, sees_BNN, attend=attend, lengths_B=lengths_B)
        self._num_slots = num_slots

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def seq_length(self) -> int:
        return self._num_slots

    def sees_all(self, window: Window) -> bool:
        return False

    def _build_mask(self, window: Window) -> Tensor:
        """mask_BNS: as in the base class, with hidden slots after each row's nodes."""
        N, lengths_B1 = self.num_nodes, self.device_lengths()[:, None]
        slots_S = torch.arange(self.num_slots, device=lengths_B1.device)
        node_BS = slots_S - lengths_B1  # the node that lies in a slot
        in_prefix_B1S = (node_BS < 0)[:, None]
        sees_BNN = self.sees_BNN
        if window is not None:
            positions_BN = self.positions()
            oldest_BN1 = oldest_seen(window, positions_BN)[:, :, None]
            in_prefix_B1S = in_prefix_B1S & (slots_S >= oldest_BN1)
            sees_BNN = sees_BNN & (positions_BN[:, None, :] >= oldest_BN1)
        node_B1S = node_BS.clamp(0, N - 1)[:, None]
        in_tree_BNS = sees_BNN.gather(2, node_B1S.expand(-1, N, -1))
        return in_prefix_B1S | (in_tree_BNS & ((node_BS >= 0) & (node_BS < N))[:, None])


class StaticVerifier(Verifier):
    """A verifier at fixed shapes, which the same self-check can be run on.

    `guarded`: a forward that reads on the host raises HostRead. `compiled`: replaces the model's
    forward for trees, though not for prompts. Both are for the self-check; each step has a compiled
    forward of its own.
    """

    def __init__(
        self,
        base: BaseModel,
        attention: AttentionChoice,
        *,
        guarded: bool = False,
        compiled: Forward | None = None,
    ) -> None:
        super().__init__(base, attention)
        self._guarded, self._compiled = guarded, compiled

    @property
    def pads(self) -> bool:
        return True  # all rows have the same number of nodes; the model's other steps may not

    def pad(self, whether: bool) -> None: ...

    def check_memory(self) -> None:
        """What is guarded or compiled is checked each time."""

    def new_cache(self, batch_size: int, num_slots: int) -> StaticTreeCache:
        return StaticTreeCache(self.num_layers, batch_size, num_slots, self.base.device)

    def _step(
        self, cache: TreeCache, depths_BN: Tensor, sees_BNN: Tensor, causal_prompt: bool
    ) -> StaticTreeStep:
        lengths_B, attend = cache.device_lengths(depths_BN.device), self.attention.attend
        return StaticTreeStep(lengths_B, depths_BN, sees_BNN, cache.num_slots, attend)

    def _scores(
        self,
        cache: TreeCache,
        step: TreeStep,
        tokens_BN: Tensor,
        keep_M: Tensor | None,
        prompt: bool,
    ) -> NodeScores:
        if prompt or self._compiled is None:
            return super()._scores(cache, step, tokens_BN, keep_M, prompt)
        return NodeScores(*self._run_model(self._compiled, cache, step, tokens_BN))

    def score(
        self,
        cache: StaticTreeCache,
        lengths_B: Tensor,
        tokens_BN: Tensor,
        depths_BN: Tensor,
        sees_BNN: Tensor,
        forward: Forward | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(hidden_BND, logits_BNV) of nodes after lengths_B tokens, which are written to the cache.

        `forward`: a compiled one in place of the model's.
        """
        attend = self.attention.attend
        step = StaticTreeStep(lengths_B, depths_BN, sees_BNN, cache.num_slots, attend)
        return self._run_model(forward or self.base.hidden_and_logits, cache, step, tokens_BN)

    def _run_model(
        self,
        forward: Forward,
        cache: TreeCache,
        step: TreeStep,
        tokens_BN: Tensor,
        keep_M: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(cache, StaticTreeCache)
        with NoHostReads() if self._guarded else nullcontext():
            cache.write_after(step.device_lengths(), step.num_nodes)
            return super()._run_model(forward, cache, step, tokens_BN, keep_M)
