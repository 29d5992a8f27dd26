"""The mask of a tree step against the rule written as loops over single slots."""

import pytest
import torch
from support.attention_inputs import inputs_of

from medusa_kit.infer.attention.step import Chunk, TreeStep, Window, attach_holder, current_step
from medusa_kit.infer.outputs import NodeScores

CPU = torch.device("cpu")
PARENTS = (-1, 0, 0, 1, 2, 2, 3)
OTHER = (-1, 0, 1, 2, 3, 0, 5)


def make_step(lengths: list[int], trees: list[tuple[int, ...]]) -> TreeStep:
    return TreeStep(lengths, *inputs_of(trees))


def path_to(node: int, parents: tuple[int, ...]) -> list[int]:
    return ([] if node == 0 else path_to(parents[node], parents)) + [node]


def expected_mask(lengths: list[int], trees: list[tuple[int, ...]], window: Window) -> torch.Tensor:
    """Row by row, slot by slot: a slot holds a token at a position; ancestors only, window last."""

    def sees(own: int, position: int) -> bool:
        if isinstance(window, Chunk):
            return own // window.size == position // window.size
        return window is None or own - position < window

    N = len(trees[0])
    mask = torch.zeros(len(lengths), N, max(lengths) + N, dtype=torch.bool)
    for row, (length, parents) in enumerate(zip(lengths, trees, strict=True)):
        for node in range(N):
            path = path_to(node, parents)
            position_of = {slot: slot for slot in range(length)}
            position_of |= {length + n: length + depth for depth, n in enumerate(path)}
            own = length + len(path) - 1
            for slot, position in position_of.items():
                mask[row, node, slot] = sees(own, position)
    return mask


CHUNKS = [Chunk(size) for size in (1, 2, 3, 5, 8, 11, 1000)]


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 8, 11, 1000, *CHUNKS])
def test_mask_is_the_rule_for_rows_of_different_length_and_tree(window: Window) -> None:
    lengths, trees = [9, 4, 0], [PARENTS, OTHER, PARENTS]
    mask = make_step(lengths, trees).mask(window)
    assert mask.shape == (3, 1, 7, 16)
    assert torch.equal(mask[:, 0], expected_mask(lengths, trees, window))


def test_repeats_lie_one_after_the_other() -> None:
    step = make_step([3, 2], [PARENTS, OTHER])
    assert torch.equal(step.mask(4, repeats=3), torch.cat([step.mask(4)] * 3, dim=2))


def test_a_mask_is_built_once_and_never_shared_by_two_windows() -> None:
    step = make_step([9], [PARENTS])
    assert step.mask(3) is step.mask(3)
    assert not torch.equal(step.mask(3), step.mask(None))
    assert not torch.equal(step.mask(3), step.mask(Chunk(3)))
    assert step.mask(500) is step.mask(None)  # such a window hides nothing


def test_sees_all_only_where_every_slot_is_seen() -> None:
    one = (-1,)
    for lengths, trees, window in [
        ([5, 5], [one, one], None),
        ([5, 5], [one, one], 6),
        ([5, 5], [one, one], 5),
        ([5, 4], [one, one], None),
        ([5], [PARENTS], None),
    ]:
        whole = bool(expected_mask(lengths, trees, window).all())
        assert make_step(lengths, trees).sees_all(window) is whole


def test_every_module_of_a_model_finds_the_step_and_strangers_find_none() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))
    holder = attach_holder(model)
    holder.step = make_step([1], [PARENTS])
    assert all(current_step(module) is holder.step for module in model.modules())
    assert current_step(torch.nn.Linear(2, 2)) is None
    assert (
        attach_holder(model) is holder
    )  # a second verifier on one model must not cut off the first


def test_near_ties_of_ranked_tokens_are_those_of_all_logits() -> None:
    torch.manual_seed(0)
    logits_NV = torch.randn(64, 40)
    logits_NV[3, 7] = logits_NV[3].max()  # two equal ones
    scores = NodeScores(logits_NV, logits_NV, logits_NV.topk(8).indices)
    whole = NodeScores(logits_NV, logits_NV)
    for tolerance in (1e-6, 0.3, 10.0):
        expected = whole.near_ties(tolerance).tolist()
        assert scores.ranked_near_ties(tolerance) == expected
    assert scores.ranked_near_ties(1e-6)[3] == 1
    assert 1 < sum(scores.ranked_near_ties(0.3)) < 64
    assert scores.ranked_near_ties(None) is None
