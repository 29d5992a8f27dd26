"""What places of a batch hold after their rows have left, and which of it a new prompt begins with.

Plain Python over token ids.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WORTH_A_COPY = 16  # tokens that another place must hold more of: shorter ones are read as fast


@dataclass(frozen=True)
class Start:
    """Where a prompt is put, and its first `length` tokens that need not be read. `source`: the
    place that they are copied from, if they are not there already."""

    place: int
    length: int
    source: int | None = None


class HeldPrefixes:
    """`tokens[place]`: what the cache holds there. The place that was used longest ago is given to
    a prompt that begins like none of them."""

    def __init__(self, num_places: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(num_places)]
        self._left_at = [0] * num_places
        self._clock = 0

    def add_places(self, count: int) -> None:
        self.tokens += [[] for _ in range(count)]
        self._left_at += [0] * count

    def leave(self, place: int, tokens: Sequence[int]) -> None:
        """A row has left; the cache holds these tokens of it."""
        self._clock += 1
        self.tokens[place], self._left_at[place] = list(tokens), self._clock

    def start(
        self, prompt: Sequence[int], free: Sequence[int], running: Mapping[int, Sequence[int]]
    ) -> Start:
        """The start that leaves least to read, at least one token. `running`: what other places
        hold, which may be copied. A place that holds much more than it shares is copied from as
        well: a common system prompt is no reason to overwrite what follows it."""
        most = len(prompt) - 1
        texts = {**{place: self.tokens[place] for place in free}, **running}
        shared = {place: min(common_length(text, prompt), most) for place, text in texts.items()}
        own = [place for place in free if 2 * shared[place] >= len(self.tokens[place])]
        oldest = min(free, key=lambda one: (self._left_at[one], one))
        place = max(own, key=lambda one: (shared[one], -self._left_at[one], -one), default=oldest)
        source = max(shared, key=lambda one: shared[one])
        if source != place and shared[source] >= shared[place] + WORTH_A_COPY:
            place = oldest
            if source != place:
                return Start(place, shared[source], source)
        return Start(place, shared[place])


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts begin with in common; both are lists, or slices of some."""
    least, most = 0, min(len(first), len(second))
    while least < most:
        middle = (least + most + 1) // 2
        if first[least:middle] == second[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least
