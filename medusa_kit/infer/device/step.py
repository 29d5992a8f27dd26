"""The input of a forward of fixed shapes: lengths are read on the device only.

Shapes: B rows of the cache, N nodes of a row at most, S slots in sight.
"""

from typing import Any

import torch
from torch import Tensor

from medusa_kit.infer.attention.step import TreeStep, Window, oldest_seen


class FixedStep(TreeStep):
    """A TreeStep over all rows of a cache, of which some may have no nodes.

    `lengths` is empty, so code that reads lengths on the host fails.
    """

    def __init__(
        self,
        lengths_B: Tensor,
        depths_BN: Tensor,
        sees_BNN: Tensor,
        num_positions: int,
        attend: Any,
    ) -> None:
        super().__init__((), depths_BN, sees_BNN, attend=attend, lengths_B=lengths_B)
        self._num_positions = num_positions

    @property
    def num_positions(self) -> int:
        return self._num_positions

    @property
    def seq_length(self) -> int:
        return self._num_positions

    def sees_all(self, window: Window) -> bool:
        return False

    def _build_mask(self, window: Window) -> Tensor:
        """mask_BNS: as in the base class, with hidden slots after each row's nodes."""
        N, lengths_B1 = self.num_nodes, self.device_lengths()[:, None]
        slots_S = torch.arange(self.num_positions, device=lengths_B1.device)
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
