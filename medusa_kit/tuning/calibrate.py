"""Calibration: the rank at which each head had the true token, over answers that the model wrote.

Each answer takes one teacher-forced forward; every position from the last prompt token on counts.

Shapes: B batch, T tokens, D hidden, K heads, J = K + 1 tokens ahead, P positions.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from medusa_kit import console
from medusa_kit.base.model import BaseModel
from medusa_kit.base.origin import ANSWERS, HEADS, digest_of
from medusa_kit.data.chat import check_ids
from medusa_kit.data.readers import AnswerRow
from medusa_kit.drafters.heads.copying import SMOOTHING
from medusa_kit.drafters.heads.dynamic import DynamicDrafter
from medusa_kit.equal_rows import contents
from medusa_kit.errors import DataError
from medusa_kit.heads import MedusaHeads
from medusa_kit.heads.ranks import UNAVAILABLE, token_ranks
from medusa_kit.infer.cpu.packed.int8_weights import refuse_int8_weights
from medusa_kit.infer.decode.accept.rules import accept
from medusa_kit.no_gradients import no_gradients
from medusa_kit.tree.dynamic import NUM_RANKS as DYNAMIC_RANKS
from medusa_kit.tree.dynamic import DynamicTree
from medusa_kit.tree.statistics import MISSING, RankStatistics
from medusa_kit.tuning.temperature import fit_temperatures

NUM_RANKS = 32  # ranks recorded; the best tree of 64 nodes uses some 20 at depth 1
BATCH_TOKENS = 4096
FIT_POSITIONS = 4096


def calibrate(
    base: BaseModel,
    heads: MedusaHeads,
    answers: Sequence[AnswerRow],
    num_ranks: int = NUM_RANKS,
    dynamic: DynamicTree | None = None,
) -> RankStatistics:
    """Rank statistics of `heads` over answers; empty answers and too long ones are left out.

    With `dynamic`, the tree that it grows at every position is recorded too; where heads read the
    path this takes most of the time. Raises DataError when no answer remains.
    """
    base.changes()  # the statistics say of which weights they are
    usable = usable_answers(base, answers)
    drafter = None if dynamic is None else DynamicDrafter(heads, dynamic)
    ranks: list[np.ndarray] = [np.empty(0)] * len(usable)
    entries: list[np.ndarray] = [np.empty(0)] * len(usable)
    with console.progress("calibrating", len(usable), "answers") as bar:
        for index, hidden_PD in hidden_states(base, usable):
            ahead_PJ = tokens_ahead(usable[index].response_ids, heads.num_heads)
            ranks[index] = token_ranks(heads, hidden_PD, ahead_PJ, num_ranks).numpy()
            if drafter is not None:
                prompt_ids = usable[index].prompt_ids
                entries[index] = tree_entries(drafter, hidden_PD, ahead_PJ, prompt_ids)
            bar.advance()
    starts = np.cumsum([0] + [len(r) for r in ranks[:-1]])
    meta = {
        "base_model": base.info.name,
        **base.origin,
        HEADS: heads.digest,
        ANSWERS: digest_of([[each.prompt_ids, each.response_ids] for each in usable]),
        "num_answers": len(usable),
        **({} if dynamic is None else {"dynamic": dynamic.as_dict()}),
    }
    return RankStatistics(
        np.concatenate(ranks), starts, min(num_ranks, heads.num_columns), meta,
        None if dynamic is None else np.concatenate(entries),
        np.array([contents(each.prompt_ids, each.response_ids) for each in usable]),
    )  # fmt: skip


def fitted_dynamic_tree(
    base: BaseModel, heads: MedusaHeads, answers: Sequence[AnswerRow], num_nodes: int
) -> DynamicTree:
    """A dynamic tree with temperatures fitted on about FIT_POSITIONS positions of the answers.

    Answers are sampled evenly from the list. Raises DataError when none can be used.
    """
    usable = usable_answers(base, answers)
    stride = max(1, sum(len(a.response_ids) for a in usable) // FIT_POSITIONS)
    hidden, ahead = [], []
    with console.progress("fitting temperatures", len(usable[::stride]), "answers") as bar:
        for index, hidden_PD in hidden_states(base, usable[::stride]):
            hidden.append(hidden_PD.clone())
            ahead.append(tokens_ahead(usable[::stride][index].response_ids, heads.num_heads))
            bar.advance()
        temperatures = fit_temperatures(heads, torch.cat(hidden), torch.cat(ahead))
    ranks = min(DYNAMIC_RANKS, heads.num_columns)
    return DynamicTree(num_nodes, temperatures, ranks, smoothing=SMOOTHING)


def usable_answers(base: BaseModel, answers: Sequence[AnswerRow]) -> list[AnswerRow]:
    """Answers with tokens that fit the context.

    Raises DataError when there is none, and for a token that the base does not have; ConfigError
    for a base with rounded weights.
    """
    refuse_int8_weights(base, "statistics are taken of the checkpoint's own answers")
    context = base.info.context_length
    usable = [a for a in answers if a.response_ids
              and len(a.prompt_ids) + len(a.response_ids) <= context]  # fmt: skip
    if not usable:
        raise DataError(
            f"none of the {len(answers)} answers can be calibrated on",
            hint="answers need response_ids and must fit the model's context",
        )
    for answer in usable:
        check_ids([*answer.prompt_ids, *answer.response_ids], base.info.vocab_size, answer.row)
    return usable


@torch.no_grad()
def hidden_states(base: BaseModel, answers: Sequence[AnswerRow]) -> Iterator[tuple[int, Tensor]]:
    """(index, hidden_PD) of each answer, row p before answer token p, in batches of similar length
    and so in another order."""
    order = sorted(range(len(answers)), key=lambda i: _size(answers[i]))
    for batch in _batches(order, answers):
        ids_BT, mask_BT = _padded(base, [answers[i] for i in batch])
        hidden_BTD = base.hidden_states(ids_BT, mask_BT)
        for row, index in enumerate(batch):
            first = len(answers[index].prompt_ids) - 1
            yield index, hidden_BTD[row, first : first + len(answers[index].response_ids)]


@no_gradients
def tree_entries(
    drafter: DynamicDrafter,
    hidden_PD: Tensor,
    ahead_PJ: Tensor,
    prompt_ids: Sequence[int] = (),
    chunk_positions: int = 32,
) -> np.ndarray:
    """entries_PK (int16): the number of nodes with which the tree grown at each position holds the
    true path as far as head k; MISSING where it never does. Position p has the prompt and p + 1
    tokens of the answer to copy from, its root last."""
    entries_PK = np.full(ahead_PJ[:, 1:].shape, MISSING, dtype=np.int16)
    text_T = np.concatenate([np.array(prompt_ids, dtype=np.int64), ahead_PJ[:, 0].numpy()])
    for start in range(0, len(hidden_PD), chunk_positions):
        ahead = ahead_PJ[start : start + chunk_positions].tolist()
        hidden_BD = hidden_PD[start : start + chunk_positions].to(drafter.heads.base.device)
        lengths = range(start + 1, start + len(ahead) + 1)
        texts = [text_T[: len(prompt_ids) + length] for length in lengths]
        texts = texts if drafter.tree.smoothing else []
        grown = drafter.grow(hidden_BD, [row[0] for row in ahead], texts=texts)
        for row, (tokens, parents, _) in enumerate(grown):
            truth = iter([*ahead[row][1:], UNAVAILABLE])  # read once for each node, down the path
            path, _ = accept(tokens, parents, _truth_at(truth), entries_PK.shape[1])
            entries_PK[start + row, : len(path)] = np.array(path, dtype=np.int16) + 1
    return entries_PK


def _truth_at(truth: Iterator[int]) -> Callable[[int], int]:
    return lambda _: next(truth)


def tokens_ahead(response_ids: Sequence[int], num_heads: int) -> Tensor:
    """ahead_PJ: row p comes before answer token p, its root; head k's target is token p + 1 + k."""
    T = len(response_ids)
    padded = torch.tensor([*response_ids, *[UNAVAILABLE] * num_heads])
    return torch.stack([padded[j : j + T] for j in range(num_heads + 1)], dim=1)


def _size(answer: AnswerRow) -> int:
    return len(answer.prompt_ids) + len(answer.response_ids)


def _batches(order: Sequence[int], answers: Sequence[AnswerRow]) -> Iterator[list[int]]:
    """Batches of answers of similar length, at most BATCH_TOKENS padded tokens each."""
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) + 1) * _size(answers[index]) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    yield batch


def _padded(base: BaseModel, answers: Sequence[AnswerRow]) -> tuple[Tensor, Tensor]:
    """(input_ids_BT, attention_mask_BT), padded on the right."""
    T = max(_size(answer) for answer in answers)
    ids_BT = torch.zeros(len(answers), T, dtype=torch.int64)
    mask_BT = torch.zeros(len(answers), T, dtype=torch.int64)
    for row, answer in enumerate(answers):
        ids = [*answer.prompt_ids, *answer.response_ids]
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        mask_BT[row, : len(ids)] = 1
    return ids_BT.to(base.device), mask_BT.to(base.device)
