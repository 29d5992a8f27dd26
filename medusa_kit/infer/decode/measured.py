"""Times a base model's steps by their nodes, once per machine and model, and keeps the figures.

A file in the cache folder holds them, named by all that they depend on.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from medusa_kit import console
from medusa_kit.base.processor import processor_name
from medusa_kit.base.remembered_checks import code_digest
from medusa_kit.infer.decode.drafter import Drafter, State
from medusa_kit.infer.decode.node_choice.cost import SIZES, StepCost
from medusa_kit.infer.decode.node_choice.waiting import Waits, longest, waits
from medusa_kit.infer.decode.repeated_steps import IN_A_ROW, SETTLED, RepeatedSteps
from medusa_kit.infer.decode.timing import Clock
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.verifier import Verifier
from medusa_kit.locks import SharedLock
from medusa_kit.store.records import Record, short_digest
from medusa_kit.version import __version__

REPEATS = 8  # turns: where another program computes beside, few of them see the machine alone
PATIENCE = 1.0  # seconds of steps, after which two turns of a size are enough once they agree
LONGEST = 0.5  # seconds of one step from which on no larger ones are measured
# Times within this factor are about the same.
NEAR = 1.15
WAITED = 0.05  # share of a turn that a thread may wait for a processor on a free machine


class Turn(NamedTuple):
    """`seconds`: of the fastest step; `free`: no thread waited for a processor meanwhile."""

    seconds: float
    free: bool = True


# (verifier, clock, waits) -> turns by the nodes of their steps
Measure = Callable[[Verifier, Clock, Waits], Mapping[int, Sequence[Turn]]]


class MeasuredSteps:
    """The cost of a verifier's steps, measured when it is first asked for. Engines around the same
    verifier share it. `measure`: as `measured`, which it is unless given."""

    def __init__(
        self,
        verifier: Verifier,
        clock: Clock = time.perf_counter,
        measure: Measure | None = None,
        waits: Waits = waits,
    ) -> None:
        self._verifier, self._clock, self._measure = verifier, clock, measure or measured
        self._waits = waits
        self._cost: StepCost | None = None
        self._lock = SharedLock()

    @property
    def cost(self) -> StepCost:
        with self._lock:
            if self._cost is None:
                kept = self._kept()
                seconds, alone = self._measured_and_kept() if kept is None else (kept, True)
                believed = seconds if _are_possible(seconds) else None
                self._cost = StepCost(measured=believed, undisturbed=alone)
            return self._cost

    @property
    def _record(self) -> Record:
        name = short_digest(json.dumps(self._depends_on))
        return Record("step_times", name, self._depends_on, self._verifier.base.info.name)

    @property
    def _depends_on(self) -> dict[str, Any]:
        info = self._verifier.base.info
        return {
            "version": __version__,
            "code": code_digest(),  # other kernels take other times
            "torch": torch.__version__,
            "model": info.fingerprint,
            "dtype": info.dtype,
            "weights": info.weights,
            "cache": str(self._verifier.cache_dtype or info.dtype),
            "steps_run_by": self._verifier.steps_run_by,
            "attention": self._verifier.attention.name,
            "machine": processor_name(self._verifier.base.device),
            "threads": torch.get_num_threads(),
        }

    def _kept(self) -> dict[int, float] | None:
        """Seconds by nodes as measured earlier; None where there are none that can be read."""
        try:
            record = self._record.read() or {}
            seconds = {int(size): float(taken) for size, taken in record["seconds"].items()}
            alone = record.get("alone", True) is True
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return None
        usable = alone and {1} < seconds.keys() <= set(SIZES) and _are_possible(seconds)
        if not usable or (self._in_cpp and _is_flat(seconds)):
            return None
        return seconds

    @property
    def _in_cpp(self) -> bool:
        return self._verifier.steps_run_by.startswith("C++")

    def _measured_and_kept(self) -> tuple[dict[int, float], bool]:
        """Seconds by nodes, and whether the machine computed nothing else meanwhile."""
        console.stage("timing steps on this machine")
        times = self._measure(self._verifier, self._clock, self._waits)
        seconds = {size: min(turn.seconds for turn in turns) for size, turns in times.items()}
        alone = _was_alone(times)
        if not alone:
            console.detail(
                "other programs use this machine: steps are timed again at the next start"
            )
        self._record.write(seconds=seconds, alone=alone)
        return seconds, alone


def _are_possible(seconds: Mapping[int, float]) -> bool:
    """Whether one can calculate with them: a file may be damaged, and a clock stand still."""
    return all(
        taken > 0 and 1 / taken + len(seconds) * taken < math.inf for taken in seconds.values()
    )


def _is_flat(seconds: Mapping[int, float]) -> bool:
    """Whether no step takes longer than another, or those of the most nodes about as long: on a CPU
    that computes one node after another, something else was timed. Few nodes may cost as much as
    one, while weights are read."""
    largest = max(seconds)
    flat = largest == SIZES[-1] and seconds[largest] < NEAR * seconds[1]
    return flat or len(set(seconds.values())) == 1


def _was_alone(times: Mapping[int, Sequence[Turn]]) -> bool:
    """Whether for each size two turns about as fast as the fastest had the machine for themselves.
    Else another program computed beside, and the figures are good for no other process. That turns
    agree is not enough: beside a program that never rests all of them are equally slow."""
    return all(_is_known(turns) for turns in times.values())


def _is_known(turns: Sequence[Turn]) -> bool:
    near = (turn.free and turn.seconds <= NEAR * min(turns).seconds for turn in turns)
    return sum(near) >= min(2, len(turns))


class _Chains(Drafter):
    """Drafts a chain of one token, whatever the text is."""

    name = "chains"

    def __init__(self, num_nodes: int, device: torch.device) -> None:
        self.num_nodes, self._device = num_nodes, device

    def propose(self, state: State) -> Forest:
        tokens = [[root, *[0] * (self.num_nodes - 1)] for root in state.roots_B]
        return Forest.chains(tokens, self._device)


def measured(verifier: Verifier, clock: Clock, waits: Waits = waits) -> dict[int, list[Turn]]:
    """The turns by the nodes of their steps, which draft nothing, up to the largest size that the
    context holds and that is not too slow. Sizes take turns, so that all see the same machine; the
    least of several is what it takes where nothing else runs. Sizes fall, and have several steps
    in a row, since a small step takes longer behind a large one. Somebody waits for an answer
    meanwhile, so a large model's steps have fewer turns: after PATIENCE, only sizes that were
    disturbed have more. Mostly these are small ones, whose turns are short."""
    context = verifier.base.info.context_length
    sizes = [size for size in SIZES if 1 + size < context]
    steps = RepeatedSteps(verifier, [[0]], clock)
    drafters = {size: _Chains(size, verifier.base.device) for size in sizes}
    times: dict[int, list[Turn]] = {}
    for size in sizes:  # warms up
        first = next(steps.timings(drafters[size], 1))
        if first.verifying > LONGEST and size > 1:
            sizes = sizes[: sizes.index(size) + 1]
            break
    spent = 0.0
    for turn in range(REPEATS):
        enough = turn > 1 and spent > PATIENCE
        for size in reversed(sizes):
            if enough and _is_known(times[size]):
                continue
            taken, before = list[float](), waits()
            for timing in steps.timings(drafters[size], IN_A_ROW):
                taken.append(timing.verifying)
                if sum(taken[:-1]) > SETTLED:
                    break
            free = longest(before, waits()) <= WAITED * sum(taken)
            spent += sum(taken)
            times.setdefault(size, []).append(Turn(min(taken), free))
    return times
