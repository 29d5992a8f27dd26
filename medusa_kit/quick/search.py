"""The search phase: as many held-out answers and tree sizes as fit into its time."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa_kit import console
from medusa_kit.data.readers import AnswerRow
from medusa_kit.engine.engine import Engine
from medusa_kit.engine.load import find_heads
from medusa_kit.errors import MedusaKitError
from medusa_kit.heads.checkpoint import load_heads, says_ours
from medusa_kit.infer.decode.repeated_steps import RepeatedSteps
from medusa_kit.quick.answers import read_answers
from medusa_kit.quick.session import Session
from medusa_kit.settings.recipe import load_recipe
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.replay import replay
from medusa_kit.tree.search import best_trees
from medusa_kit.tree.statistics import RankStatistics
from medusa_kit.tuning import calibrate, step_time
from medusa_kit.tuning.results import take_statistics, write_search
from medusa_kit.tuning.tree_search import DEFAULT_SIZES, HELD_OUT, search_tree

REPORTED = (4, 8, 16, 64)  # nodes of the static trees in the report
# Tree sizes to time and whether dynamic ones too, the most thorough first.
CHOICES: tuple[tuple[tuple[int, ...], bool], ...] = (
    (DEFAULT_SIZES, True),
    ((1, 2, 3, 4, 6, 8, 12, 16, 32), True),
    ((1, 2, 4, 6, 8, 12, 16), True),
    ((1, 2, 4, 6, 8, 12, 16), False),
    ((1, 4, 8, 16), False),
    ((1, 4, 8), False),
)
CALIBRATION = 0.5  # of the phase's time
# Answers: to see how long they take; calibrated on, whatever they take; for dynamic trees too.
TRIED, MIN_PROMPTS, ENOUGH = 2, 8, 24
NODES_AT_COST = 8  # nodes that double a step's time, as on a CPU; elsewhere it is less
STEPS = 3  # of each tree and prefix in a round, one of them plain


def run_search(session: Session) -> dict[str, Any]:
    engine = session.engine(CandidateTree.root_only())
    seconds = session.share("search")
    answers = calibrate.usable_answers(session.base, read_answers(session.held_out))
    step = plain_step(session.plain, answers[0].prompt_ids)
    sizes, dynamic = _sizes(engine, step, (1 - CALIBRATION) * seconds)
    max_nodes = max(sizes) if dynamic else None
    count = _affordable(session, engine, answers, max_nodes, CALIBRATION * seconds)
    if dynamic and count < min(ENOUGH, len(answers)):  # growing trees takes most of the time
        dynamic, max_nodes = False, None
        count = _affordable(session, engine, answers, max_nodes, CALIBRATION * seconds)
    answers = answers[:count]
    console.note(
        f"calibrating on {len(answers)} answers, timing trees of {sizes[0]} to {sizes[-1]} nodes"
        + (", dynamic ones too" if dynamic else "")
    )
    stats = take_statistics(engine, answers, None, session.prompts.source, max_nodes)
    tree_search = search_tree(engine, stats, sizes)
    write_search(engine, tree_search, session.heads, stats)
    chosen = tree_search.chosen
    return {
        "calibration_answers": len(answers),
        "calibration_positions": stats.num_positions,
        "static": {} if engine.verifier.chains_only else _static_lengths(stats),
        "static_before": {} if engine.verifier.chains_only else _lengths_before(session, answers),
        "chain": _chain(stats),
        "chosen": {"nodes": chosen.num_nodes, "dynamic": chosen.dynamic is not None,
                   "acceptance_length": chosen.acceptance_length},
        "predicted_speed_up": chosen.speed_up,
        "plain_step_seconds": step,
    }  # fmt: skip


def plain_step(engine: Engine, prompt_ids: Sequence[int], tokens: int = 9) -> float:
    """Seconds of a step of plain decoding."""
    prompt = list(prompt_ids)[-engine.base.info.context_length // 2 :]
    steps = RepeatedSteps(engine.verifier, [prompt])
    timings = steps.settled(engine.drafter_for("none"), tokens)
    return statistics.median(timing.seconds for timing in timings)


def _sizes(engine: Engine, step: float, seconds: float) -> tuple[tuple[int, ...], bool]:
    """(numbers of nodes, whether dynamic trees too): the most thorough choice that fits."""
    if engine.verifier.chains_only:
        assert engine.heads is not None
        return tuple(range(1, engine.heads.num_heads + 2)), False
    rounds = step_time.ROUNDS if engine.verifier.reads_packed_weights else 1
    repeats = rounds + step_time.REPEATS  # about; at least one in each round
    for sizes, dynamic in CHOICES:
        trees = sum((1 + size / NODES_AT_COST) * (2 if dynamic else 1) for size in sizes)
        if trees * step * STEPS * repeats * len(step_time.PREFIX_LENGTHS) <= seconds:
            return sizes, dynamic
    return CHOICES[-1]


def _affordable(
    session: Session,
    engine: Engine,
    answers: Sequence[AnswerRow],
    max_nodes: int | None,
    seconds: float,
) -> int:
    """How many answers can be calibrated on in this time."""
    assert engine.heads is not None
    tried = answers[:TRIED]
    dynamic = None
    if max_nodes is not None:
        dynamic = calibrate.fitted_dynamic_tree(session.base, engine.heads, tried, max_nodes)
    began = session.clock()
    calibrate.calibrate(session.base, engine.heads, tried, dynamic=dynamic)
    answer_seconds = (session.clock() - began) / len(tried)
    return max(MIN_PROMPTS, int(min(len(answers), seconds / max(answer_seconds, 1e-9))))


def _chain(statistics: RankStatistics) -> dict[str, Any]:
    """The acceptance of engines that verify the top token of each head and no tree, by replay."""
    replayed = replay(CandidateTree.chain(statistics.num_heads), statistics)
    return {"acceptance_length": replayed.acceptance_length,
            "acceptance_by_depth": replayed.acceptance_by_depth}  # fmt: skip


def _lengths_before(session: Session, answers: Sequence[AnswerRow]) -> dict[str, float]:
    """What the heads come to that training went on from, or that the base had, on the same
    answers; empty where there are none, or none that can be used."""
    earlier = load_recipe(session.recipe).train.heads_from or find_heads(session.base, "auto")
    if earlier is None or not says_ours(Path(earlier)):
        return {}
    try:
        heads = load_heads(Path(earlier), session.base)
    except MedusaKitError as error:
        console.warn(f"the heads that were there cannot be compared with: {error.message}")
        return {}
    return _static_lengths(calibrate.calibrate(session.base, heads, answers))


def _static_lengths(statistics: RankStatistics) -> dict[str, float]:
    """Acceptance length by replay, by number of nodes."""
    fit, held_out = statistics.split(HELD_OUT, seed=0)
    trees = best_trees(fit, list(REPORTED), held_out)
    return {str(size): trees[size].replayed_length for size in REPORTED if size in trees}
