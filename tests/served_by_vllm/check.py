"""`make test-vllm`: heads of every projection served by vLLM, held against our own decoding.

The commands are those of docs/vllm.md: `convert` prints what serves the heads, and that line is
run. vLLM's answers must have the tokens of a vLLM without heads and of plain transformers, and its
counters must equal those of `bench --tree chain.json`: steps, and how many got to each depth.

    python tests/served_by_vllm/check.py ENVIRONMENT
"""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from server import serving, stop_on_signals
from small_heads import kit, make_heads

from medusa_kit.cli.prompts import asset
from medusa_kit.infer.cpu.binding.kernels import OFF_SWITCH
from medusa_kit.settings.engine import EMBEDDED_NAME

NUM_PROMPTS = 10
NUM_TOKENS = 64
DRAFTED = {"reduced": 3, "shared": 2, "own": 3}  # of three heads
ASK = ("-n", str(NUM_TOKENS), "--limit", str(NUM_PROMPTS))


def main(environment: Path) -> int:
    stop_on_signals()
    work = Path("build/vllm-check")  # the recipe names it too
    work.mkdir(parents=True, exist_ok=True)
    places = make_heads(work)
    commands = {name: _converted(name, heads, work) for name, heads in places.items()}
    base = commands["shared"][2]
    with serving(environment, ["vllm", "serve", base], work / "plain.log") as url:
        plain = _answers(url, base, work / "plain.jsonl")
    wrong = 0
    for name, command in commands.items():
        with serving(environment, command, work / f"{name}.log") as url:
            record = _bench(url, base, name, places[name], work)
            answers = _answers(url, base, work / f"{name}.jsonl")
        wrong += not _agree(name, record, answers == plain)
    return 1 if wrong else 0


def _converted(name: str, heads: Path, work: Path) -> list[str]:
    """The command that serves them; with as many drafts as are to be tried."""
    to = work / f"{name}-vllm"
    printed = kit("convert", heads, to, "--to", "vllm", "-m", EMBEDDED_NAME, "--force")
    command = shlex.split(printed)
    at = command.index("--speculative-config") + 1
    speculation = {**json.loads(command[at]), "num_speculative_tokens": DRAFTED[name]}
    command[at] = json.dumps(speculation)
    return command


def _answers(url: str, base: str, out: Path) -> list[list[int]]:
    """The token ids of a server's answers, as `data generate` keeps them."""
    out.unlink(missing_ok=True)
    kit("data", "generate", asset("verify_prompts.jsonl"), "-o", out, *ASK, "-m", EMBEDDED_NAME,
        "--endpoint", url, "--endpoint-model", base, "--return-token-ids",
        "--concurrency", 1)  # fmt: skip
    return [json.loads(line)["response_ids"] for line in out.read_text().splitlines()]


def _bench(url: str, base: str, name: str, heads: Path, work: Path) -> dict[str, Any]:
    """Both verify the whole chain of every step, drafted by heads in float32. In C++ heads have
    eight bits, which drafts another token at a near-tie: other counters, for the same answers."""
    chain, out = work / "chain.json", work / f"{name}-bench"
    chain.write_text(json.dumps([[0] * depth for depth in range(1, DRAFTED[name] + 1)]))
    kit("bench", "--heads", heads, "--tree", chain, "--drafter", "medusa", "--guesses", "all",
        "--peers", "transformers", "--prompts", asset("verify_prompts.jsonl"),
        "--endpoint", url, "--endpoint-model", base, "--output", out, *ASK,
        **{OFF_SWITCH: "0"})  # fmt: skip
    record: dict[str, Any] = json.loads((out / "bench.json").read_text())
    return record


def _agree(name: str, record: dict[str, Any], as_plain: bool) -> bool:
    """Whether tokens and counters are equal; what was found is printed."""
    ours, theirs = record["methods"][-2:]
    counts = _counts(theirs)
    print(
        f"{name}, {DRAFTED[name]} drafts: vLLM {counts}, ours {_counts(ours)} (steps, then those "
        f"that got to each depth); {theirs['identical']} of {NUM_PROMPTS} answers have the tokens "
        f"of transformers, {'all' if as_plain else 'NOT ALL'} those of vLLM without heads",
        flush=True,
    )
    same = theirs["identical"] == ours["identical"] == NUM_PROMPTS and as_plain
    by_ids = record["endpoint"]["compared_by"] == "token ids"
    return same and by_ids and counts == _counts(ours) and sum(counts[1:]) > 0


def _counts(method: dict[str, Any]) -> list[int]:
    """Steps, and how many of them got to depth 1, 2, …"""
    return [method["num_steps"], *map(round, method["depth_steps"])]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
