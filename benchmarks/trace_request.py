"""Follows one request through the code: every module and function of the kit that runs for it, in
any thread, and the classes of which a step makes objects.

    python benchmarks/trace_request.py --model debug-tiny --heads untrained

One line for each drafter, then the modules of the last one in the order in which they first run. A
call is one that Python's profiler reports: a generator that goes on counts again, comprehensions
and lambdas do not count. What C++ does inside a call is not seen. Where a short and a long answer
differ is counted as that of the steps, the remainder as outside of them. `guesses` is `all`: what
the policy chooses by the clock differs from run to run.
"""

import argparse
import ctypes
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import medusa_kit

PACKAGE = str(Path(medusa_kit.__file__).parent)
PROMPT = [{"role": "user", "content": "Write a short story about a dog."}]
SHORT, LONG = 9, 33  # tokens of the answers that are compared


@dataclass
class Run:
    """What ran while one answer was made."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)  # by module and function
    objects: dict[int, Any] = field(default_factory=dict)  # kept, so that no number comes again

    @property
    def modules(self) -> list[str]:
        return list(dict.fromkeys(module for module, _ in self.calls))

    def made(self) -> Counter[str]:
        """How many objects were seen of each class of the kit."""
        return Counter(type(one).__name__ for one in self.objects.values())


class Trace:
    """What the profiler of each thread calls. `run`: where it is counted, None for nowhere."""

    def __init__(self) -> None:
        self.run: Run | None = None

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        run, code = self.run, frame.f_code
        if run is None or event not in ("call", "return"):
            return
        if not code.co_filename.startswith(PACKAGE) or code.co_name.startswith("<"):
            return
        if event == "return":
            self._see(run, (value,))
            return
        run.calls[code.co_filename[len(PACKAGE) + 1 :], code.co_name] += 1
        self._see(run, list(frame.f_locals.values()))

    def _see(self, run: Run, values: Iterable[Any]) -> None:
        for value in values:
            ours = type(value).__module__.startswith("medusa_kit.")
            if ours and not isinstance(value, ctypes.Array):  # whose class belongs to who made it
                run.objects.setdefault(id(value), value)
            if type(value) in (list, tuple):
                self._see(run, value)


def traced(engine: Any, trace: Trace, drafter: str, tokens: int) -> tuple[Run, int]:
    """(what ran, steps) of one answer."""
    run = trace.run = Run()
    sys.setprofile(trace)
    try:
        result = engine.generate(PROMPT, max_new_tokens=tokens, drafter=drafter)
        engine.scheduler.thread.hand_and_wait(lambda: None)  # for the end of the last step
    finally:
        sys.setprofile(None)
        trace.run = None
    return run, result.stats.num_steps


def report(engine: Any, trace: Trace, drafter: str) -> Run:
    """Print the counts of one drafter."""
    engine.generate(PROMPT, max_new_tokens=LONG, drafter=drafter)  # what is made once
    (short, few), (long, many) = (traced(engine, trace, drafter, n) for n in (SHORT, LONG))
    steps, calls = many - few, long.calls.total()
    a_step = (calls - short.calls.total()) / steps
    more = long.made()
    more.subtract(short.made())
    made = [f"{name} {count / steps:.2g}" for name, count in more.most_common() if count > 0]
    outside = calls - a_step * many
    print(
        f"{drafter}: {len(long.modules)} modules, {len(long.calls)} functions, "
        f"{a_step:.1f} calls a step and {outside:.0f} outside of {many} steps"
    )
    print(f"  objects made a step, by class: {', '.join(made)}")
    return long


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="debug-tiny")
    parser.add_argument("--heads", default="untrained")
    parser.add_argument("--drafters", default="none,medusa,suffix,auto")
    options = parser.parse_args()
    trace = Trace()
    threading.setprofile(trace)  # of threads that the engine starts
    engine = medusa_kit.load(options.model, heads=options.heads, guesses="all")
    for drafter in options.drafters.split(","):
        run = report(engine, trace, drafter)
    for number, module in enumerate(run.modules, start=1):
        functions = sorted({name for file, name in run.calls if file == module})
        print(f"  {number:2} {module}: {', '.join(functions)}")


if __name__ == "__main__":
    main()
