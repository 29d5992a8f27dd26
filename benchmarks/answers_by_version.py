"""The speed of answers by version of this kit and by precision, each against the first one's.

    python benchmarks/answers_by_version.py PROMPTS.jsonl \\
        --run OLD/FOLDER:float32:none --run .:int16:auto --run .:int8:auto --rounds 3

A run is FOLDER:ACTIVATIONS:DRAFTER: where medusa_kit lies, the precision (float32 for versions that
have no other) and who drafts. All runs answer a prompt before the next one is asked, in an order
that changes. Ratios are of the tokens a second of a whole round, the median with the least and the
most. Prefixes are not kept, so that rounds are alike.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from rounds import in_turn, spread

WORKER = """
import json, sys
import medusa_kit
given = {} if sys.argv[1] == "float32" else {"activations": sys.argv[1]}
engine = medusa_kit.load(sys.argv[2], prefix_cache="off", **given)
print("ready", flush=True)
for line in sys.stdin:
    prompt, tokens, drafter = json.loads(line)
    result = engine.generate(prompt, max_new_tokens=tokens, drafter=drafter)
    stats = result.stats
    said = {"ids": result.token_ids, "seconds": stats.seconds - stats.first_token_seconds,
            "steps": stats.num_steps}
    print(json.dumps(said), flush=True)
"""


class Worker:
    """An engine in a process of its own."""

    def __init__(self, folder: str, activations: str, model: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(Path(folder).resolve())}
        command = [sys.executable, "-c", WORKER, activations, model]
        self._process = subprocess.Popen(
            command, env=environment, cwd="/", text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._read() == "ready"

    def _read(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"the worker ended with {self._process.wait()}")
        return line.strip()

    def answer(self, prompt: str, tokens: int, drafter: str) -> dict:
        assert self._process.stdin is not None
        print(json.dumps([prompt, tokens, drafter]), file=self._process.stdin, flush=True)
        return json.loads(self._read())


def prompts_of(path: Path, limit: int) -> list[str]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    every = max(len(rows) // limit, 1)
    return [row["turns"][0] for row in rows][::every][:limit]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--run", action="append", required=True)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    runs = [tuple(run.rsplit(":", 2)) for run in asked.run]
    workers = {run[:2]: Worker(*run[:2], asked.model) for run in dict.fromkeys(runs)}
    prompts = prompts_of(asked.prompts, asked.limit)
    rates = {run: [] for run in runs}
    answers: dict[tuple, list] = {}
    steps = dict.fromkeys(runs, 0)
    for round in range(1 + asked.rounds):  # the first one warms up
        seconds, tokens = dict.fromkeys(runs, 0.0), dict.fromkeys(runs, 0)
        for prompt in prompts if round else prompts[:3]:
            for run in in_turn(runs, round, prompt):
                said = workers[run[:2]].answer(prompt, asked.tokens, run[2])
                seconds[run] += said["seconds"]
                tokens[run] += len(said["ids"]) - 1
                answers.setdefault((run, prompt), []).append(said["ids"])
                steps[run] += said["steps"] if round else 0
        if round:
            for run in runs:
                rates[run].append(tokens[run] / seconds[run])
    for run in runs:
        ratios = [own / first for own, first in zip(rates[run], rates[runs[0]], strict=True)]
        own = [answers[run, prompt][-1] for prompt in prompts]
        plain = [answers[(*run[:2], "none"), prompt][-1] for prompt in prompts
                 if (*run[:2], "none") in runs]  # fmt: skip
        first = [answers[runs[0], prompt][-1] for prompt in prompts]
        same = sum(a == b for a, b in zip(own, plain, strict=False))
        a_step = asked.rounds * sum(len(a) - 1 for a in own) / max(steps[run], 1)
        print(
            f"{':'.join(run):40} {statistics.median(rates[run]):7.1f} tokens/s  "
            f"{spread(ratios)}  "
            f"{a_step:.2f} tokens a step; "
            f"as own plain: {same} of {len(plain)}; as the first run: "
            f"{sum(a == b for a, b in zip(own, first, strict=True))} of {len(first)}"
        )


if __name__ == "__main__":
    main()
