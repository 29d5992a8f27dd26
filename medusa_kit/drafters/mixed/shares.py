"""How often each mix of sources drafted, and what that came to, for names and notes."""

from collections.abc import Mapping
from dataclasses import dataclass

from medusa_kit.drafters.mixed.sources import source_of
from medusa_kit.infer.decode.drafter import COUNTS
from medusa_kit.tree.draft_tree import DraftTree

PLAIN = "none"  # a step in which nothing was drafted


@dataclass
class SourceUsage:
    """What a mix of sources came to."""

    steps: int = 0
    tokens: int = 0

    def count(self, steps: int, accepted: int) -> None:
        self.steps += steps
        self.tokens += steps + accepted

    def describe(self, how: str) -> str:
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        return f"{self.tokens / self.steps:.2f} {how} ({steps})"


def sources_of(tree: DraftTree) -> str:
    """The sources of a tree's draft tokens; PLAIN where it is the root alone."""
    return " + ".join(sorted({source_of(key) for key in tree.keys[1:]})) or PLAIN


def percentages(shares: Mapping[str, SourceUsage]) -> str:
    """How often each mix drafted, the most frequent first."""
    steps = sum(share.steps for share in shares.values())
    ranked = sorted(shares.items(), key=lambda item: -item[1].steps)
    return ", ".join(f"{name} {share.steps / steps:.0%}" for name, share in ranked)


def tokens_a_step(shares: Mapping[str, SourceUsage]) -> list[str]:
    """One line on what mixes of sources came to, the most frequent first; none where nothing was
    drafted."""
    if not shares.keys() - {PLAIN}:
        return []
    ranked = sorted(shares.items(), key=lambda item: -item[1].steps)
    parts = [
        share.describe("without draft tokens" if name == PLAIN else f"with {name}")
        for name, share in ranked
    ]
    return [COUNTS + ", ".join(parts)]
