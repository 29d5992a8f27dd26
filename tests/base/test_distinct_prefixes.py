"""Texts that begin alike are computed once where their inputs are alike, and whole where not."""

import torch

from medusa_kit.base.distinct_prefixes import DistinctPrefixes

TEXTS = [[5, 6, 7, 8], [5, 6, 9], [5, 6, 7], [1, 6, 7, 8]]
LENGTH = 4


def inputs() -> torch.Tensor:
    """One row for each prefix; padding has rows of its own."""
    rows, known = list[torch.Tensor](), dict[tuple[int, ...], torch.Tensor]()
    for text in TEXTS:
        for place in range(LENGTH):
            prefix = tuple(text[: place + 1]) if place < len(text) else (-1, len(rows))
            rows.append(known.setdefault(prefix, torch.randn(3)))
    return torch.stack(rows)


def test_each_prefix_is_computed_once() -> None:
    whole_ND = inputs()
    chosen_UD, back_N = DistinctPrefixes(TEXTS).chosen(whole_ND)
    assert len(chosen_UD) == 4 + 1 + 4
    assert back_N is not None
    real = torch.tensor([place < len(text) for text in TEXTS for place in range(LENGTH)])
    assert torch.equal(chosen_UD[back_N][real], whole_ND[real])


def test_where_equal_prefixes_have_other_numbers_all_are_computed() -> None:
    whole_ND = inputs()
    whole_ND[LENGTH + 1, 2] += 1e-6  # the second text's second token
    chosen_ND, back_N = DistinctPrefixes(TEXTS).chosen(whole_ND)
    assert back_N is None
    assert torch.equal(chosen_ND, whole_ND)


def test_inputs_that_are_not_one_for_each_token_are_computed() -> None:
    """As those of an expert, which sees some of them."""
    some_MD = inputs()[:5]
    assert DistinctPrefixes(TEXTS).chosen(some_MD) == (some_MD, None)


def test_texts_without_a_common_beginning_are_computed() -> None:
    alone_ND = torch.randn(3, 2)
    assert DistinctPrefixes([[1, 2, 3]]).chosen(alone_ND) == (alone_ND, None)
