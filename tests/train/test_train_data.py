import numpy as np
import pytest

from medusa_kit.data.chat import EncodedExample
from medusa_kit.errors import DataError
from medusa_kit.train.data import (
    ANSWERS,
    APART,
    TURNS,
    coverage,
    head_targets,
    most_frequent_ids,
    on_all_tokens,
    prepare,
    split,
    stretch_contents,
)
from medusa_kit.train.evaluate import answer_starts


def brute_force(ids, mask, num_heads):
    """Position by position, straight from the definition."""
    positions, targets = [], []
    for t in range(len(ids) - 1):
        if not mask[t + 1]:
            continue
        positions.append(t)
        row = []
        for k in range(num_heads):
            between = range(t + 2, t + 3 + k)
            seen = all(place < len(ids) and mask[place] for place in between)
            row.append(ids[t + 2 + k] if seen else -1)
        targets.append(row)
    return positions, targets


def positions_of(mask):
    return [t for t in range(len(mask) - 1) if mask[t + 1]]


def test_head_k_predicts_the_token_k_plus_2_ahead():
    """A counting sequence: the target is the position's own token plus k + 2."""
    example = EncodedExample(list(range(100, 120)), [True] * 20, 1)
    item = head_targets(example, 4)
    for t, targets in zip(item.positions_P, item.targets_PK, strict=True):
        for k, target in enumerate(targets):
            assert target == (100 + t + k + 2 if t + k + 2 < 20 else -1)


def test_targets_equal_brute_force_on_random_turns():
    generator = np.random.default_rng(0)
    for _ in range(50):
        length = int(generator.integers(1, 40))
        ids = generator.integers(0, 1000, length).tolist()
        mask = (generator.random(length) < 0.7).tolist()
        item = head_targets(EncodedExample(ids, mask, 1), 5)
        assert item.ahead_PJ[:, 0].tolist() == [ids[t + 1] for t in positions_of(mask)]
        positions, targets = brute_force(ids, mask, 5)
        assert item.positions_P.tolist() == positions
        assert item.targets_PK.tolist() == targets


def test_no_head_looks_across_a_turn():
    mask = [False, False, True, True, True, False, False, True, True]
    item = head_targets(EncodedExample(list(range(9)), mask, 1), 3)
    assert item.positions_P.tolist() == [1, 2, 3, 6, 7]
    assert item.targets_PK.tolist() == [
        [3, 4, -1],
        [4, -1, -1],
        [-1, -1, -1],
        [8, -1, -1],
        [-1, -1, -1],
    ]


def test_no_head_looks_into_a_turn_that_follows_with_nothing_between():
    mask = [False] + [True] * 8
    (item,) = prepare([EncodedExample(list(range(9)), mask, 1, turn_starts=(4,))], 3)
    assert item.positions_P.tolist() == list(range(8)), "every token is trained"
    assert item.ahead_PJ[:, 0].tolist() == list(range(1, 9))
    assert item.targets_PK.tolist() == [
        [2, 3, -1], [3, -1, -1], [-1, -1, -1],
        [5, 6, 7], [6, 7, 8], [7, 8, -1], [8, -1, -1], [-1, -1, -1],
    ]  # fmt: skip
    assert answer_starts([item, item]).tolist() == [0, 3, 8, 11]
    assert len(set(map(tuple, stretch_contents([item]).tolist()))) == 2


def test_split_is_by_whole_rows_and_repeats():
    rows = prepare([EncodedExample([i] * 9, [True] * 9, i) for i in range(50)], 2)
    training, held_out = split(rows, 0.1, seed=3)
    assert len(held_out) == 5
    names = [item.input_ids[0] for item in training + held_out]
    assert sorted(names) == list(range(50))
    again = split(rows, 0.1, seed=3)[1]
    assert [item.input_ids for item in again] == [item.input_ids for item in held_out]
    other = split(rows, 0.1, seed=4)[1]
    assert [item.input_ids for item in other] != [item.input_ids for item in held_out]


def rows_of(*ids):
    """A row of the same token nine times for each of these."""
    return prepare([EncodedExample([i] * 9, [True] * 9, n) for n, i in enumerate(ids)], 2)


