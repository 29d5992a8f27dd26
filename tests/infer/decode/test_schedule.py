"""The order of work in a batch, by itself: no model, and a clock that counts tokens and nodes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from medusa_kit.infer.decode.schedule import MIN_TOKENS, ReadingSpeed, Schedule
from medusa_kit.infer.decode.slots import Slot, Slots

MAX_AT_ONCE = 24  # tokens of prompts in one forward
FORWARD, TOKEN = 0.25, 1.0  # what reading costs by the clock: in each forward, and for each token


@dataclass(eq=False)
class Asked:
    """A request; `answer`: how many tokens it gets. `text` has them once it runs."""

    key: int
    prompt: int
    answer: int
    slot: Slot | None = None
    num_read: int = 0
    text: list[int] = field(default_factory=list)
    caller: None = None

    @property
    def prompt_ids(self) -> Sequence[int]:
        return range(self.prompt)


class Run:
    """Requests of a schedule as a batch serves them: each step reads what is due, then counts a
    token for each that runs. `arrivals`: by step, the (prompt, answer) lengths of new ones."""

    def __init__(
        self, max_rows: int, max_pause: float | None, arrivals: Sequence[Sequence[tuple[int, int]]]
    ) -> None:
        self.now = 0.0
        self.slots = Slots(max_rows)
        self.schedule: Schedule[Asked] = Schedule(self.slots, max_rows, max_pause, lambda: self.now)
        self.arrivals, self.max_rows = arrivals, max_rows
        self.asked: list[Asked] = []
        self.read: dict[Asked, int] = {}
        self.first_tokens: list[int] = []  # requests in the order in which their prompts were read
        self.most_between = (
            0.0  # seconds for which prompts were read between two tokens of a request
        )
        self.forwards = 0  # in which they were, at most

    def step(self, number: int) -> None:
        for prompt, answer in self.arrivals[number] if number < len(self.arrivals) else ():
            self.asked.append(Asked(len(self.asked), prompt, answer))
            self.schedule.add(self.asked[-1])
        for one in self.schedule.admit(lambda one, later: (self.slots.free[0], 0)):
            self.read[one] = 0
        numbers = [one.slot.number for one in self.schedule.served if one.slot is not None]
        assert len(set(numbers)) == len(self.schedule.served), "two requests in one slot"
        assert len(numbers) <= self.max_rows
        running, before, forwards = self.schedule.running, self.now, 0
        for pieces in self.schedule.reading(MAX_AT_ONCE):
            size = sum(piece.end - piece.start for piece in pieces)
            assert 0 < size <= MAX_AT_ONCE
            self.now += FORWARD + TOKEN * size
            forwards += 1
            for piece in pieces:
                one = piece.request
                assert piece.start == self.read[one], "a piece was left out"
                self.read[one] = piece.end
                assert piece.is_last == (piece.end == one.prompt)
                if piece.is_last:
                    one.text = [0]
                    self.first_tokens.append(one.key)
        if running:
            self.most_between = max(self.most_between, self.now - before)
            self.forwards = max(self.forwards, forwards)
        for one in self.schedule.running:
            one.text.append(0)
            if len(one.text) > one.answer:
                self.leave(one)

    def leave(self, one: Asked) -> None:
        self.schedule.leave(one)
        if one.slot is not None:
            self.slots.leave(one.slot, [], 0)
            one.slot = None


ROWS = st.lists(
    st.lists(st.tuples(st.integers(1, 90), st.integers(1, 9)), max_size=4), min_size=1, max_size=8
)


@given(max_rows=st.integers(1, 5), pause=st.none() | st.floats(0.1, 90.0), arrivals=ROWS)
def test_every_row_is_served_in_order_within_the_pause(
    max_rows: int, pause: float | None, arrivals: list[list[tuple[int, int]]]
) -> None:
    run, steps = Run(max_rows, pause, arrivals), 0
    while steps < len(arrivals) or run.schedule.requests:
        run.step(steps)
        steps += 1
        assert steps < 2000, "somebody starves"
    assert run.first_tokens == list(range(len(run.asked)))  # first come, first served
    if pause is not None:  # beyond it there is a forward that had begun, or the least of tokens
        most = max(pause, FORWARD + TOKEN * MIN_TOKENS)
        assert run.most_between <= most + run.forwards * FORWARD
    assert sorted(slot.number for slot in run.slots.free) == list(range(max_rows))


@given(
    arrivals=ROWS,
    gone=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 20)), max_size=8),
)
def test_rows_may_leave_from_anywhere(
    arrivals: list[list[tuple[int, int]]], gone: list[tuple[int, int]]
) -> None:
    run, steps = Run(2, 3.0, arrivals), 0
    while steps < len(arrivals) or run.schedule.requests:
        run.step(steps)
        for step, key in gone:
            if step == steps and run.asked[key : key + 1] and run.asked[key] in here(run):
                run.leave(run.asked[key])
        steps += 1
        assert steps < 2000, "somebody starves"
    assert sorted(slot.number for slot in run.slots.free) == [0, 1]


def here(run: Run) -> Sequence[Asked]:
    return run.schedule.requests


def test_rows_that_run_wait_for_a_pause_at_most() -> None:
    run = Run(2, 20.0, [[(3, 50)], [(141, 1)]])
    for step in range(12):
        run.step(step)
    assert 16.0 < run.most_between <= 20.0
    assert run.first_tokens == [0, 1]


def test_without_a_bound_prompts_are_read_at_once() -> None:
    run = Run(2, None, [[(3, 50)], [(141, 1)]])
    for step in range(2):
        run.step(step)
    assert run.first_tokens == [0, 1]
    assert run.most_between == 141 * TOKEN + 6 * FORWARD


def test_where_nobody_runs_a_step_reads_a_whole_forward() -> None:
    run = Run(1, 1e-9, [[(100, 1)]])
    for step in range(5):
        run.step(step)
    assert run.first_tokens == [0]


@given(
    forward=st.floats(0.0, 20.0), token=st.floats(0.01, 3.0), first=st.integers(1, 600),
    later=st.floats(0.3, 3.0),
)  # fmt: skip
def test_the_speed_is_learned_and_followed(
    forward: float, token: float, first: int, later: float
) -> None:
    """A first prompt of any length, then pieces as long as may be; then the machine changes."""
    pause = 40.0
    speed = ReadingSpeed(pause)
    assert speed.num_tokens == MIN_TOKENS
    speed.record(first, forward + token * first)
    for factor in (1.0, later):
        for _ in range(200):
            tokens = speed.num_tokens
            speed.record(tokens, factor * (forward + token * tokens))
        seconds = factor * (forward + token * speed.num_tokens)
        if speed.num_tokens > MIN_TOKENS:
            assert seconds <= 1.05 * pause
        one_more = factor * (forward + token * (speed.num_tokens + 2))
        assert one_more >= 0.95 * pause


def test_slots_are_chosen_by_whom_they_are_for() -> None:
    slots = Slots(3)
    schedule: Schedule[Asked] = Schedule(slots, 3)
    a, b, c, d = asked = [Asked(key, 1, 1) for key in range(4)]
    for one in asked:
        schedule.add(one)
    told: list[tuple[Asked, list[Asked]]] = []

    def first(one: Asked, later: Sequence[Asked]) -> tuple[Slot, int]:
        told.append((one, list(later)))
        return slots.free[0], 0

    assert schedule.admit(first) == [a, b, c]
    assert [one.slot for one in (a, b, c)] == slots.all
    assert told == [(a, [b, c]), (b, [c]), (c, [])]  # d waits for another slot
    for one in (b, c):
        schedule.leave(one)
        assert one.slot is not None
        slots.leave(one.slot, [], 0)
    assert schedule.admit(lambda one, later: (slots.free[-1], 0)) == [d]
    assert d.slot is slots.all[2]
    assert slots.free == [slots.all[1]]
    assert schedule.running == []  # no prompt has been read


def test_the_speed_of_reading_is_known_where_the_caller_reads_no_more_for_now() -> None:
    """As between two pieces of a long prompt, where somebody waits for the end of the step."""
    run = Run(2, 40.0, [])
    runs, reads = Asked(0, 1, 9, text=[0]), Asked(1, 400, 1)
    run.schedule.add(runs)
    run.schedule.add(reads)
    run.schedule.admit(lambda one, later: (run.slots.free[0], 0))
    runs.num_read = 1
    sizes = list[int]()
    for _ in range(2):
        for pieces in run.schedule.reading(MAX_AT_ONCE):
            sizes.append(sum(piece.end - piece.start for piece in pieces))
            run.now += sizes[-1] / 32
            break
    assert sizes == [MIN_TOKENS, MAX_AT_ONCE]
