"""Replays drafters that only read text over known answers, without the model.

    python benchmarks/text_drafters.py --answers answers.jsonl --every 4 --past 3

Prints tokens a step, processor time of a guess, and predicted against real shares of right guesses,
from which the constants in prompt_lookup.py and suffix.py come. `--past`: how many of every
`--every` answers are stored as past answers; each `--every`-th one is decoded.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch

from medusa_kit.data.readers import AnswerRow, read_rows
from medusa_kit.drafters.text.past_answers import PastAnswers
from medusa_kit.drafters.text.prompt_lookup import PromptLookupDrafter
from medusa_kit.drafters.text.suffix import SuffixDrafter
from medusa_kit.drafters.tree_drafter import TreeDrafter
from medusa_kit.infer.decode.drafter import RequestText, State
from medusa_kit.settings.drafters import drafter_options
from medusa_kit.tree.draft_tree import DraftTree


@dataclass
class Tally:
    """Guesses whose parent was right, by kind: number, sum of chances, number of right ones."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    kinds: dict[Hashable, list[float]] = field(
        default_factory=lambda: defaultdict(lambda: [0.0] * 3)
    )

    def walk(self, tree: DraftTree, truth: Sequence[int]) -> int:
        """The tokens of `truth` that the step emits."""
        node, depth = 0, 0
        for token in truth:
            for child in (n for n in range(1, tree.num_nodes) if tree.parents[n] == node):
                name, matched, *_ = tree.keys[child]  # type: ignore[misc]
                counts = self.kinds[name, matched]
                counts[0] += 1
                counts[1] += tree.chances[child]
                counts[2] += tree.tokens[child] == token
            depth += 1
            if (right := tree.child(node, token)) is None:
                break
            node = right
        self.steps, self.tokens = self.steps + 1, self.tokens + depth
        return depth


def replay(drafter: TreeDrafter, answers: Sequence[AnswerRow]) -> Tally:
    tally = Tally()
    for answer in answers:
        truth, place = answer.response_ids, 0
        request = RequestText(text=list(answer.prompt_ids), root=truth[0])
        drafter.begin(request)
        while place + 1 < len(truth):
            start = time.thread_time()
            tree = drafter.guess(State([request]))[0]
            tally.seconds += time.thread_time() - start
            emitted = tally.walk(tree, truth[place + 1 :])
            request.text += truth[place : place + emitted]
            place += emitted
            request.root = truth[place]
    return tally


def report(name: str, tally: Tally) -> None:
    guess = tally.seconds / tally.steps * 1e6
    print(f"\n{name}: {tally.tokens / tally.steps:.3f} tokens a step, {guess:.0f} µs a guess")
    for kind, (count, believed, right) in sorted(tally.kinds.items(), key=str):
        print(
            f"  {kind!s:22} {count:7.0f} believed {believed / count:.3f} right {right / count:.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", required=True)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--past", type=int, default=3)
    parser.add_argument("--num-nodes", type=int, default=8)
    options = parser.parse_args()
    rows = [row for row in read_rows(options.answers) if isinstance(row, AnswerRow)]
    decoded = rows[:: options.every]
    cpu = torch.device("cpu")
    lookup = drafter_options("prompt-lookup", {"num_tokens": options.num_nodes - 1})
    report("prompt-lookup", replay(PromptLookupDrafter(lookup, cpu), decoded))
    suffix = drafter_options("suffix", {"num_nodes": options.num_nodes})
    report("suffix", replay(SuffixDrafter(suffix, cpu), decoded))
    if options.past:
        past = PastAnswers("never-written", "", suffix.store_tokens, suffix.max_match)
        kept = [row for i, row in enumerate(rows) if 0 < i % options.every <= options.past]
        past.add([row.response_ids for row in kept])
        tally = replay(SuffixDrafter(suffix, cpu, past), decoded)
        report(f"suffix with {past.num_tokens} past tokens", tally)


if __name__ == "__main__":
    main()
