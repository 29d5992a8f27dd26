"""What a bench found, as bench.json has it: the sums of each method, and ratios.

torch is not imported here, since a bench of a server alone does without.
"""

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from medusa_kit import console
from medusa_kit.bench.about import About
from medusa_kit.bench.agreement import Agreement
from medusa_kit.bench.doubts import doubt, says_nothing
from medusa_kit.files import write_json
from medusa_kit.heads.derived import BENCH_NAME, BENCH_PLOT_NAME, DERIVED
from medusa_kit.outputs import check_folder, check_replaced
from medusa_kit.settings.drafters import DRAFTERS
from medusa_kit.settings.engine import FLOAT32
from medusa_kit.together import finish_moves, moved_together
from medusa_kit.tuning.charts import draw

ONE_NODE = "medusa-kit, plain decoding"
TRANSFORMERS = "transformers generate"
NO_DRAFTER = "none"
PLAIN = (", plain decoding", ", one node")  # ends of its names
STARTS = {"transformers generate": "transformers", "transformers": "peer", "flashspec": "peer",
          "endpoint, ": "endpoint"}  # fmt: skip
Kind = Literal["ours", "transformers", "peer", "endpoint"]


@dataclass
class Named:
    """A method. `kind`: all of ours give the same text for a seed; `drafter`: of ours. `lossy`:
    answers are another model's and never count as identical. `activations`: the precision."""

    name: str
    kind: Kind = field(default="peer", kw_only=True)
    drafter: str | None = field(default=None, kw_only=True)
    lossy: bool = field(default=False, kw_only=True)
    activations: str = field(default=FLOAT32, kw_only=True)

    @property
    def ours(self) -> bool:
        return self.kind == "ours"

    @property
    def plain(self) -> bool:
        """Whether this is the kit's decoding of one node a step."""
        return self.drafter == NO_DRAFTER

    @property
    def drafts(self) -> bool:
        return self.ours and not self.plain


@dataclass(frozen=True)
class Decoding:
    """Tokens after the first step, which reads the prompt, and their seconds."""

    tokens: int
    seconds: float


@dataclass(frozen=True)
class Answers:
    """New tokens of each prompt of a batch, the seconds for all, and statistics of steps."""

    token_ids: list[list[int]]
    seconds: float
    stats: Sequence[Any] = ()  # GenerationStats of each prompt, where a method has them
    decoding: Decoding | None = None  # where a method measures it
    counts: Sequence[int] | None = None  # of tokens, where they are not those of token_ids
    step_tokens: int | None = None  # tokens from steps; None: all but each answer's first
    failed: Collection[int] = ()  # places in the batch that got no answer; no tokens, no seconds
    method_notes: Sequence[str] = ()

    @property
    def tokens(self) -> int:
        return sum(map(len, self.token_ids) if self.counts is None else self.counts)

    @property
    def notes(self) -> list[str]:
        """Notes of the method, or of the drafter about the last prompt."""
        if self.method_notes:
            return list(self.method_notes)
        return list(getattr(self.stats[-1], "drafter_notes", ())) if self.stats else []


