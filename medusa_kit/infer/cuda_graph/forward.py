"""The base model's forward over a tree at fixed shapes: lengths are read on the device alone.

Shapes: B batch, N nodes with root, S cache slots, D hidden, V vocabulary.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from medusa_kit.infer.cuda_graph.cache import StaticTreeCache
from medusa_kit.infer.cuda_graph.guard import NoHostReads
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.infer.tree_step import NodeScores, TreeStep
from medusa_kit.infer.verifier import Forward, Verifier


class StaticTreeStep(TreeStep):
    """A TreeStep whose lengths_B are a tensor on the device; every slot of the cache is in sight.

    No `lengths` on the host: what asks for them cannot run at fixed shapes.
    """

    def __init__(
        self, lengths_B: Tensor, depths_BN: Tensor, sees_BNN: Tensor, num_slots: int, attend: Any
    ) -> None:
        super().__init__((), depths_BN, sees_BNN, attend=attend, lengths_B=lengths_B)
        self._num_slots = num_slots

    @property
    def num_slots(self) -> int:
        return self._num_slots

    def sees_all(self, window: int | None) -> bool:
        return False

    def _build_mask(self, window: int | None) -> Tensor:
        """mask_BNS, as the base class builds it, with empty slots after each row's nodes."""
        N, lengths_B1 = self.num_nodes, self.device_lengths()[:, None]
        slots_S = torch.arange(self.num_slots, device=lengths_B1.device)
        node_BS = slots_S - lengths_B1  # the node that lies in a slot
        in_prefix_B1S = (node_BS < 0)[:, None]
        sees_BNN = self.sees_BNN
        if window is not None:
            oldest_BN1 = lengths_B1[:, :, None] + self.depths_BN[:, :, None] - window + 1
            in_prefix_B1S = in_prefix_B1S & (slots_S >= oldest_BN1)
            distance_BNN = self.depths_BN[:, :, None] - self.depths_BN[:, None, :]
            sees_BNN = sees_BNN & (distance_BNN < window)
        node_B1S = node_BS.clamp(0, N - 1)[:, None]
        in_tree_BNS = sees_BNN.gather(2, node_B1S.expand(-1, N, -1))
        return in_prefix_B1S | (in_tree_BNS & ((node_BS >= 0) & (node_BS < N))[:, None])


class StaticVerifier(Verifier):
    """A verifier of the same base model whose every forward is one of fixed shapes.

    It takes what `check_trees` asks of a verifier, so that the same self-check holds for it; while
    `guarding`, a forward that reads on the host raises HostRead. `compiled` runs trees, though no
    prompts, in place of the model's forward, in its self-check alone: a step has its own.
    """

    def __init__(self, plain: Verifier) -> None:
        self.base, self._holder = plain.base, plain._holder
        self.attention = plain.attention.for_fixed_shapes()
        self.native, self.guarding = None, False
        self.compiled: Forward | None = None

    def new_cache(self, batch_size: int, num_slots: int) -> StaticTreeCache:
        return StaticTreeCache(self.base.info.num_layers, batch_size, num_slots, self.base.device)

    @torch.inference_mode()
    def forward(
        self,
        cache: TreeCache,
        tokens_BN: Tensor,
        depths_BN: Tensor,
        sees_BNN: Tensor,
        *,
        causal_prompt: bool = False,
        prompt: bool = False,
        keep: Tensor | int = 0,
    ) -> NodeScores:
        assert isinstance(cache, StaticTreeCache)
        lengths_B = torch.tensor(cache.lengths, device=tokens_BN.device)
        own = None if prompt else self.compiled
        hidden_BND, logits_BNV = self.score(cache, lengths_B, tokens_BN, depths_BN, sees_BNN, own)
        if isinstance(keep, int):
            return NodeScores(hidden_BND, logits_BNV)
        return NodeScores(hidden_BND[:, keep], logits_BNV[:, keep])

    def score(
        self,
        cache: StaticTreeCache,
        lengths_B: Tensor,
        tokens_BN: Tensor,
        depths_BN: Tensor,
        sees_BNN: Tensor,
        forward: Forward | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(hidden_BND, logits_BNV) of nodes after lengths_B tokens; they lie in the cache.

        `forward`: the model's, or something compiled that stands for it.
        """
        with NoHostReads() if self.guarding else nullcontext():
            positions_BN = lengths_B[:, None] + depths_BN
            cache.write_after(lengths_B, tokens_BN.shape[1])
            return self.run_model(
                forward or self.base.hidden_and_logits,
                StaticTreeStep(
                    lengths_B, depths_BN, sees_BNN, cache.num_slots, self.attention.attend
                ),
                tokens_BN,
                position_ids=positions_BN.clamp_max(self.base.info.context_length - 1),
                past_key_values=cache,
            )
