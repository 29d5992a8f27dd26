"""A drafter of your own: `python examples/own_drafter.py [MODEL]`.

It drafts from a phrase book. What it proposes can never change the text, only the speed.
"""

import sys

import medusa_kit
from medusa_kit.drafters.tree_drafter import TreeDrafter
from medusa_kit.tree.draft_tree import DraftTree

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"
PHRASES = [
    "scattered by the Earth's atmosphere",
    "shorter wavelengths of light",
    "Rayleigh scattering",
]


class PhraseBook(TreeDrafter):
    """Where a phrase has begun, the rest of it."""

    name, num_nodes = "phrases", 8

    def __init__(self, device, phrases):
        super().__init__(device)
        self.phrases = phrases

    def guess(self, state):
        """A tree for each request: its root is the token that was chosen last."""
        trees = [DraftTree(root) for root in state.roots_B]
        for tree, root in zip(trees, state.roots_B, strict=True):
            for phrase in self.phrases:
                if root in phrase[:-1]:
                    rest = phrase[phrase.index(root) + 1 :]
                    tree.add_chain(rest[: self.num_nodes - 1], chance=0.5, key=self.name)
                    break
        return trees


with medusa_kit.load(MODEL, heads=None) as engine:
    book = [engine.base.tokenizer.encode(f" {one}", add_special_tokens=False) for one in PHRASES]
    question = [{"role": "user", "content": "Why is the sky blue?"}]
    answer = engine.generate(
        question, max_new_tokens=96, drafter=PhraseBook(engine.base.device, book)
    )
    plain = engine.generate(question, max_new_tokens=96, drafter="none")
    print(answer.text)
    print(
        f"{answer.stats.acceptance_length:.2f} tokens a step, the same text:",
        answer.text == plain.text,
    )
