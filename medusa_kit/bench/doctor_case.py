"""What the doctor examines, read once, and the findings of checks.

Shapes: T tokens, D hidden, P positions, K heads.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from medusa_kit.base.model import BaseModel
from medusa_kit.data.chat import EncodedExample, EncodeReport, encode_prompt, encode_rows
from medusa_kit.data.readers import AnswerRow, Conversation
from medusa_kit.drafters.heads.choice import draft_with
from medusa_kit.engine.engine import Engine
from medusa_kit.engine.load import build_engine, find_heads
from medusa_kit.errors import CheckpointError, DataError, IncompatibleBaseError, MedusaKitError
from medusa_kit.heads import MedusaHeads, load_heads
from medusa_kit.infer.decode.drafter import Drafter
from medusa_kit.infer.decode.request import Request, make_request
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.infer.mkl_linear import pack_for_rows
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.statistics import RankStatistics
from medusa_kit.tuning import calibrate as calibration

MAX_LENGTH = 2048  # rows are cut here, as recipes do
PROBE_TOKENS = 256
NUM_PROMPTS, NEW_TOKENS = 4, 48  # what is decoded
OWN_PROMPT = "Name three trees and say where they grow."

DRAWN = "most answers of the data were drawn, and so hold less likely tokens too"

Status = Literal["ok", "warning", "problem", "skipped"]


@dataclass(frozen=True)
class Finding:
    """The result of one check; `hint` says what to do about it."""

    name: str
    status: Status
    what: str
    hint: str | None = None


# `check` fills in the name of the check.
ok = partial(Finding, "", "ok")
warning = partial(Finding, "", "warning")
problem = partial(Finding, "", "problem")
skipped = partial(Finding, "", "skipped")


@dataclass
class Case:
    """One base model, with data and heads where they were given; build with `examine`."""

    base: BaseModel
    rows: Sequence[Conversation | AnswerRow] | None = None
    examples: Sequence[EncodedExample] = ()
    report: EncodeReport | None = None
    data_error: DataError | None = None
    heads: MedusaHeads | None = None
    heads_folder: Path | None = None
    heads_error: MedusaKitError | None = None
    engine: Engine | None = None
    engine_error: IncompatibleBaseError | None = None
    hidden_before_TD: Tensor | None = None  # of the probe, before serving replaced a layer
    tolerance: float = 0.1

    @property
    def max_length(self) -> int:
        return min(MAX_LENGTH, self.base.info.context_length)

    @property
    def smallest_vocabulary(self) -> int:
        """Ids below this have an input embedding and a logit."""
        inputs = self.base.own_model.get_input_embeddings().weight.shape[0]
        return min(self.base.info.vocab_size, int(inputs))

    @cached_property
    def usable(self) -> list[EncodedExample]:
        """Examples that the model can read; the check of the vocabulary reports the others."""
        return [e for e in self.examples if max(e.input_ids) < self.smallest_vocabulary]

    @cached_property
    def answers(self) -> list[AnswerRow]:
        """Every run of trained tokens, a turn of a conversation or an answer."""
        return [answer for example in self.usable for answer in _turns(example)]

    @property
    def is_drawn(self) -> bool:
        """Whether most rows are answers that were drawn, which hold less likely tokens too."""
        rows = self.rows or ()
        temperatures = [isinstance(row, AnswerRow) and (row.sampling or {}).get("temperature")
                        for row in rows]  # fmt: skip
        return 2 * sum(map(bool, temperatures)) > len(rows)

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Prompts to decode, with room for an answer; without data the doctor's own prompt."""
        room = self.base.info.context_length - NEW_TOKENS
        usable = [answer.prompt_ids for answer in self.answers if len(answer.prompt_ids) <= room]
        fallback = [] if usable else [self._own_prompt()]
        return (usable or fallback)[:NUM_PROMPTS]

    @cached_property
    def probe_T(self) -> Tensor:
        ids = self.usable[0].input_ids if self.usable else self._own_prompt()
        return torch.tensor(ids[:PROBE_TOKENS], device=self.base.device)

    @cached_property
    def statistics(self) -> RankStatistics:
        """The heads' ranks of the data's tokens, with one rank only: right or not."""
        assert self.heads is not None, "`lacks` is asked first"
        return calibration.calibrate(self.base, self.heads, self.answers, num_ranks=1)

    @cached_property
    def served(self) -> list[Request]:
        """A few of the prompts, decoded with the best draft token of each head in a chain."""
        assert self.heads is not None, "`lacks` is asked first"
        drafter = draft_with(self.heads, CandidateTree.chain(self.heads.num_heads))
        return [self.decode(drafter, prompt, NEW_TOKENS)[0] for prompt in self.prompts]

    @cached_property
    def served_statistics(self) -> RankStatistics:
        """The heads' ranks of the decoded text's tokens."""
        written = [AnswerRow(r.prompt_ids, r.token_ids, "length", None, 0) for r in self.served]
        assert self.heads is not None, "`lacks` is asked first"
        return calibration.calibrate(self.base, self.heads, written, num_ranks=1)

    def decode(
        self, drafter: Drafter, prompt_ids: Sequence[int], tokens: int, stop: bool = True
    ) -> tuple[Request, list[int]]:
        """A greedy answer, and how many tokens each step emitted; `stop`: end at a stop token."""
        assert self.engine is not None, "`lacks` is asked first"
        if drafter.num_nodes > 1:
            pack_for_rows(self.base.own_modules(), drafter.num_nodes)  # as the engine does
        request = make_request(self.engine.verifier, prompt_ids, SamplingParams(), tokens)
        if not stop:
            request.stop_ids = frozenset()
        steps = Scheduler(self.engine.verifier).run([request], drafter)
        emitted = [len(ids) for step in steps for _, ids in step]
        return request, emitted[1:]  # the first token is the prefill's

    def lacks(self, data: bool, heads: bool, trees: bool) -> str | None:
        """Why a check that needs these inputs cannot run."""
        if data and self.rows is None:
            return "no data given"
        if data and not self.answers:
            return "no row of the data can be used"
        if heads and self.heads is None:
            return "the heads do not load" if self.heads_error else "no heads given"
        if trees and self.engine is None:
            return "trees cannot be verified on this base model"
        return None

    def _own_prompt(self) -> list[int]:
        if self.base.tokenizer is not None:
            with suppress(DataError):  # a template that refuses is for its own check to report
                ids = encode_prompt(self.base.tokenizer, OWN_PROMPT)
                if max(ids) < self.smallest_vocabulary:
                    return ids
        return [i % self.smallest_vocabulary for i in range(3, 19)]