@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.5, 0.9])
def test_rows_that_are_the_same_stay_on_one_side(fraction):
    """Groups of one, two and four, as where answers were written into a file twice."""
    items = rows_of(*range(20), *range(15), *range(10), *range(10))
    for seed in range(20):
        training, held_out = split(items, fraction, seed)
        sides = [{item.input_ids[0] for item in side} for side in (training, held_out)]
        assert min(map(len, sides)) > 0
        assert not sides[0] & sides[1]
        assert len(training) + len(held_out) == len(items)
        assert len(held_out) <= max(1, round(len(items) * fraction))


def test_rows_that_all_come_twice_are_held_out_in_pairs():
    training, held_out = split(rows_of(1, 1, 2, 2, 2), 0.1, 0)
    assert [item.input_ids[0] for item in held_out] == [1, 1]
    assert len(training) == 3
    with pytest.raises(DataError, match="all of them the same"):
        split(rows_of(7, 7, 7), 0.1, 0)


def conversations(*pairs):
    """A row for each (prompt, answer), of twelve tokens each."""
    return prepare([
        EncodedExample([prompt] * 12 + [answer] * 12, [False] * 12 + [True] * 12, n)
        for n, (prompt, answer) in enumerate(pairs)
    ], 2)  # fmt: skip


@pytest.mark.parametrize("fraction", [0.1, 0.4])
def test_rows_with_the_same_prompt_or_answer_stay_on_one_side(fraction):
    pairs = [(n, 100 + n) for n in range(20)] + [(n, 200 + n) for n in range(5)]
    items = conversations(*pairs, *((300 + n, 100 + n) for n in range(8, 13)))
    for seed in range(20):
        training, held_out = split(items, fraction, seed)
        for place in (0, -1):
            known = {item.input_ids[place] for item in training}
            assert not known & {item.input_ids[place] for item in held_out}
        assert len(training) + len(held_out) == 30


def chats(*rows):
    """A row for each tuple of answers, with prompts of its own."""
    prompt, answered = [False] * 4, [True] * 12
    return prepare([
        EncodedExample([i for turn, answer in enumerate(answers)
                        for i in [1000 + 9 * n + turn] * 4 + [answer] * 12],
                       (prompt + answered) * len(answers), n)
        for n, answers in enumerate(rows)
    ], 2)  # fmt: skip


@pytest.mark.parametrize("usual", [[], [7]])
def test_a_turn_that_several_chats_have_stays_on_one_side(usual):
    """As where a chat was cut into rows of one turn. One that most chats end with says nothing."""
    cut = [(200 + n,) for n in range(6)]
    items = chats(*((100 + n, 200 + n, *usual) for n in range(24)), *cut)
    parted = 0
    for seed in range(20):
        training, held_out = split(items, 0.2, seed)
        known = [{t for i in side for t in i.input_ids[4::16]} for side in (training, held_out)]
        assert not known[0] & known[1] - {*usual}
        assert len(held_out) == 6
        parted += split(items, 0.2, seed, ANSWERS)[1] != held_out
    assert parted


def recorded(num_chats, turns, prompt=10):
    """A row for each turn, whose prompt holds the turns before, as a server records them."""
    rows = []
    for chat in range(num_chats):
        ids = [1] * prompt + [10 + chat]
        for turn in range(turns):
            answer = [1000 + 20 * chat + turn] * 4 + [2]
            mask = [False] * len(ids) + [True] * len(answer)
            rows.append(EncodedExample([*ids, *answer], mask, len(rows)))
            ids = [*ids, *answer, 3, 500 + turn]
    return prepare(rows, 2)


def test_turns_of_a_recorded_conversation_stay_on_one_side():
    items, parted = recorded(30, 4), 0
    for seed in range(20):
        training, held_out = split(items, 0.1, seed)
        sides = [{item.input_ids[10] for item in side} for side in (training, held_out)]
        assert not sides[0] & sides[1]
        assert len(held_out) == 12
        before = [{item.input_ids[10] for item in side} for side in split(items, 0.1, seed, TURNS)]
        parted += bool(before[0] & before[1])
    assert parted, "as earlier versions did, whose runs go on so"


def test_a_short_prompt_that_others_begin_with_is_no_conversation():
    first = EncodedExample([1, 1, 1, *[5] * 9], [False] * 3 + [True] * 9, 0)
    items = prepare([first], 2) + recorded(20, 1)
    assert len(split(items, 0.5, 0)[0]) in (10, 11)


