"""Results of steps for drafters to observe, without a model."""

from collections.abc import Sequence
from typing import Any

import torch

from medusa_kit.infer.decode.accept.scored_tree import ScoredTree
from medusa_kit.infer.decode.drafter import StepResult
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.outputs import NodeScores

EMPTY = torch.empty(0, 0)


def result_of(
    draft: Forest,
    paths: Sequence[list[int]],
    next_roots: Sequence[int],
    requests: Sequence[Any] = (),
    logits: Sequence[torch.Tensor] | torch.Tensor | None = None,
    argmax: Sequence[list[int]] | None = None,
    timing: Any = None,
) -> StepResult:
    """What became of a draft: of each request the accepted nodes, and the token that follows."""
    trees = list[ScoredTree]()
    for row, (tokens, shape) in enumerate(zip(draft.token_lists(), draft.shapes, strict=True)):
        scores = NodeScores(EMPTY, EMPTY if logits is None else logits[row])
        tree = ScoredTree(tokens, shape.parents, scores)
        tree.argmax = None if argmax is None else argmax[row]
        tree.path, tree.next_root = paths[row], next_roots[row]
        trees.append(tree)
    return StepResult(draft, trees, requests, timing)
