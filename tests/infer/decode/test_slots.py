"""Which slot a prompt is given, and what of it need not be read there: plain Python over tokens."""

from collections.abc import Mapping, Sequence

from medusa_kit.infer.decode.slots import Slots, common_length


class Held:
    """Slots by their numbers. `start`: (number, length, number of the source)."""

    def __init__(self, count: int) -> None:
        self.slots = Slots(count)

    def leave(self, number: int, text: Sequence[int], prompt_length: int) -> None:
        slot = self.slots.all[number]
        self.slots.free.remove(slot)
        self.slots.leave(slot, text, prompt_length)

    def start(
        self,
        prompt: Sequence[int],
        free: Sequence[int],
        others: Mapping[int, Sequence[int]] | None = None,
        later: Sequence[Sequence[int]] = (),
    ) -> tuple[int, int, int | None]:
        slots = self.slots.all
        self.slots.free = [slots[number] for number in free]
        texts = {slots[number]: text for number, text in (others or {}).items()}
        found = self.slots.start(prompt, texts, later)
        self.slots.free = list(slots)
        return found.slot.number, found.length, None if not found.source else found.source.number


def test_the_slot_that_holds_most_of_a_prompt_else_the_oldest() -> None:
    held = Held(3)
    assert held.start([1, 2, 3], [0, 1, 2]) == (0, 0, None)
    held.leave(0, [1, 2, 3, 4], 4)
    held.leave(1, [1, 2, 9], 3)
    assert held.start([1, 2, 3, 5], [0, 1, 2]) == (0, 3, None)
    assert held.start([1, 2, 3], [0, 1, 2]) == (0, 2, None)  # one is left to read
    assert held.start([1, 8], [0, 1, 2]) == (2, 0, None)  # others hold more than they share
    assert held.start([7, 7], [0, 1, 2]) == (2, 0, None)  # never used
    assert held.start([7, 7], [0, 1]) == (0, 0, None)  # used longest ago
    long = list(range(40))
    assert held.start([*long, 1], [1, 2], {0: long}) == (2, 40, 0)
    assert held.start([*long[:9], 1], [1, 2], {0: long[:9]}) == (2, 0, None)  # as fast to read
    held.leave(2, [*long, *long, *long], 90)
    assert held.start([*long, 1], [0, 1, 2]) == (0, 40, 2)  # copied, since more follows
    assert held.start([*long, 1], [2]) == (2, 40, None)  # there is no other slot


def test_only_the_end_of_an_answer_is_overwritten_for_its_question() -> None:
    held, long = Held(2), list(range(20))
    held.leave(0, [*long, *range(90)], 20)
    held.leave(1, [7] * 9, 9)
    assert held.start(long, [0, 1]) == (0, 19, None)
    held.leave(0, [*long, *range(90)], 40)  # the conversation has gone on
    assert held.start(long, [0, 1]) == (1, 19, 0)


def test_a_slot_that_a_later_prompt_needs_is_not_the_oldest() -> None:
    held = Held(2)
    held.leave(0, [1, 2, 3, 9, 9], 3)
    held.leave(1, [4, 5, 6, 9, 9], 3)
    assert held.start([7, 7], [0, 1]) == (0, 0, None)
    assert held.start([7, 7], [0, 1], later=[[1, 2, 8]]) == (1, 0, None)
    assert held.start([7, 7], [0, 1], later=[[1, 2, 3], [4, 5, 6]]) == (0, 0, None)
    assert held.start([7, 7], [0, 1], later=[[1], [1, 3, 3], [1, 2, 3, 8, 1]]) == (0, 0, None)


def test_common_length() -> None:
    assert common_length([], [1]) == 0
    assert common_length([1, 2, 3], [1, 2]) == 2
    assert common_length([1, 2, 3, 4], [1, 2, 4, 4]) == 2
