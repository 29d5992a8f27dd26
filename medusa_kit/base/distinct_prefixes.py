"""Texts that begin alike, computed once where they are alike.

A causal model has the same numbers after equal tokens, so a layer that sees one token at a time
need not compute them again. They are compared first: where they differ, nothing is left out.

Shapes: N tokens of all texts with their padding, U of which are computed, D hidden.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class DistinctPrefixes:
    """`texts`: padded on the right to a common length."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        length = max(map(len, texts))
        numbers = dict[tuple[int, int], int]()  # of a prefix, by that before it and its last token
        first, again, copied_from = [0], list[int](), list[int]()
        back = [0] * (len(texts) * length)  # padding is not read
        for row, text in enumerate(texts):
            prefix = -1
            for place, token in enumerate(text, row * length):
                prefix = numbers.setdefault((prefix, token), len(numbers))
                if prefix == len(first):
                    first.append(place)
                elif first[prefix] != place:
                    again.append(place)
                    copied_from.append(first[prefix])
                back[place] = prefix
        self._first_U, self._back_N = torch.tensor(first), torch.tensor(back)
        self._again, self._copied_from = torch.tensor(again), torch.tensor(copied_from)

    def chosen(self, inputs_ND: Tensor) -> tuple[Tensor, Tensor | None]:
        """(the inputs to compute, which of them each token has); all and None where those that
        should be equal are not."""
        if not len(self._again) or len(inputs_ND) != len(self._back_N):
            return inputs_ND, None
        if not torch.equal(inputs_ND[self._again], inputs_ND[self._copied_from]):
            return inputs_ND, None
        return inputs_ND[self._first_U], self._back_N
