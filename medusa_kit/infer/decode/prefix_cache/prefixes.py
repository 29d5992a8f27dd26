"""What slots of a batch cache of requests that have left, and which of it a new prompt begins with.

Plain Python over token ids.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

WORTH_A_COPY = 16  # tokens that another slot must hold more of: shorter ones are read as fast


@dataclass(frozen=True)
class Start:
    """Where a prompt is put, and its first `length` tokens that need not be read. `source`: the
    slot that they are copied from, if they are not there already. `common`: tokens that the prompt
    begins with as some slot does, though a text may not go on after so many."""

    slot: int
    length: int
    source: int | None = None
    common: int = field(default=0, compare=False)


class PrefixCache:
    """`tokens[slot]`: what is cached there. The slot that was used longest ago is given to
    a prompt that begins like none of them."""

    def __init__(self, num_slots: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(num_slots)]
        self._prompt_lengths = [0] * num_slots  # a slot's other tokens are an answer
        self._last_used = [0] * num_slots
        self._clock = 0

    def add_slots(self, count: int) -> None:
        self.tokens += [[] for _ in range(count)]
        self._prompt_lengths += [0] * count
        self._last_used += [0] * count

    def leave(self, slot: int, tokens: Sequence[int], prompt_length: int) -> None:
        """Note that a request has left, of which these tokens are cached: its prompt, which has
        `prompt_length` tokens, then its answer."""
        self._clock += 1
        self.tokens[slot], self._last_used[slot] = list(tokens), self._clock
        self._prompt_lengths[slot] = min(prompt_length, len(tokens))

    def start(
        self,
        prompt: Sequence[int],
        free: Sequence[int],
        others: Mapping[int, Sequence[int]],
        later: Sequence[Sequence[int]] = (),
        usable: Callable[[int, int], int] = lambda slot, length: length,
    ) -> Start:
        """The start that leaves least to read, at least one token. `others`: what slots in use
        hold, which may be copied. `later`: prompts that get a slot next; what holds one of them
        whole is kept for it where another can be given. `usable(slot, length)`: how many of a
        slot's first `length` tokens a text can go on after.

        A slot that `may_overwrite` is used itself. Others are copied from: a common system prompt
        is no reason to overwrite what follows it."""
        longest = len(prompt) - 1
        texts = {**{slot: self.tokens[slot] for slot in free}, **others}
        cached = {slot: min(common_length(text, prompt), longest) for slot, text in texts.items()}
        shared = {slot: usable(slot, length) for slot, length in cached.items()}
        common = max(cached.values())
        reusable = [slot for slot in free if self.may_overwrite(slot, shared[slot])]
        oldest = self._oldest(free, later)
        slot = max(reusable, key=lambda s: (shared[s], -self._last_used[s], -s), default=oldest)
        source = max(shared, key=shared.__getitem__)
        if source != slot and shared[source] >= shared[slot] + WORTH_A_COPY:
            slot = oldest
            if source != slot:
                return Start(slot, shared[source], source, common)
        return Start(slot, shared[slot], None, common)

    def num_shared(self, prompts: Sequence[Sequence[int]]) -> int:
        """How many tokens of these prompts are cached, where taking them would not cost another
        conversation more: a common system prompt is no reason to overwrite what follows it."""

        def shared(slot: int, prompt: Sequence[int]) -> int:
            common = common_length(self.tokens[slot], prompt)
            return common if self.may_overwrite(slot, common) else 0

        slots = range(len(self.tokens))
        return sum(max(shared(slot, prompt) for slot in slots) for prompt in prompts)

    def may_overwrite(self, slot: int, num_shared: int) -> bool:
        """Whether what follows the shared tokens is the end of an answer, or no more than them."""
        answered = 0 < self._prompt_lengths[slot] - 1 <= num_shared
        return answered or 2 * num_shared >= len(self.tokens[slot])

    def _oldest(self, free: Sequence[int], later: Sequence[Sequence[int]]) -> int:
        """The slot used longest ago, of those that hold none of the later prompts if any."""
        by_age = sorted(free, key=lambda slot: (self._last_used[slot], slot))
        return next((slot for slot in by_age if not self._caches_any(slot, later)), by_age[0])

    def _caches_any(self, slot: int, prompts: Sequence[Sequence[int]]) -> bool:
        text = self.tokens[slot]
        return any(
            len(text) >= (length := len(prompt) - 1) > 0
            and text[length - 1] == prompt[length - 1]  # told apart by this, mostly
            and text[:length] == list(prompt[:length])
            for prompt in prompts
        )


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts begin with in common; both are lists, or slices of some."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