@dataclass
class Tally:
    """The sums of a method over some batches."""

    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    num_steps: int = 0
    step_tokens: int = 0
    depth_steps: list[float] = field(default_factory=list)  # steps that reached at least depth d
    # Tokens a second of each batch; None where all its prompts failed.
    rates: list[float | None] = field(default_factory=list)
    identical: int | None = 0  # answers that equal the reference's; None: not to be compared
    decoding_tokens: int = 0  # after the first step
    decoding_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def decoding_tokens_per_second(self) -> float | None:
        """Tokens a second without the time for reading prompts; None where a method does not report
        it."""
        if not self.decoding_tokens or not self.decoding_seconds:
            return None
        return self.decoding_tokens / self.decoding_seconds

    @property
    def acceptance_length(self) -> float | None:
        return self.step_tokens / self.num_steps if self.num_steps else None

    @property
    def acceptance_by_depth(self) -> list[float]:
        return [steps / self.num_steps for steps in self.depth_steps]

    def add(self, batch: Answers, identical: int | None, timed: bool = True) -> None:
        """`timed`: whether its speed and steps count."""
        self.answers += len(batch.token_ids) - len(batch.failed)
        self.identical = None if identical is None else (self.identical or 0) + identical
        if timed:
            self.add_times(batch)

    def add_times(self, batch: Answers) -> None:
        tokens, answers = batch.tokens, len(batch.token_ids) - len(batch.failed)
        self.tokens += tokens
        self.seconds += batch.seconds
        self.rates.append(tokens / batch.seconds if batch.seconds else None)
        self.step_tokens += tokens - answers if batch.step_tokens is None else batch.step_tokens
        if batch.decoding is not None:
            self.decoding_tokens += batch.decoding.tokens
            self.decoding_seconds += batch.decoding.seconds
        for stats in batch.stats:
            self._add_steps(stats)

    def _add_steps(self, stats: Any) -> None:
        self.num_steps += stats.num_steps
        for index, share in enumerate(stats.acceptance_by_depth):
            while len(self.depth_steps) <= index:
                self.depth_steps.append(0.0)
            self.depth_steps[index] += share * stats.num_steps

    def ratio(self, other: "Tally") -> float | None:
        """The ratio of tokens a second; None where one has no answer that was timed, such as in a
        category."""
        both = self.seconds and other.seconds and other.tokens
        return self.tokens_per_second / other.tokens_per_second if both else None

    def ratios(self, other: "Tally") -> list[float]:
        """The ratio of each batch that both answered."""
        pairs = zip(self.rates, other.rates, strict=True)
        return [own / others for own, others in pairs if own is not None and others]

    def median_ratio(self, other: "Tally") -> float | None:
        """The median over batches that both answered; None without any."""
        ratios = self.ratios(other)
        return statistics.median(ratios) if ratios else None

    def decoding_ratio(self, other: "Tally") -> float | None:
        """The ratio of speeds without the time for reading prompts; None where a method does not
        report it."""
        own, others = self.decoding_tokens_per_second, other.decoding_tokens_per_second
        return own / others if own and others else None

    def to_json(self, first: "Tally") -> dict[str, Any]:
        """Everything, ratios to `first` included."""
        return {
            **asdict(self),
            "tokens_per_second": self.tokens_per_second,
            "ratio": self.ratio(first),
            "median_ratio": self.median_ratio(first),
            "decoding_tokens_per_second": self.decoding_tokens_per_second,
            "acceptance_length": self.acceptance_length,
            "acceptance_by_depth": self.acceptance_by_depth,
        }


@dataclass
class MethodResult(Named):
    """One method over all prompts, and by category where prompts have one."""

    total: Tally = field(default_factory=Tally)
    categories: dict[str, Tally] = field(default_factory=dict)
    not_run: str | None = None  # why there are no figures
    drafter_notes: list[str] = field(default_factory=list)  # of the last prompt
    identical_to: str = ""  # the method that answers were compared with

    def to_json(self, first: "MethodResult") -> dict[str, Any]:
        named = {"name": self.name, "kind": self.kind, "drafter": self.drafter}
        if self.not_run is not None:
            return {**named, "not_run": self.not_run}
        by_category = {
            name: tally.to_json(first.categories[name]) for name, tally in self.categories.items()
        }
        return {
            **named,
            "lossy": self.lossy,
            "activations": self.activations,
            "identical_to": self.identical_to,
            **self.total.to_json(first.total),
            "drafter_notes": self.drafter_notes,
            **({"categories": by_category} if by_category else {}),
        }


