"""Guesses for rows whose answers follow a grammar: none that it forbids, and what it forces."""

from collections.abc import Sequence

from medusa_kit.drafters.estimates import AcceptanceEstimate
from medusa_kit.drafters.trie import Trie
from medusa_kit.errors import MedusaKitError
from medusa_kit.infer.decode.accept.grammar import GrammarMask
from medusa_kit.infer.draft import State

KEY = ("grammar",)


def under_grammar(
    tries: Sequence[Trie],
    masks: Sequence[GrammarMask | None],
    state: State,
    acceptance: AcceptanceEstimate,
) -> list[Trie]:
    """The rows' guesses; those of rows without a grammar, and so without a mask, as they are."""
    texts = zip(state.tokens, state.roots_B, strict=True)
    return [
        trie if mask is None else _checked(trie, mask, [*tokens, root], acceptance)
        for trie, mask, (tokens, root) in zip(tries, masks, texts, strict=True)
    ]


def _checked(
    trie: Trie, mask: GrammarMask, text: list[int], acceptance: AcceptanceEstimate
) -> Trie:
    try:
        return _row(trie, mask, text, acceptance)
    except MedusaKitError:  # a limit of the grammar, of which its row fails when it is verified
        return trie


def _row(trie: Trie, mask: GrammarMask, text: list[int], acceptance: AcceptanceEstimate) -> Trie:
    kept, texts = [0], {0: text}
    for node in range(1, trie.num_nodes):
        before = texts.get(trie.parents[node])
        if before is not None and mask.allows(now := [*before, trie.tokens[node]]):
            kept.append(node)
            texts[node] = now
    allowed = trie.kept(kept)
    allowed.add_chain(mask.forced(text), acceptance.chance(KEY, 1.0), KEY)
    return allowed
