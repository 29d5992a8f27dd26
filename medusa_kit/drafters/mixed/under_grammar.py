"""Draft tokens for rows whose answers follow a grammar: none that it forbids, and what it
forces."""

from collections.abc import Sequence

from medusa_kit.drafters.estimates import AcceptanceEstimate
from medusa_kit.errors import MedusaKitError
from medusa_kit.infer.decode.accept.grammar import GrammarMask
from medusa_kit.infer.decode.drafter import State
from medusa_kit.tree.draft_tree import DraftTree

KEY = ("grammar",)


def under_grammar(
    trees: Sequence[DraftTree],
    masks: Sequence[GrammarMask | None],
    state: State,
    acceptance: AcceptanceEstimate,
) -> list[DraftTree]:
    """The rows' draft tokens; those of rows without a grammar, and so without a mask, as they
    are."""
    texts = zip(state.tokens, state.roots_B, strict=True)
    return [
        tree if mask is None else _checked(tree, mask, [*tokens, root], acceptance)
        for tree, mask, (tokens, root) in zip(trees, masks, texts, strict=True)
    ]


def _checked(
    tree: DraftTree, mask: GrammarMask, text: list[int], acceptance: AcceptanceEstimate
) -> DraftTree:
    try:
        return _row(tree, mask, text, acceptance)
    except MedusaKitError:  # a limit of the grammar, of which its row fails when it is verified
        return tree


def _row(
    tree: DraftTree, mask: GrammarMask, text: list[int], acceptance: AcceptanceEstimate
) -> DraftTree:
    kept, texts = [0], {0: text}
    for node in range(1, tree.num_nodes):
        before = texts.get(tree.parents[node])
        if before is not None and mask.allows(now := [*before, tree.tokens[node]]):
            kept.append(node)
            texts[node] = now
    allowed = tree.kept(kept)
    allowed.add_chain(mask.forced(text), acceptance.chance(KEY, 1.0), KEY)
    return allowed
