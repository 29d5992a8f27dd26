"""One step of `auto`: what was guessed, what that promised, and what asking for it has gained."""

from collections.abc import Sequence
from dataclasses import dataclass

from medusa_kit.drafters.mixed.chooser import Chooser
from medusa_kit.drafters.trie import Trie
from medusa_kit.infer.node_choice.choice import Offer, choose_nodes
from medusa_kit.infer.node_choice.cost import StepCost

Order = Sequence[tuple[int, float]]  # a row's nodes with their chances, likeliest first


@dataclass
class Step:
    """What was guessed in the current step, and then what of it was taken."""

    tries: list[Trie]
    cost: StepCost
    num_others: int  # nodes of other rows in the same step
    start: float
    chains: bool = False  # whether a row's guesses must follow one another
    timed_here: bool = False  # whether its time is recorded by the drafter, not by the batch
    drafted: float = 0.0
    # What free guesses alone promise: tokens of these rows, in a step of so many seconds; tokens a
    # second of all rows by such steps, with what lies between them.
    promised: float = 0.0
    seconds: float = 0.0
    rate: float = 0.0
    # By whom and for which positions a source was chosen; None: nothing has been measured.
    chooser: Chooser | None = None
    situation: int = 0
    choice: int = 0
    asking: float = 0.0  # seconds that the chosen source took
    num_guesses: int = 0  # verified
    expected: float = 0.0  # right ones of these

    def __post_init__(self) -> None:
        self.orders: list[Order] = self._orders()

    def _orders(self) -> list[Order]:
        return [trie.best_path() if self.chains else trie.by_chance() for trie in self.tries]

    @property
    def num_rows(self) -> int:
        """All of the step."""
        return self.num_others + len(self.tries)

    def offer(self, max_nodes: int) -> Offer:
        return Offer([[chance for _, chance in order[1:max_nodes]] for order in self.orders])

    def promise(self, tokens: float, num_nodes: int, between: float) -> None:
        """Free guesses promise so many tokens of these rows, in a step of so many nodes. `between`:
        seconds between two steps, which count as far as the step is long: who reads a stream may be
        slow."""
        self.promised, self.seconds = tokens, self.cost.seconds(num_nodes)
        whole = self.seconds + min(between, self.seconds)
        self.rate = (self.num_others + tokens) / whole

    def merge(self, more: Sequence[Trie]) -> None:
        """Add the guesses of another source."""
        for whole, trie in zip(self.tries, more, strict=True):
            whole.merge(trie)
        self.orders = self._orders()

    def keep(self, counts: Sequence[int]) -> None:
        """The likeliest guesses of each row are verified."""
        both = list(zip(self.tries, self.orders, counts, strict=True))
        self.tries = [
            trie.kept([node for node, _ in order[: 1 + count]]) for trie, order, count in both
        ]
        self.num_guesses = sum(trie.num_nodes - 1 for trie in self.tries)
        self.expected = sum(
            chance for _, order, count in both for _, chance in order[1 : 1 + count]
        )

    def expected_gain(self, chances: Sequence[float], asking: float, max_nodes: int) -> float:
        """What a source gains whose guesses have these chances where there are no others, by a
        row's tokens. They add less where free guesses promise more. `asking`: seconds."""
        B = len(self.tries)
        more = [chance / (self.promised / B) ** 2 for chance in chances]
        free = self.offer(max_nodes).chances
        offer = Offer([sorted([*own, *more], reverse=True) for own in free])
        chosen = choose_nodes([offer], self.num_others, self.cost)
        return self._gain(chosen.tokens - self.num_others, chosen.seconds + asking)

    def gained_by_asking(self) -> float:
        """The same of the source that was asked, by the chances of what was verified."""
        seconds = self.cost.seconds(self.num_rows + self.num_guesses)
        return self._gain(len(self.tries) + self.expected, seconds + self.asking)

    def _gain(self, tokens: float, seconds: float) -> float:
        """Tokens of a row that so many of these rows are more than promised, less those of the time
        that the step takes longer."""
        longer = seconds - self.seconds
        return (tokens - self.promised - longer * self.rate) / len(self.tries)

    def gained(self, accepted: int) -> float:
        """Plain steps gained by all guesses, of which so many were right."""
        plain = self.cost.seconds(self.num_rows)
        longer = self.cost.seconds(self.num_rows + self.num_guesses) - plain
        return accepted / self.num_rows - (longer + self.drafted - self.start) / plain


def best_size(
    orders: Sequence[Order],
    cost: StepCost,
    max_nodes: int,
) -> tuple[int, float]:
    """(nodes for each row, tokens expected over all rows) with the most tokens a second."""
    B = len(orders)
    gains = [0.0] * max_nodes  # of the n-th likeliest node, over the rows
    for order in orders:
        for place, (_, chance) in enumerate(order[:max_nodes]):
            gains[place] += chance
    best, tokens, promised = 1, float(B), float(B)
    rate = tokens / cost.seconds(B)
    for size in range(2, max_nodes + 1):
        if gains[size - 1] == 0.0:
            break
        tokens += gains[size - 1]
        seconds = cost.seconds(B * size)
        if tokens / seconds > rate:
            best, promised, rate = size, tokens, tokens / seconds
    return best, promised
