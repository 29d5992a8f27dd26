"""The order of work in a batch, by itself: no model, and a clock that counts tokens and nodes."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_kit.infer.schedule import Schedule

MOST_AT_ONCE = 6  # tokens of prompts in one forward


class Run:
    """Rows of a schedule as a batch serves them: each step reads what is due, then counts a token
    for each row that runs. `arrivals`: by step, the (prompt, answer) lengths of new rows."""

    def __init__(
        self, max_rows: int, budget: int | None, arrivals: Sequence[Sequence[tuple[int, int]]]
    ) -> None:
        self.schedule: Schedule[int] = Schedule(max_rows, budget)
        self.arrivals, self.max_rows = arrivals, max_rows
        self.lengths: list[tuple[int, int]] = []
        self.read: dict[int, int] = {}
        self.said: dict[int, int] = {}
        self.places: dict[int, int] = {}
        self.first_tokens: list[int] = []  # rows in the order in which their prompts were read
        self.most_between = 0  # tokens of prompts read between two tokens of a row

    def step(self, number: int) -> None:
        for prompt, answer in self.arrivals[number] if number < len(self.arrivals) else ():
            self.schedule.add(len(self.lengths), prompt)
            self.lengths.append((prompt, answer))
        for key, place in self.schedule.admit(lambda key, free: (min(free), 0)):
            assert place not in self.places.values(), "two rows in one place"
            self.places[key] = place
            self.read[key] = 0
        assert len(self.places) <= self.max_rows
        running, between = list(self.said), 0
        left = self.schedule.prompt_budget if running else None
        while left is None or left > 0:
            most = MOST_AT_ONCE if left is None else min(MOST_AT_ONCE, left)
            pieces = self.schedule.pieces(most)
            if not pieces:
                break
            size = sum(piece.end - piece.start for piece in pieces)
            assert 0 < size <= most
            left = None if left is None else left - size
            between += size
            for piece in pieces:
                assert piece.start == self.read[piece.key], "a piece was left out"
                assert piece.place == self.places[piece.key]
                self.read[piece.key] = piece.end
                assert piece.is_last == (piece.end == self.lengths[piece.key][0])
                if piece.is_last:
                    self.schedule.begin(piece.key)
                    self.said[piece.key] = 0
                    self.first_tokens.append(piece.key)
        if running:
            self.most_between = max(self.most_between, between)
        for key in list(self.said):
            self.said[key] += 1
            if self.said[key] == self.lengths[key][1]:
                self.leave(key)

    def leave(self, key: int) -> None:
        self.schedule.leave(key)
        self.said.pop(key, None)
        self.places.pop(key, None)


ROWS = st.lists(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), max_size=4), min_size=1, max_size=8
)


@given(max_rows=st.integers(1, 5), budget=st.none() | st.integers(1, 8), arrivals=ROWS)
def test_every_row_is_served_in_order_within_the_budget(
    max_rows: int, budget: int | None, arrivals: list[list[tuple[int, int]]]
) -> None:
    run, steps = Run(max_rows, budget, arrivals), 0
    while steps < len(arrivals) or run.schedule.num_rows:
        run.step(steps)
        steps += 1
        assert steps < 2000, "somebody starves"
    assert run.first_tokens == list(range(len(run.lengths)))  # first come, first served
    assert not run.places
    assert budget is None or run.most_between <= budget
    assert sorted(run.schedule._free) == list(range(max_rows))  # no place is lost


@given(
    arrivals=ROWS,
    gone=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 20)), max_size=8),
)
def test_rows_may_leave_from_anywhere(
    arrivals: list[list[tuple[int, int]]], gone: list[tuple[int, int]]
) -> None:
    run, steps = Run(2, 3, arrivals), 0
    while steps < len(arrivals) or run.schedule.num_rows:
        run.step(steps)
        for step, key in gone:
            if step == steps and key < len(run.lengths):
                run.leave(key)
        steps += 1
        assert steps < 2000, "somebody starves"
    assert sorted(run.schedule._free) == [0, 1]


def test_rows_that_run_wait_for_one_piece_at_most() -> None:
    run = Run(2, 4, [[(3, 50)], [(41, 1)]])
    for step in range(12):
        run.step(step)
    assert run.most_between == 4
    assert run.first_tokens == [0, 1]


def test_places_are_chosen_by_whom_they_are_for() -> None:
    schedule: Schedule[str] = Schedule(3)
    for name in "abcd":
        schedule.add(name, 1)
    assert schedule.admit(lambda key, free: (min(free), 0)) == [("a", 0), ("b", 1), ("c", 2)]
    assert [schedule.leave(name) for name in "bc"] == [1, 2]
    assert schedule.admit(lambda key, free: (max(free), 0)) == [("d", 2)]
    with pytest.raises(KeyError):
        schedule.place_of("d")  # its prompt has not been read
