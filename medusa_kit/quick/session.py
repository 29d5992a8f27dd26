"""What all phases of one process share: the request, the record, the base once it is loaded."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from medusa_kit.base.fingerprint import Match, compare
from medusa_kit.base.model import BaseModel
from medusa_kit.base.origin import CONFIG, check_origin
from medusa_kit.data.readers import AnswerRow, Row
from medusa_kit.distill.generate import asked_messages
from medusa_kit.engine.before_loading import AnyTree
from medusa_kit.engine.engine import Engine
from medusa_kit.engine.load import build_engine, find_heads, with_heads
from medusa_kit.errors import CheckpointError, ConfigError, DataError
from medusa_kit.heads.checkpoint import says_ours
from medusa_kit.infer.cpu.packed_base import base_for_decoding
from medusa_kit.paths import beside
from medusa_kit.quick import plan, settings
from medusa_kit.quick.answered import check_base
from medusa_kit.quick.answers import check_answers
from medusa_kit.quick.prompts import MIN_TESTED, Prompts
from medusa_kit.quick.state import HELD_OUT, LEAST_TESTED, RECIPE, RUN, Clock, State
from medusa_kit.settings.engine import FLOAT32, EngineConfig
from medusa_kit.settings.quick import MadeFor

AGAIN = "name another folder with --output, or add --fresh to start over"


@dataclass(frozen=True)
class Request:
    """The arguments of `train --quick`."""

    model: str
    prompts: str
    hours: float
    output: Path
    device: str = "auto"
    engine: MadeFor = "kit"  # that is to load the heads
    answered: bool = False  # whether `prompts` is a file of answers (answered.py)
    earlier: Path | None = None  # heads of an earlier run, which these answers are to improve
    clock: Clock = time.monotonic

    @property
    def seconds(self) -> float:
        return self.hours * 3600

    def settings(self, prompts: Prompts) -> dict[str, Any]:
        """The settings that may not change while a run is resumed."""
        return {
            "model": beside(self.model),
            # A file that a server writes to grows; the run has a copy of it.
            "prompts": beside(self.prompts) if self.answered else prompts.digest,
            **({} if prompts.earlier else {LEAST_TESTED: MIN_TESTED}),
            "hours": self.hours,
            "for": self.engine,
            "answer_tokens": settings.ANSWER_TOKENS,
        }


def encoded(
    engine: Engine, rows: Sequence[Row], room: int, count: int | None = None
) -> list[list[int]]:
    """Token ids of the first prompts that leave room for an answer, at most `count`."""
    prompts = list[list[int]]()
    for row in rows:
        try:
            if isinstance(row, AnswerRow):
                ids = row.prompt_ids
            else:
                ids = engine.encode(asked_messages(row.messages, "first"))
        except (DataError, ConfigError):  # it cannot be asked; answers leave it out as well
            continue
        if 0 < len(ids) <= engine.base.info.context_length - room:
            prompts.append(ids)
        if len(prompts) == count:
            break
    return prompts


@dataclass
class Session:
    request: Request
    prompts: Prompts
    state: State
    load: Callable[..., BaseModel] = field(default=base_for_decoding)

    @property
    def clock(self) -> Clock:
        return self.request.clock

    @property
    def total(self) -> float:
        return self.request.seconds

    @property
    def remaining(self) -> float:
        """Seconds that remain of the user's time."""
        return self.total - self.state.seconds()

    def share(self, name: str) -> float:
        """Seconds for one of the phases after training: its share of what is left for them, which
        is less than planned where training took longer, and at most STRETCH times as much."""
        phases = [phase for phase in plan.LAST if not self.state.done(phase)]
        planned = sum(plan.share(phase, self.total) for phase in phases)
        return plan.share(name, self.total) * min(plan.STRETCH, max(0.0, self.remaining) / planned)

    @property
    def rates(self) -> plan.Rates:
        """The rates as they were measured, in this process or an earlier one."""
        try:
            return plan.Rates(**self.state.recall("rates"))
        except TypeError as error:
            raise CheckpointError(
                f"{self.state.path} lacks rates that were measured, or holds others",
                hint="add --fresh to start over",
            ) from error

    @cached_property
    def base(self) -> BaseModel:
        base = self.load(self.request.model, device=self.request.device)
        known = self.state.recall("base")
        if known is not None and compare(known, base.info.fingerprint) is not Match.SAME:
            raise ConfigError(
                f"{self.request.model} is another model than the one that this run began with: "
                f"fingerprint {base.info.fingerprint}, then {known}",
                hint=AGAIN,
            )
        if self.prompts.answered:
            check_base(base, self.copy, self.request.prompts)
        check_answers(base, self.prompts.calibration, self.held_out)
        check_answers(base, self.prompts.training, self.answers)
        if known is None:
            self.state.note("base", base.info.fingerprint)
            self.state.note(CONFIG, base.computation)
        check_origin(
            self.state.path, {CONFIG: self.state.recall(CONFIG)}, {CONFIG: base.computation}, AGAIN
        )
        return base

    @cached_property
    def earlier(self) -> Path | None:
        """Heads to go on from, where answers are what was served with them: those of an earlier
        run, or those that are found for the model."""
        request = self.request
        if not self.prompts.answered or request.engine != "kit":
            return None
        found = request.earlier or find_heads(self.base, "auto")
        return found if found is not None and says_ours(found) else None

    def base_to_train(self, *_: Any, dtype: str, **__: Any) -> BaseModel:
        """The base in this dtype, as it is in a new process: on a CPU, torch's layers were replaced
        by others whose last bits differ, and a run that resumes is to train as one that was never
        stopped."""
        base = self.base_in(dtype)
        if base is not self.base or base.is_light or base.device.type != "cpu":
            return base
        del self.base, base
        return self.base

    def base_in(self, dtype: str) -> BaseModel:
        """The base, or another one where it is to have another dtype."""
        if dtype == self.base.info.dtype:
            return self.base
        return self.load(self.request.model, device=self.request.device, dtype=dtype)

    @cached_property
    def plain(self) -> Engine:
        """An engine without heads."""
        return build_engine(self.base, EngineConfig(model=self.request.model, heads=None))

    def answering_in(self, activations: str) -> Engine:
        """An engine without heads, in this precision."""
        if activations == FLOAT32:
            return self.plain
        options: dict[str, Any] = {"heads": None, "activations": activations}
        return build_engine(self.base, EngineConfig(model=self.request.model, **options))

    def engine(self, tree: AnyTree = None) -> Engine:
        """An engine with the trained heads, and the tree beside them unless one is given."""
        engine = with_heads(self.plain, self.heads, tree=tree)
        engine.usual_drafter = "auto"
        return engine

    def path(self, name: str) -> Path:
        return self.request.output / name

    @property
    def answers(self) -> Path:
        return self.path(settings.ANSWERS)

    @property
    def held_out(self) -> Path:
        return self.path(HELD_OUT)

    @property
    def copy(self) -> Path:
        """The path of the copy of the answers that the run was given, if any."""
        return self.path(settings.COPY)

    @property
    def recipe(self) -> Path:
        return self.path(RECIPE)

    @property
    def run(self) -> Path:
        return self.path(RUN)

    @property
    def heads(self) -> Path:
        return self.run / "heads"
