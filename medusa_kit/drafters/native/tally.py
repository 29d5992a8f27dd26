"""How many of a draft model's tokens were accepted, for reports."""

from dataclasses import dataclass, field

from medusa_kit.drafters.tree_drafter import num_right
from medusa_kit.infer.decode.drafter import StepResult
from medusa_kit.tree.draft_tree import DraftTree


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

    def guessed(self, trees: list[DraftTree]) -> list[DraftTree]:
        """These trees, whose chains are counted once it is known what became of them."""
        self._chains = [tree.tokens[1:] for tree in trees]
        self.drafts += len(trees)
        self.drafted += sum(map(len, self._chains))
        return trees

    def observe(self, step: StepResult) -> None:
        for chain, tree in zip(self._chains, step.trees, strict=False):
            self.accepted += num_right(chain, tree)
        self._chains = []
