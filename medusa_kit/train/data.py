"""Encoded conversations -> what each head should predict at each position.

heads[k] (from 0) at token t predicts token t + 2 + k; the base's own prediction is token t + 1.

Shapes: T tokens of one example, P positions used, K heads, J = K + 1 tokens ahead, M examples.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from medusa_kit.data.chat import EncodedExample
from medusa_kit.equal_rows import MIN_SAME, contents, conversations, groups_of, held_out
from medusa_kit.errors import DataError
from medusa_kit.train.features.rows import HeadTargets

# What stays on one side of a split: turns of a conversation that are rows of their own, rows with
# one turn in common, with all of an answer in common, equal rows, nothing.
TOGETHER = CONVERSATIONS, TURNS, ANSWERS, EQUAL, APART = (
    "conversations", "turns", "answers", "equal rows", "nothing"
)  # fmt: skip


def head_targets(example: EncodedExample, num_heads: int) -> HeadTargets:
    """Positions and targets of one example.

    Position t is used when the assistant wrote token t + 1 (loss_mask). Head k has a target when it
    wrote all of tokens t + 2 .. t + 2 + k too, in the same turn: no head looks past its end.
    """
    ids_T = np.asarray(example.input_ids, dtype=np.int32)
    written_T = np.asarray(example.loss_mask, dtype=bool)
    begins_T = np.isin(np.arange(len(ids_T)), example.turn_starts)
    positions_P = np.flatnonzero(written_T[1:])
    ahead_PJ = np.full((len(positions_P), num_heads + 1), -1, dtype=np.int32)
    ahead_PJ[:, 0] = ids_T[positions_P + 1]
    unbroken_P = np.ones(len(positions_P), dtype=bool)
    for k in range(num_heads):
        targets_P = positions_P + 2 + k
        inside_P = targets_P < len(ids_T)
        unbroken_P &= inside_P
        unbroken_P[inside_P] &= (written_T & ~begins_T)[targets_P[inside_P]]
        ahead_PJ[unbroken_P, k + 1] = ids_T[targets_P[unbroken_P]]
    return HeadTargets(example.input_ids, positions_P, ahead_PJ)


def prepare(examples: Sequence[EncodedExample], num_heads: int) -> list[HeadTargets]:
    """Targets of all examples; examples without a target for any head are left out."""
    prepared = [head_targets(example, num_heads) for example in examples]
    return [item for item in prepared if (item.targets_PK >= 0).any()]


def on_all_tokens(items: Sequence[HeadTargets]) -> list[HeadTargets]:
    """Rows with the tokens of prompts as roots and targets too.

    Left out are the first tokens of prompts where they are the same in all rows, such as a system
    prompt.
    """
    first, last = min(item.input_ids for item in items), max(item.input_ids for item in items)
    same = next((i for i, pair in enumerate(zip(first, last, strict=False)) if len({*pair}) > 1), 0)
    masks = [np.arange(len(item.input_ids)) >= same for item in items]
    for item, mask in zip(items, masks, strict=True):
        mask[item.positions_P + 1] = True  # what the assistant wrote
    num_heads = items[0].targets_PK.shape[1]
    return [
        head_targets(EncodedExample(item.input_ids, mask.tolist(), 0), num_heads)
        for item, mask in zip(items, masks, strict=True)
    ]


def split(
    items: Sequence[HeadTargets], eval_fraction: float, seed: int, together: str = TOGETHER[0]
) -> tuple[list[HeadTargets], list[HeadTargets]]:
    """(training, held out), split by whole examples, the same for the same seed.

    Equal rows stay on one side, and rows with a prompt, an answer or one turn of an answer in
    common, or of one conversation (equal_rows.py); less than that where `together` says so, as in
    earlier versions. Without such rows all give the same split.

    Raises DataError when there are not enough examples for one on each side.
    """
    rows = [tuple(item.input_ids) if together != APART else n for n, item in enumerate(items)]
    groups = groups_of(rows, *_parts(items, together))
    if len(groups) < 2:
        same = ", all of them the same" if len(items) > 1 else ""
        raise DataError(
            f"{len(items)} usable examples{same}; training needs at least 2 that differ, one of "
            "them held out",
            hint="an example needs an assistant turn of 2 tokens or more; "
            "`medusa-kit data inspect` shows what is trained on",
        )
    num_held_out = min(max(round(len(items) * eval_fraction), 1), len(items) - 1)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(groups), generator=generator).tolist()
    chosen = held_out(groups, order, num_held_out)
    training = [item for index, item in enumerate(items) if index not in chosen]
    return training, [items[index] for index in sorted(chosen)]


def _parts(items: Sequence[HeadTargets], together: str) -> list[list[list[tuple[str, int]]]]:
    """What other rows may have too: the first prompt, and all that the assistant wrote; with each
    turn of it before that, and with the earlier turns that the prompt holds first of all."""
    if together not in (CONVERSATIONS, TURNS, ANSWERS):
        return []
    whole = [_part(item) for item in items]
    if together == ANSWERS:
        return [whole]
    turns = [stretch_contents([item])[:, 1].tolist() for item in items]
    each = [[*own, *(("answer", turn) for turn in more)]
            for own, more in zip(whole, turns, strict=True)]  # fmt: skip
    if together == TURNS:
        return [each, whole]
    chats = conversations([_prompt(item) for item in items], MIN_SAME)
    held = [[*own, *(("conversation", row) for row in more)]
            for own, more in zip(each, chats, strict=True)]  # fmt: skip
    return [held, each, whole]


def _part(item: HeadTargets) -> list[tuple[str, int]]:
    prompt, answer = contents(_prompt(item), item.ahead_PJ[:, 0].tolist())
    return [("prompt", prompt), ("answer", answer)]


def _prompt(item: HeadTargets) -> list[int]:
    """What comes before all that the assistant wrote."""
    return item.input_ids[: int(item.positions_P[0]) + 1]


def stretch_starts(item: HeadTargets) -> np.ndarray:
    """Where each stretch of the assistant's tokens begins among the positions: behind those where
    no head has a target."""
    return np.append(0, np.flatnonzero(item.ahead_PJ[:-1, 1] < 0) + 1)


def stretch_contents(items: Sequence[HeadTargets]) -> np.ndarray:
    """int64 [A, 2]: `contents` of each stretch of the assistant's tokens, whose prompt is its
    row's."""
    found = []
    for item in items:
        prompt = _prompt(item)
        for answer in np.split(item.ahead_PJ[:, 0], stretch_starts(item)[1:]):
            found.append(contents(prompt, answer.tolist()))
    return np.array(found, dtype=np.int64).reshape(-1, 2)


def most_frequent_ids(
    items: Sequence[HeadTargets], size: int, stop_token_ids: frozenset[int]
) -> torch.Tensor:
    """Ascending token ids for a reduced projection: the most frequent targets and all stop tokens.

    At most `size` ids; fewer when the data has fewer different tokens. Ties go to the smaller id.
    """
    counts: Counter[int] = Counter()
    for item in items:
        ids, numbers = np.unique(item.targets_PK[:, 0], return_counts=True)
        counts.update(dict(zip(ids.tolist(), numbers.tolist(), strict=True)))
    del counts[-1]
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    kept = list(stop_token_ids) + [token for token in ranked if token not in stop_token_ids]
    return torch.tensor(sorted(kept[:size]), dtype=torch.int64)


def coverage(items: Sequence[HeadTargets], ids_R: torch.Tensor) -> float:
    """Share of all heads' targets that are among `ids_R`."""
    targets = np.concatenate([item.targets_PK.ravel() for item in items])
    return float(np.isin(targets[targets >= 0], ids_R.numpy()).mean())
