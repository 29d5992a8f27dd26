"""What places of a batch hold after their rows have left, and which of it a new prompt begins with.

Plain Python over token ids.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

WORTH_A_COPY = 16  # tokens that another place must hold more of: shorter ones are read as fast


@dataclass(frozen=True)
class Start:
    """Where a prompt is put, and its first `length` tokens that need not be read. `source`: the
    place that they are copied from, if they are not there already. `common`: tokens that the prompt
    begins with as some place does, though a text may not go on after so many."""

    place: int
    length: int
    source: int | None = None
    common: int = field(default=0, compare=False)


class PrefixCache:
    """`tokens[place]`: what the cache holds there. The place that was used longest ago is given to
    a prompt that begins like none of them."""

    def __init__(self, num_places: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(num_places)]
        self._num_asked = [0] * num_places  # the rest of a place's tokens are an answer
        self._left_at = [0] * num_places
        self._clock = 0

    def add_places(self, count: int) -> None:
        self.tokens += [[] for _ in range(count)]
        self._num_asked += [0] * count
        self._left_at += [0] * count

    def leave(self, place: int, tokens: Sequence[int], num_asked: int) -> None:
        """A row has left; the cache holds these tokens of it, the first `num_asked` its prompt."""
        self._clock += 1
        self.tokens[place], self._left_at[place] = list(tokens), self._clock
        self._num_asked[place] = min(num_asked, len(tokens))

    def start(
        self,
        prompt: Sequence[int],
        free: Sequence[int],
        others: Mapping[int, Sequence[int]],
        later: Sequence[Sequence[int]] = (),
        usable: Callable[[int, int], int] = lambda place, length: length,
    ) -> Start:
        """The start that leaves least to read, at least one token. `others`: what places in use
        hold, which may be copied. `later`: prompts that get a place next; what holds one of them
        whole is kept for it where another can be given. `usable(place, length)`: how many of a
        place's first `length` tokens a text can go on after.

        A place that `may_overwrite` is used itself. Others are copied from: a common system prompt
        is no reason to overwrite what follows it."""
        most = len(prompt) - 1
        texts = {**{place: self.tokens[place] for place in free}, **others}
        held = {place: min(common_length(text, prompt), most) for place, text in texts.items()}
        shared = {place: usable(place, length) for place, length in held.items()}
        common = max(held.values())
        own = [place for place in free if self.may_overwrite(place, shared[place])]
        oldest = self._oldest(free, later)
        place = max(own, key=lambda one: (shared[one], -self._left_at[one], -one), default=oldest)
        source = max(shared, key=lambda one: shared[one])
        if source != place and shared[source] >= shared[place] + WORTH_A_COPY:
            place = oldest
            if source != place:
                return Start(place, shared[source], source, common)
        return Start(place, shared[place], None, common)

    def num_shared(self, prompts: Sequence[Sequence[int]]) -> int:
        """Tokens of these prompts that are here, where taking them would not cost another
        conversation more: a common system prompt is no reason to overwrite what follows it."""

        def shared(place: int, prompt: Sequence[int]) -> int:
            common = common_length(self.tokens[place], prompt)
            return common if self.may_overwrite(place, common) else 0

        places = range(len(self.tokens))
        return sum(max(shared(place, prompt) for place in places) for prompt in prompts)

    def may_overwrite(self, place: int, num_shared: int) -> bool:
        """Whether what follows the shared tokens is the end of an answer, or no more than them."""
        answered = 0 < self._num_asked[place] - 1 <= num_shared
        return answered or 2 * num_shared >= len(self.tokens[place])

    def _oldest(self, free: Sequence[int], later: Sequence[Sequence[int]]) -> int:
        """The place used longest ago, of those that hold none of the later prompts if any."""
        by_age = sorted(free, key=lambda one: (self._left_at[one], one))
        return next((place for place in by_age if not self._holds_any(place, later)), by_age[0])

    def _holds_any(self, place: int, prompts: Sequence[Sequence[int]]) -> bool:
        text = self.tokens[place]
        return any(
            len(text) >= (most := len(prompt) - 1) > 0
            and text[most - 1] == prompt[most - 1]  # told apart by this, mostly
            and text[:most] == list(prompt[:most])
            for prompt in prompts
        )


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
