"""The doctor's checks of heads: what they predict, and whether decoding accepts it.

Shapes: T tokens of an answer, P positions, K heads, J = K + 1 tokens ahead.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from medusa_kit.base.origin import HEADS
from medusa_kit.base.origin import compare as compare_origins
from medusa_kit.base.tokenizer.encoding_digest import Encodings, compare
from medusa_kit.bench.doctor_case import (
    DRAWN,
    Case,
    Finding,
    check,
    ok,
    problem,
    skipped,
    warning,
)
from medusa_kit.bench.doctor_data import SELF_DISTIL
from medusa_kit.data.chat import EncodedExample
from medusa_kit.drafters.plain import PlainDrafter
from medusa_kit.files import parse_json
from medusa_kit.heads import MedusaHeads
from medusa_kit.heads.derived import STATISTICS_NAME
from medusa_kit.infer.decode.drafter import Drafter, State
from medusa_kit.infer.forest import Forest
from medusa_kit.store.beside import found_beside
from medusa_kit.train import data as training
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.replay import replay
from medusa_kit.tree.shape import chain
from medusa_kit.tree.statistics import NOT_AVAILABLE, RankStatistics
from medusa_kit.tuning import calibrate as calibration

MIN_COVERED = 0.85  # share of trained tokens that a reduced projection should hold
ORACLE_STEPS = 4
ROUNDED = {torch.float64: 0.02, torch.float32: 0.02}  # share of steps that near-ties may change
MIN_POSITIONS = 20  # fewest for a meaningful share


@check("heads and base")
def heads_fit(case: Case) -> Finding:
    """Were the heads trained for this base, at this precision?"""
    if case.heads_error is not None:
        return problem(case.heads_error.message, case.heads_error.hint)
    if case.heads is None:
        return skipped("no heads given")
    config, info = case.heads.config, case.base.info
    what = f"{config.num_heads} {config.kind} heads for {config.base_model_name}"
    if config.base_quantized != info.quantized:
        kinds = ["a full-precision", "a quantised"]
        return warning(
            f"{what}: trained on {kinds[config.base_quantized]} copy, used on "
            f"{kinds[info.quantized]} one",
            "text stays exact, acceptance may be lower: train on the copy that you use",
        )
    if compare(config.encoding, case.base.encoding) is Encodings.OTHER:
        return warning(
            f"{what}: trained on text that was tokenized differently than this base tokenizes it",
            "text stays exact, acceptance may be lower: calibrate anew with `medusa-kit "
            "tree-search --prompts FILE`, or train on the model's answers as they are now",
        )
    return ok(f"{what}, fingerprint {info.fingerprint[:10]}")


@check("projection", heads=True)
def projection(case: Case) -> Finding:
    """Can the heads predict the data's tokens and the end of an answer?"""
    assert case.heads is not None
    config, ids_R = case.heads.config, case.heads.column_ids
    if ids_R is None:
        return ok(f"{config.projection}: every token has a column")
    columns = set(ids_R.tolist())
    what = f"reduced to {len(columns):,} of {config.vocab_size:,} tokens"
    if missing := sorted(case.base.stop_token_ids - columns):
        return problem(
            f"{what}, without the stop token {missing[0]}",
            "no head can ever draft the end of an answer: train with a larger reduced_size",
        )
    trained = [token for answer in case.answers for token in answer.response_ids]
    if not trained:
        return ok(what)
    share = sum(token in columns for token in trained) / len(trained)
    what += f", which are {share:.1%} of the trained tokens"
    if share < MIN_COVERED:
        return warning(what, "train with a larger reduced_size, on text like this")
    return ok(what)


@check("head offset", heads=True, trees=True)
def head_offset(case: Case) -> Finding:
    """Heads that know the future must be accepted to full depth, heads off by one must not."""
    assert case.heads is not None
    K = case.heads.num_heads
    if wrong := _wrong_targets(K):
        return problem(wrong, "heads[k] at token t must predict token t + 2 + k: this is a bug")
    what = ""
    for trial in (_oracle_trial(case, prompt, K) for prompt in case.prompts):
        if trial is None:
            continue
        true, full, shifted, expected = trial
        if true != full or shifted != expected:
            return problem(
                f"true tokens are accepted {_mean(true):.2f} a step, expected {_mean(full):.2f}; "
                f"shifted by one {_mean(shifted):.2f}, expected {_mean(expected):.2f}",
                "head k in training is not the head at depth k + 1 in decoding: this is a bug",
            )
        what = (
            f"true tokens are accepted {_mean(true):.2f} a step ({K} heads + 1), "
            f"shifted by one {_mean(shifted):.2f}"
        )
        if _mean(shifted) < (1 + _mean(true)) / 2:
            return ok(what)
    if what:
        return warning(f"{what}: the answers repeat themselves", "give data with other prompts")
    return warning(
        "the answer changes with the number of nodes, so the offset cannot be checked",
        "rounding decides near-ties: repeat in float32, and see `medusa-kit verify`",
    )


