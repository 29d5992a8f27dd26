"""Trees one after another: as they lie, cut, joined, and padded for what needs that."""

import torch

from medusa_kit.infer.forest import Forest
from medusa_kit.tree.draft_tree import DraftTree

CPU = torch.device("cpu")
TOKENS = [[5, 6, 7, 8], [9], [1, 2]]
PARENTS = [(-1, 0, 0, 1), (-1,), (-1, 0)]


def forest() -> Forest:
    return Forest.of(TOKENS, PARENTS, CPU)


def test_trees_lie_one_after_another() -> None:
    whole = forest()
    assert whole.tokens_N.tolist() == [5, 6, 7, 8, 9, 1, 2]
    assert whole.counts == [4, 1, 2]
    assert whole.token_lists() == TOKENS
    assert whole.depths_N.tolist() == [0, 1, 1, 2, 0, 0, 1]
    sees = [*[1, 0, 0, 0, 1, 1, 0, 0, 1, 0, 1, 0, 1, 1, 0, 1], 1, *[1, 0, 1, 1]]
    assert whole.sees.ravel().tolist() == [bool(one) for one in sees]


def test_parts_are_joined_to_the_whole() -> None:
    whole = forest()
    parts = [whole.of_trees(0, 1), whole.of_trees(1, 3)]
    assert [part.token_lists() for part in parts] == [TOKENS[:1], TOKENS[1:]]
    again = Forest.joined(parts)
    assert again.token_lists() == TOKENS
    assert again.shapes == list(whole.shapes)
    assert Forest.joined([whole]) is whole is whole.of_trees(0, 3)


def test_nodes_that_pad_see_themselves_alone() -> None:
    tokens_BN, depths_BN, sees_BNN = forest().padded()
    assert tokens_BN.tolist() == [[5, 6, 7, 8], [9, 0, 0, 0], [1, 2, 0, 0]]
    assert depths_BN.tolist() == [[0, 1, 1, 2], [0, 0, 0, 0], [0, 1, 0, 0]]
    assert torch.equal(sees_BNN[1], torch.eye(4, dtype=torch.bool))
    assert sees_BNN[2].tolist()[:2] == [[True, False, False, False], [True, True, False, False]]
    assert forest().in_padded().tolist() == [0, 1, 2, 3, 4, 8, 9]
    assert forest().in_padded(last_only=True).tolist() == [3, 4, 9]


def test_what_drafters_return_on_the_host() -> None:
    tree, root = DraftTree(5), DraftTree(9)
    tree.add_chain([6, 8], 0.5)
    tree.add(0, 7, 0.25)
    draft = Forest.of_drafts([tree, root], CPU)
    assert draft.token_lists() == [[5, 6, 8, 7], [9]]
    assert [shape.parents for shape in draft.shapes] == [(-1, 0, 1, 0), (-1,)]
