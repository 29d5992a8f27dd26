"""llama.cpp, ik_llama.cpp and this kit in every precision, in turn on one GGUF file.

    python benchmarks/beside_peers.py --model qwen2.5-coder-1.5b-instruct --figures beside.json \
        --peer llama.cpp=build/peer_speed --peer ik_llama.cpp=build/peer_speed_ik --rounds 2

A peer is a build of peer_speed.cpp with its library. All programs hold the file in memory, and each
case is measured once a round by everybody; who is first changes. Further rounds are added to those
that FIGURES has, so a run may come in pieces. Ratios are within a round, theirs over ours in
seconds: above 1 ours is the faster.

All choose each token that they decode, and compute the logits of all tokens of a step. Theirs are
keys and values of 16 bits, ours of 32.
"""

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from own_speed import OwnSpeed
from rounds import rotated, spread

from medusa_kit import console
from medusa_kit.files import write_json
from medusa_kit.settings.engine import allowed

Figures = dict[str, list[dict[str, float]]]  # by case: seconds by name, round after round
CASES = ("prompt 256", "decode 256 32 1", "decode 256 16 4", "decode 256 8 16", "step 256 1",
         "step 256 4")  # fmt: skip


class Peer:
    """A process that answers questions such as CASES."""

    def __init__(self, program: str, gguf: Path, threads: int) -> None:
        self.process = subprocess.Popen(
            [program, str(gguf), str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, bufsize=1,
        )  # fmt: skip
        self.start_seconds = self._answer()

    def __call__(self, case: str) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(case + "\n")
        return self._answer()

    def close(self) -> None:
        self.process.communicate()

    def _answer(self) -> float:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            self.close()
            raise RuntimeError(f"{self.process.args} ended")
        return float(line)


class Ours:
    """An engine that answers the same questions."""

    def __init__(self, engine: Any) -> None:
        self.speed, self.verifier = OwnSpeed(engine), engine.verifier
        self("prompt 64")  # threads, and pages of the file

    def __call__(self, case: str) -> float:
        what, *numbers = case.split()
        asked: Mapping[str, Callable[..., float]] = {
            "prompt": self._prompt, "decode": self._decode, "step": self._step,
        }  # fmt: skip
        return asked[what](*map(int, numbers))

    def _prompt(self, tokens: int) -> float:
        return self.speed.prompt(tokens, before=0)[0]

    def _step(self, depth: int, nodes: int) -> float:
        return statistics.median(self.speed.steps(nodes, depth, 5))

    def _decode(self, depth: int, tokens: int, rows: int) -> float:
        """Of one request through the usual loop, of several forward by forward."""
        if rows == 1:
            return self.speed.decode(tokens, depth)
        from medusa_kit.infer.forest import Forest

        cache, every = self.verifier.new_cache(rows, depth + tokens), range(rows)
        logits_BV = self.verifier.read_prompts(cache, every, [self.speed.ids(depth)] * rows)[1]
        start = time.perf_counter()
        for _ in range(tokens):
            chains = [[token] for token in logits_BV.argmax(-1).tolist()]
            nodes = Forest.chains(chains, self.verifier.base.device)
            logits_BV = self.verifier.score(cache, nodes, every).logits_NV
            cache.commit([range(1)] * rows, every)
        return (time.perf_counter() - start) / tokens


def measure(
    cases: Sequence[str], programs: Mapping[str, Callable[[str], float]], rounds: int,
    figures: Figures, keep: Callable[[Figures], None],
) -> None:  # fmt: skip
    for _ in range(rounds):
        for place, case in enumerate(cases):
            found = figures.setdefault(case, [])
            order = rotated(list(programs), len(found) + place)
            found.append({name: programs[name](case) for name in order})
            keep(figures)


def rows(figures: Figures, names: Sequence[str], peers: Sequence[str]) -> list[list[str]]:
    """Milliseconds, and theirs over each program's within a round."""
    cells = []
    for case, found in figures.items():
        for name in names:
            own = [one[name] for one in found if name in one]
            to = [spread([one[peer] / one[name] for one in found if {peer, name} <= set(one)])
                  for peer in peers]  # fmt: skip
            middle = f"{1000 * statistics.median(own):.1f}" if own else "–"
            cells.append([case, name, middle, str(len(own)), *to])
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PEER_SPEED")
    parser.add_argument("--case", action="append", help=f"such as {', '.join(CASES)}")
    parser.add_argument("--precisions", default=",".join(allowed("activations")))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--figures", type=Path, required=True)
    given = parser.parse_args()
    import torch

    import medusa_kit
    from medusa_kit.base.files import gguf_source

    torch.set_num_threads(given.threads)
    peers = dict(one.split("=", 1) for one in given.peer)
    gguf = gguf_source(given.model)
    assert gguf is not None, f"{given.model} is no GGUF file"
    programs: dict[str, Any] = {
        name: Ours(medusa_kit.load(given.model, heads=None, activations=name))
        for name in given.precisions.split(",")
    }
    programs |= {name: Peer(program, gguf, given.threads) for name, program in peers.items()}
    known: Figures = json.loads(given.figures.read_text()) if given.figures.is_file() else {}

    def keep(figures: Figures) -> None:
        write_json(given.figures, figures)

    measure(given.case or CASES, programs, given.rounds, known, keep)
    for name in peers:
        programs[name].close()
    columns = ["case", "program", "ms", "rounds", *(f"{peer} / this" for peer in peers)]
    console.out.print(console.table("in turn", columns, rows(known, list(programs), list(peers))))


if __name__ == "__main__":
    main()