def examine(
    base: BaseModel,
    rows: Sequence[Conversation | AnswerRow] | None = None,
    heads: str | Path | None = None,
    tolerance: float = 0.1,
) -> Case:
    """Encode, load and self-check the inputs; failures are kept for the checks to report."""
    case = Case(base, rows, tolerance=tolerance)
    if rows is not None:
        try:
            case.examples, case.report = encode_rows(rows, base.tokenizer, case.max_length)
        except DataError as error:
            case.data_error = error
    case.hidden_before_TD = base.hidden_states(case.probe_T[None])[0]
    try:
        case.engine = build_engine(base)
    except IncompatibleBaseError as error:
        case.engine_error = error
    if heads is not None:
        try:
            case.heads_folder = find_heads(base, heads)
            if case.heads_folder is None:
                raise CheckpointError(
                    f"there are no heads for {base.info.name!r}", hint="name the heads' folder"
                )
            case.heads = load_heads(case.heads_folder, base)
        except (CheckpointError, IncompatibleBaseError) as error:
            case.heads_error = error
    return case


Check = Callable[[Case], Finding]


def check(
    name: str, *, data: bool = False, heads: bool = False, trees: bool = False
) -> Callable[[Check], Check]:
    """Decorates a check: gives it a name, skips it without its inputs, reports its errors."""

    def wrap(run: Check) -> Check:
        @functools.wraps(run)
        def checked(case: Case) -> Finding:
            if reason := case.lacks(data, heads, trees):
                return Finding(name, "skipped", reason)
            try:
                return replace(run(case), name=name)
            except MedusaKitError as error:
                return Finding(name, "problem", error.message, error.hint)

        return checked

    return wrap


def _turns(example: EncodedExample) -> Iterator[AnswerRow]:
    ids, mask = example.input_ids, example.loss_mask
    start: int | None = None
    for position in range(1, len(ids) + 1):  # nothing comes before token 0 to predict it from
        written = position < len(ids) and mask[position]
        if written and start is None:
            start = position
        elif not written and start is not None:
            yield AnswerRow(ids[:start], ids[start:position], "length", None, example.row)
            start = None
