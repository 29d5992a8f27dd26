"""Which rows stay together where some are held out, so that heads and trees are not judged on what
they were made from.

Rows that are equal stay together. So do rows that have a prompt or an answer in common, but for one
that most rows have, as where all have the same prompt, and unless it makes one group of most rows.
An answer is one turn of a row, or all of them. A later turn of a conversation, as a server records
it, is a row whose prompt holds the earlier turns' answers, so these stay together too.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence

MIN_SAME = 8  # tokens of an answer; shorter ones are equal without being copies
MAX_SHARE = 0.75  # of the rows, in one group


def contents(prompt: Sequence[int], answer: Sequence[int]) -> tuple[int, int]:
    """Digests of a row's prompt and answer, both of token ids."""
    own = answer if len(answer) >= MIN_SAME else [*prompt, -1, *answer]
    return _digest(prompt), _digest(own)


def _digest(ids: Iterable[int]) -> int:
    data = b"".join(token.to_bytes(8, "little", signed=True) for token in ids)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def conversations(prompts: Sequence[list[int]], min_length: int = 1) -> list[list[int]]:
    """For each prompt the indices of those that it begins with, its own among them: the prompt of a
    later turn begins with that of an earlier one, and holds its answer. `min_length`: tokens of a
    prompt that says so much."""
    earlier, found = list[int](), [list[int]() for _ in prompts]
    for index in sorted(range(len(prompts)), key=lambda index: prompts[index]):
        ids = prompts[index]
        while earlier and not _begins_with(ids, prompts[earlier[-1]]):
            earlier.pop()
        if len(ids) >= min_length:
            earlier.append(index)
        found[index] = list(earlier)
    return found


def _begins_with(ids: list[int], first: list[int]) -> bool:
    return ids[: len(first)] == first


def groups_of(rows: Sequence[Hashable], *parts: Sequence[Collection[Hashable]]) -> list[list[int]]:
    """The indices of rows, in groups that stay together. `parts`: what rows may have in common;
    several of these are tried in order, until none makes one group of most rows."""
    equal = [[("row", row)] for row in rows]
    most = MAX_SHARE * len(rows)
    for some in parts:
        counts = Counter(part for own in some for part in set(own))
        telling = [[part for part in own if counts[part] <= most] for own in some]
        alike = _joined([[*one, *more] for one, more in zip(equal, telling, strict=True)])
        if max(map(len, alike), default=0) <= most:
            return alike
    return _joined(equal)


def _joined(keys: Sequence[Collection[Hashable]]) -> list[list[int]]:
    """Groups of those that have a key in common, directly or by way of others."""
    parents, first = list(range(len(keys))), dict[Hashable, int]()

    def root(index: int) -> int:
        while parents[index] != index:
            parents[index] = index = parents[parents[index]]
        return index

    for index, own in enumerate(keys):
        for key in own:
            one, other = root(index), root(first.setdefault(key, index))
            parents[max(one, other)] = min(one, other)
    groups: dict[int, list[int]] = {}
    for index in range(len(keys)):
        groups.setdefault(root(index), []).append(index)
    return list(groups.values())


def held_out(groups: Sequence[list[int]], order: Iterable[int], max_members: int) -> set[int]:
    """The members of the first groups in this order, at most `max_members`; where no group is that
    small, of one of the smallest."""
    ordered = [groups[index] for index in order]
    chosen: set[int] = set()
    for group in ordered:
        if len(chosen) + len(group) <= max_members:
            chosen.update(group)
    smallest = min(map(len, groups))
    return chosen or set(next(group for group in ordered if len(group) == smallest))