def test_turns_that_chain_most_chats_together_say_nothing():
    """Equal answers still do."""
    chain = [(n, n + 1) for n in range(40)]
    items = chats(*chain, *((100 + n // 2,) for n in range(10)))
    training, held_out = split(items, 0.2, 0)
    assert (training, held_out) == split(items, 0.2, 0, ANSWERS)
    first, other = ({i.input_ids[-1] for i in side} for side in (training, held_out))
    assert not {end for end in first & other if end >= 100}


def test_rows_of_one_prompt_are_split_by_answer():
    training, held_out = split(conversations(*((1, 100 + n % 10) for n in range(20))), 0.2, 0)
    assert len(held_out) == 4
    assert not {i.input_ids[-1] for i in training} & {i.input_ids[-1] for i in held_out}


def test_short_answers_may_be_equal():
    rows = [EncodedExample([n] * 9 + [100 + n % 2] * 3, [False] * 9 + [True] * 3, n)
            for n in range(50)]  # fmt: skip
    assert len(split(prepare(rows, 2), 0.1, 0)[1]) == 5


def test_the_stretches_of_a_row_share_its_prompt():
    mask = [False, *[True] * 9, False, *[True] * 9]
    (item,) = prepare([EncodedExample([1, *[2] * 9, 3, *[2] * 9], mask, 0)], 2)
    found = stretch_contents([item, item])
    assert found.shape == (4, 2)
    assert len(set(map(tuple, found.tolist()))) == 1


def test_rows_that_differ_are_split_as_they_always_were():
    items = rows_of(*range(50))
    for seed in range(5):
        assert split(items, 0.1, seed) == split(items, 0.1, seed, APART)


def test_too_little_data_is_refused():
    nothing_to_learn = EncodedExample([1, 2, 3], [False, False, True], 1)
    usable = EncodedExample([1, 2, 3, 4], [False, True, True, True], 2)
    with pytest.raises(DataError, match="1 usable"):
        split(prepare([nothing_to_learn, usable], 2), 0.5, 0)
    with pytest.raises(DataError, match="0 usable"):
        split(prepare([], 2), 0.5, 0)


def test_reduced_ids_are_the_most_frequent_and_every_stop_token():
    ids = [9, 9, 7, 7, 7, 5, 5, 3, 7, 9, 5]
    items = prepare([EncodedExample([0, 0, *ids], [True] * (len(ids) + 2), 1)], 2)
    assert most_frequent_ids(items, 3, frozenset([2])).tolist() == [2, 5, 7]  # 5 ties with 9
    assert most_frequent_ids(items, 100, frozenset([2])).tolist() == [2, 3, 5, 7, 9]
    assert coverage(items, most_frequent_ids(items, 3, frozenset([2]))) == pytest.approx(
        sum(target in (5, 7) for target in ids + ids[1:]) / (2 * len(ids) - 1)
    )


def test_rows_trained_on_all_tokens_leave_out_what_all_begin_with():
    rows = [
        EncodedExample([7, 7, 1, 2, 3, 4], [False] * 4 + [True] * 2, 0),
        EncodedExample([7, 7, 5, 6, 3, 4, 9], [False] * 5 + [True] * 2, 1),
    ]
    one, two = on_all_tokens(prepare(rows, 2))
    assert one.positions_P.tolist() == [1, 2, 3, 4]  # the first to tell the rows apart is token 2
    assert one.ahead_PJ.tolist() == [[1, 2, 3], [2, 3, 4], [3, 4, -1], [4, -1, -1]]
    assert two.ahead_PJ[0].tolist() == [5, 6, 3]
    assert len(two.positions_P) == 5


def test_what_the_assistant_wrote_is_trained_on_even_where_all_answers_begin_with_it():
    rows = [
        EncodedExample([7, 7, 1, 2, 3, last], [False] * 2 + [True] * 4, last) for last in (4, 5)
    ]
    answers = prepare(rows, 2)
    for item, expected in zip(on_all_tokens(answers), answers, strict=True):
        assert item.positions_P.tolist() == expected.positions_P.tolist() == [1, 2, 3, 4]
        assert item.ahead_PJ.tolist() == expected.ahead_PJ.tolist()


def test_equal_rows_are_trained_on_whole():
    row = EncodedExample([7, 1, 2], [False, True, True], 0)
    [item, _] = on_all_tokens(prepare([row, row], 1))
    assert item.ahead_PJ.tolist() == [[1, 2], [2, -1]]
