"""How many of a draft model's tokens were accepted, for reports."""

from dataclasses import dataclass, field

from medusa_kit.drafters.trie import Trie, num_right
from medusa_kit.infer.draft import StepResult


@dataclass
class Tally:
    """`called`: the draft model, as its note begins. Its drafts are chains."""

    called: str
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    _chains: list[list[int]] = field(default_factory=list)  # of each row, and not judged yet

    @property
    def notes(self) -> list[str]:
        if not self.drafts:
            return []
        return [
            f"{self.called}: {self.drafts} drafts, {self.accepted / self.drafts:.2f} of "
            f"{self.drafted / self.drafts:.2f} drafted tokens accepted on average"
        ]

    def guessed(self, tries: list[Trie]) -> list[Trie]:
        """The same tries."""
        self._chains = [trie.tokens[1:] for trie in tries]
        self.drafts += len(tries)
        self.drafted += sum(map(len, self._chains))
        return tries

    def observe(self, step: StepResult) -> None:
        for chain, tree in zip(self._chains, step.trees, strict=False):
            self.accepted += num_right(chain, tree)
        self._chains = []
