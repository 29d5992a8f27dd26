"""The slots of a batch: what each caches of a request that has left, and which of it a new prompt
begins with.

Plain Python over token ids.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

WORTH_A_COPY = 16  # tokens that another slot must hold more of: shorter ones are read as fast


@dataclass(eq=False)
class Slot:
    """A request's place in the KV cache, its row `number`. `text`: what is cached there of the
    request that left last, of which the first `prompt_length` tokens are a prompt."""

    number: int
    text: list[int] = field(default_factory=list)
    prompt_length: int = 0
    last_used: int = 0

    def may_overwrite(self, num_shared: int) -> bool:
        """Whether what follows the shared tokens is the end of an answer, or no more than them."""
        answered = 0 < self.prompt_length - 1 <= num_shared
        return answered or 2 * num_shared >= len(self.text)

    def caches_any(self, prompts: Sequence[Sequence[int]]) -> bool:
        text = self.text
        return any(
            len(text) >= (length := len(prompt) - 1) > 0
            and text[length - 1] == prompt[length - 1]  # told apart by this, mostly
            and text[:length] == list(prompt[:length])
            for prompt in prompts
        )


@dataclass(frozen=True)
class Start:
    """Where a prompt is put, and its first `length` tokens that need not be read. `source`: the
    slot that they are copied from, if they are not there already. `common`: tokens that the prompt
    begins with as some slot does, though a text may not go on after so many."""

    slot: Slot
    length: int
    source: Slot | None = None
    common: int = field(default=0, compare=False)


class Slots:
    """The slots of one cache. The one that was used longest ago is given to a prompt that begins
    like none of them."""

    def __init__(self, count: int) -> None:
        self.all: list[Slot] = []
        self.free: list[Slot] = []  # without a request
        self._clock = 0
        self.resize(count)

    def resize(self, count: int) -> None:
        """More slots behind those that are there, or fewer, where the last ones are free."""
        new = [Slot(number) for number in range(len(self.all), count)]
        self.all = [*self.all[:count], *new]
        self.free = [*(slot for slot in self.free if slot.number < count), *new]

    def forget_texts(self) -> None:
        """Nothing that is cached is of any use."""
        for slot in self.all:
            slot.text = []

    def leave(self, slot: Slot, text: Sequence[int], prompt_length: int) -> None:
        """Free a slot whose request has left, of which `text` is cached: its prompt, which has
        `prompt_length` tokens, then its answer."""
        self._clock += 1
        slot.text, slot.last_used = list(text), self._clock
        slot.prompt_length = min(prompt_length, len(text))
        self.free.append(slot)

    def start(
        self,
        prompt: Sequence[int],
        others: Mapping[Slot, Sequence[int]],
        later: Sequence[Sequence[int]] = (),
        usable: Callable[[int, int], int] = lambda number, length: length,
    ) -> Start:
        """The start that leaves least to read, at least one token. `others`: what slots in use
        hold, which may be copied. `later`: prompts that get a slot next; what holds one of them
        whole is kept for it where another can be given. `usable(number, length)`: how many of a
        slot's first `length` tokens a text can go on after.

        A slot that `may_overwrite` is used itself. Others are copied from: a common system prompt
        is no reason to overwrite what follows it."""
        longest = len(prompt) - 1
        texts = {**{slot: slot.text for slot in self.free}, **others}
        cached = {slot: min(common_length(text, prompt), longest) for slot, text in texts.items()}
        shared = {slot: usable(slot.number, length) for slot, length in cached.items()}
        common = max(cached.values())
        reusable = [slot for slot in self.free if slot.may_overwrite(shared[slot])]
        oldest = _oldest(self.free, later)
        slot = max(reusable, key=lambda s: (shared[s], -s.last_used, -s.number), default=oldest)
        source = max(shared, key=shared.__getitem__)
        if source is not slot and shared[source] >= shared[slot] + WORTH_A_COPY:
            slot = oldest
            if source is not slot:
                return Start(slot, shared[source], source, common)
        return Start(slot, shared[slot], None, common)

    def num_shared(self, prompts: Sequence[Sequence[int]]) -> int:
        """How many tokens of these prompts are cached, where taking them would not cost another
        conversation more: a common system prompt is no reason to overwrite what follows it."""

        def shared(slot: Slot, prompt: Sequence[int]) -> int:
            common = common_length(slot.text, prompt)
            return common if slot.may_overwrite(common) else 0

        return sum(max(shared(slot, prompt) for slot in self.all) for prompt in prompts)


def _oldest(free: Iterable[Slot], later: Sequence[Sequence[int]]) -> Slot:
    """The slot used longest ago, of those that hold none of the later prompts if any."""
    by_age = sorted(free, key=lambda slot: (slot.last_used, slot.number))
    return next((slot for slot in by_age if not slot.caches_any(later)), by_age[0])


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
