"""Which slot a prompt is given, and what of it need not be read there: plain Python over tokens."""

from medusa_kit.infer.decode.prefix_cache.prefixes import PrefixCache, Start, common_length


def test_the_slot_that_holds_most_of_a_prompt_else_the_oldest() -> None:
    held = PrefixCache(3)
    assert held.start([1, 2, 3], [0, 1, 2], {}) == Start(0, 0)
    held.leave(0, [1, 2, 3, 4], 4)
    held.leave(1, [1, 2, 9], 3)
    assert held.start([1, 2, 3, 5], [0, 1, 2], {}) == Start(0, 3)
    assert held.start([1, 2, 3], [0, 1, 2], {}) == Start(0, 2)  # one is left to read
    assert held.start([1, 8], [0, 1, 2], {}) == Start(2, 0)  # others hold more than they share
    assert held.start([7, 7], [0, 1, 2], {}) == Start(2, 0)  # never used
    assert held.start([7, 7], [0, 1], {}) == Start(0, 0)  # used longest ago
    long = list(range(40))
    assert held.start([*long, 1], [1, 2], {0: long}) == Start(2, 40, 0)
    assert held.start([*long[:9], 1], [1, 2], {0: long[:9]}) == Start(2, 0)  # as fast to read
    held.leave(2, [*long, *long, *long], 90)
    assert held.start([*long, 1], [0, 1, 2], {}) == Start(0, 40, 2)  # copied, since more follows
    assert held.start([*long, 1], [2], {}) == Start(2, 40)  # there is no other slot


def test_only_the_end_of_an_answer_is_overwritten_for_its_question() -> None:
    held, long = PrefixCache(2), list(range(20))
    held.leave(0, [*long, *range(90)], 20)
    held.leave(1, [7] * 9, 9)
    assert held.start(long, [0, 1], {}) == Start(0, 19)
    held.leave(0, [*long, *range(90)], 40)  # the conversation has gone on
    assert held.start(long, [0, 1], {}) == Start(1, 19, 0)


def test_a_slot_that_a_later_prompt_needs_is_not_the_oldest() -> None:
    held = PrefixCache(2)
    held.leave(0, [1, 2, 3, 9, 9], 3)
    held.leave(1, [4, 5, 6, 9, 9], 3)
    assert held.start([7, 7], [0, 1], {}) == Start(0, 0)
    assert held.start([7, 7], [0, 1], {}, [[1, 2, 8]]) == Start(1, 0)
    assert held.start([7, 7], [0, 1], {}, [[1, 2, 3], [4, 5, 6]]) == Start(0, 0)
    assert held.start([7, 7], [0, 1], {}, [[1], [1, 3, 3], [1, 2, 3, 8, 1]]) == Start(0, 0)


def test_common_length() -> None:
    assert common_length([], [1]) == 0
    assert common_length([1, 2, 3], [1, 2]) == 2
    assert common_length([1, 2, 3, 4], [1, 2, 4, 4]) == 2