def _wrong_targets(num_heads: int) -> str | None:
    """Compares the targets of training and of calibration on an answer of different tokens."""
    prompt, T = [1, 2, 3], num_heads + 5
    answer = list(range(11, 11 + T))
    padded = [*answer, *[-1] * num_heads]
    true_PJ = [padded[p : p + num_heads + 1] for p in range(T)]
    ahead_PJ = training.head_targets(_example(prompt, answer), num_heads).ahead_PJ
    calibrated_PJ = calibration.tokens_ahead(answer, num_heads)
    targets = {"training": ahead_PJ.tolist(), "calibration": calibrated_PJ.tolist()}
    for source, targets_PJ in targets.items():
        if targets_PJ != true_PJ:
            return (
                f"{source} takes {targets_PJ[0]} for the root and the heads' tokens, "
                f"expected {true_PJ[0]}"
            )
    return None


def _example(prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> EncodedExample:
    mask = [False] * len(prompt_ids) + [True] * len(answer_ids)
    return EncodedExample([*prompt_ids, *answer_ids], mask, 0)


class OracleDrafter(Drafter):
    """Heads that know the answer from training's targets, `shift` positions late."""

    name = "oracle"

    def __init__(
        self, prompt_ids: Sequence[int], truth: Sequence[int], heads: MedusaHeads, shift: int = 0
    ) -> None:
        K = heads.num_heads
        targets = training.head_targets(_example(prompt_ids, truth), K).targets_PK
        blank_PK = np.zeros((shift, K), dtype=targets.dtype)
        self._targets_PK = np.concatenate([targets[shift:], blank_PK]).clip(min=0)
        self._start, self._device = len(prompt_ids), heads.base.device
        self.num_nodes = K + 1
        self._chain = chain(self.num_nodes)

    def guesses(self, position: int) -> list[int]:
        """The draft after the root, the answer's token at `position`."""
        return self._targets_PK[position].tolist()

    def propose(self, state: State) -> Forest:
        tokens = [state.roots_B[0], *self.guesses(len(state.tokens[0]) - self._start)]
        return Forest(torch.tensor(tokens, device=self._device), [self._chain])


Trial = tuple[list[int], list[int], list[int], list[int]]


def _oracle_trial(case: Case, prompt_ids: Sequence[int], K: int) -> Trial | None:
    """Tokens of each step: with true drafts, as expected; with shifted ones, as expected then.

    None where rounding changes the answer, or nothing is left to decode.
    """
    assert case.heads is not None
    tokens = 1 + ORACLE_STEPS * (K + 1)
    plain, _ = case.decode(PlainDrafter(case.base.device), prompt_ids, tokens, stop=False)
    truth = plain.token_ids
    remaining = len(truth) - 1  # the first is the prefill's
    steps: list[list[int]] = []
    for shift in (0, 1):
        oracle = OracleDrafter(prompt_ids, truth, case.heads, shift)
        request, emitted = case.decode(oracle, prompt_ids, tokens, stop=False)
        if request.token_ids != truth or not remaining:
            return None
        steps.append(emitted)
    full = [min(K + 1, remaining - done) for done in range(0, remaining, K + 1)]
    return steps[0], full, steps[1], _steps_when_shifted(truth, K)


def _steps_when_shifted(truth: Sequence[int], K: int) -> list[int]:
    """Tokens of each step if every draft token is the token after the right one, from the text
    alone.

    Past the end of the text draft tokens are zeros, as in the drafter.
    """
    T, emitted, position = len(truth), [], 0
    while position < T - 1:
        depth = 0
        while depth < K and position + 1 + depth < T:
            after = position + 2 + depth
            guess = truth[after] if after < T else 0
            if guess != truth[position + 1 + depth]:
                break
            depth += 1
        emitted.append(min(depth + 1, T - 1 - position))
        position += emitted[-1]
    return emitted


def _mean(steps: Sequence[int]) -> float:
    return sum(steps) / len(steps)


@check("replay and decoding", heads=True, trees=True)
def replay_equals_decoding(case: Case) -> Finding:
    """Replay of the decoded text by calibration must accept what decoding accepted."""
    assert case.heads is not None
    K, requests = case.heads.num_heads, case.served
    steps = sum(request.num_steps for request in requests)
    if not steps:
        return skipped("every answer is one token long, so nothing was drafted")
    by_depth = [request.depth_counts for request in requests]
    counts = [sum(steps.get(depth, 0) for steps in by_depth) for depth in range(K + 1)]
    replayed = replay(CandidateTree.chain(K), case.served_statistics)
    length = (sum(len(request.token_ids) for request in requests) - len(requests)) / steps
    if counts == replayed.steps_by_depth:
        depths = _shown([sum(counts[d:]) / steps for d in range(1, K + 1)])
        return ok(
            f"both accept {length:.2f} tokens a step over {steps} steps; by depth {depths}, a chain"
        )
    what = (
        f"decoding accepts {length:.2f} tokens a step, replay of the same text "
        f"{replayed.acceptance_length:.2f}; steps by depth {counts} and {replayed.steps_by_depth}"
    )
    other = sum(abs(a - b) for a, b in zip(counts, replayed.steps_by_depth, strict=True))
    if other <= max(2, ROUNDED.get(case.base.dtype, 0.1) * steps):
        return warning(what, "near-ties of the heads may flip by rounding: repeat in float64")
    return problem(what, "decoding drafts other tokens than calibration ranks: this is a bug")


@check("data and decoded text", data=True, heads=True, trees=True)
def data_is_like_decoded_text(case: Case) -> Finding:
    """Do the heads predict the data as well as the text that the base writes?"""
    if case.is_drawn:
        return skipped(DRAWN)
    if (both := _comparable(case.statistics, case.served_statistics)) is None:
        return skipped(f"fewer than {MIN_POSITIONS} tokens to compare")
    on_data, on_text, counts_text = both
    what = f"heads right down to each depth: data {_shown(on_data)}, decoded {_shown(on_text)}"
    # Few answers are decoded, so differences of up to three standard errors are allowed.
    excess = [abs(a - b) - 3 * math.sqrt(a * (1 - a) / count)
              for a, b, count in zip(on_data, on_text, counts_text, strict=False)]  # fmt: skip
    if max(excess) > case.tolerance:
        return warning(f"{what}: the data is not what the model writes", SELF_DISTIL)
    return ok(what)


@check("data and calibration", data=True, heads=True)
def data_is_like_calibration(case: Case) -> Finding:
    """Do the heads predict the data, such as what a server recorded, as well as the text that their
    tree was searched on?"""
    assert case.heads is not None
    folder = case.heads_folder
    path = None if folder is None else found_beside(folder, STATISTICS_NAME)
    if path is None or not path.is_file():
        return skipped("no statistics.npz of a tree search with the heads")
    statistics = RankStatistics.load(path)
    if compare_origins(statistics.meta, {HEADS: case.heads.digest}).other:
        return skipped(f"{path} is about other heads")
    if (both := _comparable(case.statistics, statistics)) is None:
        return skipped(f"fewer than {MIN_POSITIONS} tokens to compare")
    on_data, then, _ = both
    what = f"heads right down to each depth: data {_shown(on_data)}, tree search {_shown(then)}"
    what += f" ({DRAWN})" if case.is_drawn else ""
    if max(b - a for a, b in zip(on_data, then, strict=True)) > case.tolerance:
        return warning(
            f"{what}: this text is of another kind",
            "let a server record it, and train on that: `medusa-kit train --quick --from FILE`",
        )
    return ok(what)


def _comparable(
    data: RankStatistics, other: RankStatistics
) -> tuple[list[float], list[float], list[int]] | None:
    """The `chain_shares` of both and the numbers of `other`, down to where both have enough of
    them; None where they have too few at any depth."""
    (shares, counts), (others, counts_other) = chain_shares(data), chain_shares(other)
    depths = sum(min(pair) >= MIN_POSITIONS for pair in zip(counts, counts_other, strict=False))
    return (shares[:depths], others[:depths], counts_other) if depths else None


def chain_shares(statistics: RankStatistics) -> tuple[list[float], list[int]]:
    """For each depth: share of positions at which heads 0..d are all right, and their number."""
    right_PK = np.logical_and.accumulate(statistics.ranks_PK == 0, axis=1)
    counts_K = (statistics.ranks_PK != NOT_AVAILABLE).sum(0)
    return (right_PK.sum(0) / np.maximum(counts_K, 1)).tolist(), counts_K.tolist()


@check("trained accuracy", data=True, heads=True)
def trained_accuracy(case: Case) -> Finding:
    """Are the heads as good here as the training run measured on its held-out rows?"""
    trained = _held_out_top1(case)
    if trained is None:
        return skipped("no run.json with held-out scores next to the heads' folder")
    measured = case.statistics.marginals()[:, 0].tolist()
    pairs = [(m, t) for m, t in zip(measured, trained, strict=False) if t is not None]
    if not pairs:
        return skipped("run.json holds no held-out score")
    what = f"top-1 here {_shown([m for m, _ in pairs])}, trained {_shown([t for _, t in pairs])}"
    gaps = [m - t for m, t in pairs]
    if min(gaps) < -case.tolerance:
        return problem(
            f"{what}: worse than held out",
            "check that data, chat template and base precision are those of the training",
        )
    if max(gaps) > case.tolerance:
        return warning(f"{what}: better than held out", "check whether this data was trained on")
    return ok(what)


def _held_out_top1(case: Case) -> list[float | None] | None:
    """The scores of the training run, if the heads are still in its folder."""
    path = case.heads_folder.resolve().parent / "run.json" if case.heads_folder else None
    if path is None or not path.is_file():
        return None
    try:
        record: Any = parse_json(path.read_text())
        top1 = record["held_out"]["top1"]
        return [None if t is None or math.isnan(t) else float(t) for t in top1]
    except (ValueError, KeyError, TypeError):
        return None


def _shown(shares: Sequence[float]) -> str:
    return " ".join(f"{share:.2f}" for share in shares)