def known_by(name: str) -> dict[str, Any]:
    """Kind and drafter of a method by its name, for files of versions that wrote no more of it."""
    kind = next((kind for start, kind in STARTS.items() if name.startswith(start)), "ours")
    drafter = NO_DRAFTER if name.endswith(PLAIN) else name.rpartition(", ")[2]
    return {"kind": kind, "drafter": drafter if kind == "ours" and drafter in DRAFTERS else None}


@dataclass
class BenchReport:
    """Results in the order of the methods; ratios are to the first.

    `agreement`: of our first method with the first one, where that is in float32 and ours is not;
    None: not measured. `loops`: prompts whose answers end in one (loops.py). `left_out`: those of
    their batches, which count among answers and equal ones alone, unless there are no others.
    """

    results: Annotated[list[MethodResult], Field(min_length=1)]
    num_prompts: int
    max_new_tokens: int
    batch_size: int = 1
    identical_to: str = ""  # the method that ours were compared with
    agreement: Agreement | None = None
    loops: int = 0
    left_out: int = 0
    about: About = field(default_factory=About)

    @property
    def ran(self) -> list[MethodResult]:
        return [result for result in self.results if result.not_run is None]

    @property
    def plain(self) -> MethodResult | None:
        """The kit's decoding of one node a step."""
        return next((result for result in self.ran if result.plain), None)

    @property
    def categories(self) -> list[str]:
        return list(self.results[0].categories)

    @property
    def doubt(self) -> str | None:
        """Why its gains say little, if they do."""
        return doubt(self.num_prompts, self.loops, self.left_out)

    @property
    def says_nothing(self) -> bool:
        """Whether no gain can be told."""
        return says_nothing(self.num_prompts, self.left_out)

    def to_json(self) -> dict[str, Any]:
        return {
            **self.about.to_json(),
            "num_prompts": self.num_prompts,
            "max_new_tokens": self.max_new_tokens,
            "batch_size": self.batch_size,
            **({"loops": self.loops, "left_out": self.left_out} if self.loops else {}),
            "identical_to": self.identical_to,
            "agreement_with_float32": self.agreement and self.agreement.to_json(),
            "methods": [result.to_json(self.results[0]) for result in self.results],
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "BenchReport":
        """KeyError, TypeError or ValueError for what is no such report."""
        results = [
            {"identical_to": record.get("identical_to", ""), **known_by(one["name"]), **one,
             "total": {"step_tokens": one.get("tokens", 0) - one.get("answers", 0), **one}}
            for one in record["methods"]
        ]  # fmt: skip
        about = {name: one for name, one in record.items() if name not in OWN}
        found = {"agreement": record.get("agreement_with_float32"),
                 "left_out": record.get("loops", 0), **record, "results": results,
                 "about": about}  # fmt: skip
        return TypeAdapter(cls).validate_python(found)

    @staticmethod
    def check_place(folder: Path) -> None:
        """Raises ConfigError, before anything is measured, where `write` would replace what is no
        report."""
        check_folder(folder, "--output")
        finish_moves(folder)
        check_replaced(folder, {name: DERIVED[name] for name in (BENCH, PICTURE)}, "--output")

    def write(self, name: str, folder: Path) -> None:
        """Write bench.json, and bench.png where it can be drawn, both or neither. `name`: of the
        model, for the chart."""
        rates = {result.name: result.total.tokens_per_second for result in self.ran}
        depths = {result.name: result.total.acceptance_by_depth for result in self.ran}
        title = f"{name}, batch {self.batch_size}"
        with moved_together(folder, replaced=[PICTURE]) as new:
            write_json(new / BENCH, self.to_json())
            draw(
                new / PICTURE,
                lambda plots, path: plots.plot_bench(rates, depths, title, path),
                folder / PICTURE,
            )
        console.note(f"wrote {folder / BENCH}")


BENCH, PICTURE = BENCH_NAME, BENCH_PLOT_NAME
OWN = ("num_prompts", "max_new_tokens", "batch_size", "loops", "left_out", "identical_to",
       "agreement_with_float32", "methods")  # fmt: skip
