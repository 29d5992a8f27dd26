"""The last two phases: verify and bench, on held-out prompts that no tree was found on."""

from collections.abc import Sequence
from typing import Any

import torch

from medusa_kit import console
from medusa_kit.bench.bench import bench
from medusa_kit.bench.layerwise_oracle import LayerwiseOracle, oracle_beside
from medusa_kit.bench.machine import bench_about, write_verify
from medusa_kit.bench.methods import standard_methods
from medusa_kit.bench.oracle import Oracle
from medusa_kit.bench.report import BenchReport
from medusa_kit.bench.verify import verify
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import DataError, MedusaKitError
from medusa_kit.quick.search import plain_step
from medusa_kit.quick.session import Session, encoded
from medusa_kit.settings.sampling import SamplingParams

LONGEST, SHORTEST = 128, 32  # new tokens of an answer
MAX_VERIFIED = 20  # prompts
SAMPLED = SamplingParams(0.8)
# Plain steps a token that verify takes besides the oracle's: the kit's greedy answer, and its drawn
# one twice.
KIT_STEPS = 3.0
TRANSFORMERS_SHARE = 0.6  # of the bench's time, at most
SPARE_MEMORY = 1.2


class Judge:
    """Engine and oracle, loaded when they are needed first and used by both phases."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._engine: Engine | None = None
        self._oracle: Oracle | LayerwiseOracle | None = None
        self.no_oracle: str | None = None

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            self._engine = self.session.engine()
        return self._engine

    @property
    def oracle(self) -> Oracle | LayerwiseOracle | None:
        """The reference model; None where it cannot be loaded, and `no_oracle` then says why."""
        if self._oracle is None and self.no_oracle is None:
            base = self.session.base
            try:
                if base.device.type == "cuda":
                    free, _ = torch.cuda.mem_get_info(base.device)
                    if SPARE_MEMORY * base.num_bytes > free:
                        raise torch.OutOfMemoryError
                self._oracle = oracle_beside(base)
            except torch.OutOfMemoryError:
                self.no_oracle = "the device has no room for a second model"
            except MedusaKitError as error:
                self.no_oracle = error.message
        return self._oracle

    def prompts(self) -> list[list[int]]:
        """Token ids of the prompts to measure with."""
        prompts = self.session.prompts
        test_prompts = encoded(self.engine, prompts.test, SHORTEST)
        test_prompts = test_prompts or encoded(self.engine, prompts.calibration, SHORTEST)
        if not test_prompts:
            raise DataError(
                f"no held-out prompt of {prompts.source} leaves room for {SHORTEST} tokens in the "
                f"context of {self.session.base.info.context_length}",
                hint="give shorter prompts",
            )
        return test_prompts

    def step(self, prompt: Sequence[int]) -> float:
        return plain_step(self.session.plain, prompt)

    def oracle_step(self, prompt: Sequence[int]) -> float | None:
        """Seconds a token of transformers generate; None where it does not generate."""
        if not isinstance(self.oracle, Oracle):
            return None
        self.oracle.generate(prompt, 1)
        tokens, seconds = self.oracle.generate(prompt, 6)
        return seconds / max(1, len(tokens))


def run_verify(session: Session, judge: Judge) -> dict[str, Any]:
    """Figures of greedy and sampled answers compared with transformers, or why there are none."""
    if judge.oracle is None:
        console.warn(f"nothing is verified: {judge.no_oracle}")
        return {"not_run": judge.no_oracle}
    prompts, seconds = judge.prompts(), session.share("verify")
    step = judge.step(prompts[0])
    token_seconds = KIT_STEPS * step + (judge.oracle_step(prompts[0]) or step)
    tokens, count = sized(seconds / token_seconds, len(prompts), MAX_VERIFIED, min_prompts=1)
    console.note(f"verifying {console.counted(count, 'prompt')}, {tokens} tokens each")
    reports, began = {}, session.clock()
    for name, sampling in (("greedy", None), ("sampled", SAMPLED)):
        if name == "greedy" or session.clock() - began < seconds:
            reports[name] = verify(
                judge.engine, judge.oracle, prompts[:count], max_new_tokens=tokens,
                sampling=sampling,
            )  # fmt: skip
    write_verify(reports, judge.engine, session.prompts.source, session.heads / "verify.json",
                 prompts[:count])  # fmt: skip
    return {
        "prompts": count,
        "tokens": sum(report.num_tokens for report in reports.values()),
        "answers": sum(report.num_prompts for report in reports.values()),
        "identical": sum(report.identical for report in reports.values()),
        "bugs": sum(len(report.bugs) for report in reports.values()),
        "encodings": len(reports["greedy"].encodings),
        "held_to": reports["greedy"].reference,
    }


def run_bench(session: Session, judge: Judge) -> dict[str, Any]:
    """The heads and `auto` beside plain decoding, and transformers where there is time for it."""
    prompts, seconds = judge.prompts(), session.share("bench")
    step = judge.step(prompts[0])
    kit_seconds, oracle_seconds = 3 * step, None
    if judge.no_oracle is None:
        oracle_seconds = judge.oracle_step(prompts[0])
    oracle = judge.oracle if oracle_seconds is not None else None
    if oracle_seconds is not None and 3 * SHORTEST * oracle_seconds > TRANSFORMERS_SHARE * seconds:
        console.note("transformers is left out of the bench: it would take too long")
        oracle_seconds, oracle = None, None
    tokens, count = sized(
        seconds / (kit_seconds + (oracle_seconds or 0.0)) - LONGEST,
        len(prompts),
        len(prompts),
        min_prompts=2,
    )
    console.note(f"benchmarking {console.counted(count, 'prompt')}, {tokens} tokens each")
    engines = {"medusa-kit": judge.engine}
    methods = standard_methods(
        engines, oracle if isinstance(oracle, Oracle) else None, tokens, peers=(),
        drafters=("medusa", "auto"),
    )  # fmt: skip
    report = bench(methods, prompts[:count], tokens)
    report.about = bench_about(engines, session.prompts.source, SamplingParams(), prompts[:count])
    report.write(session.base.info.name, session.heads)
    return {"prompts": count, "max_new_tokens": tokens, "loops": report.loops, **_speeds(report)}


def sized(tokens: float, prompts: int, max_prompts: int, min_prompts: int) -> tuple[int, int]:
    """(new tokens of each answer, prompts) for so many tokens in all."""
    count = min(prompts, max_prompts)
    length = int(min(LONGEST, max(SHORTEST, tokens / count)))
    return length, max(min(min_prompts, count), min(count, int(tokens / length)))


def _speeds(report: BenchReport) -> dict[str, Any]:
    """Tokens a second after the first, and ratios to plain decoding of the same engine."""
    assert report.plain is not None, "our methods all run"
    methods = {
        result.name: {
            "tokens_per_second": round(result.total.tokens_per_second, 2),
            "decoding_tokens_per_second": _rounded(result.total.decoding_tokens_per_second),
            "against_plain": result.total.decoding_ratio(report.plain.total),
            "acceptance_length": result.total.acceptance_length,
            "identical": result.total.identical,
            "answers": result.total.answers,
        }
        for result in report.ran
    }
    return {"methods": methods, "reference": report.results[0].name}


def _rounded(speed: float | None) -> float | None:
    return None if speed is None else round(speed, 2)
