"""Which rows stay on one side of a split."""

from medusa_kit.equal_rows import groups_of


def test_a_prompt_that_most_rows_have_ties_none_of_them():
    """The answers that are equal in pairs do, as in data of which one system prompt is most."""
    rows = [("asked by most" if index < 80 else index, index // 2) for index in range(100)]
    groups = groups_of(range(100), [(("prompt", one), ("answer", two)) for one, two in rows])
    assert groups == [[index, index + 1] for index in range(0, 100, 2)]


def test_a_prompt_that_some_rows_have_ties_them():
    parts = [(("prompt", index % 3), ("answer", index)) for index in range(9)]
    assert groups_of(range(9), parts) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
