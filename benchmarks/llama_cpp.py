"""llama.cpp beside this kit on one GGUF file, in turn: start, prompts, decoding, steps, memory,
whole answers (with transformers), and guessing by n-grams.

    python benchmarks/llama_cpp.py --prompts mt_bench.jsonl --limit 20 --copying spec_bench.jsonl
    python benchmarks/llama_cpp.py --model random-8b.gguf --parts decode,memory --depths 0 \
        --tokens 8 --memory-tokens 8 --rounds 3

llama.cpp's programs are built natively from the sdist `llama-cpp-python` on PyPI (llama_tools.py)
and run on as many threads as ours. Both sides take turns at each case, in each round; ratios are
within a round. Writes figures.json and beside.md. A full run on the embedded model draws the charts
of docs/images; any other draws them next to its figures.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import llama_tools
from llama_cases import ANSWERS, GUESSING, MEMORY, PARTS, START, Cases
from llama_report import show
from llama_tools import NAME
from side_by_side import Measured, run_rounds

from medusa_kit import console
from medusa_kit.files import write_json
from medusa_kit.settings.engine import EMBEDDED_NAME

FIGURES = "figures.json"
DRAFTERS = ("prompt-lookup", "auto")  # beside llama.cpp's n-grams
PRIVATE = ("output", "model", "prompts", "copying")  # paths of the machine
QUICK: dict[str, Any] = {
    "rounds": 1, "prompt_sizes": [64], "depths": [0, 64], "rows": [1, 4], "step_depth": 64,
    "tokens": 16, "repeats": 3, "memory_tokens": 16, "limit": 2, "max_new_tokens": 16,
}  # fmt: skip


def measure(given: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The record of a run. `keep` gets it as it grows."""
    import medusa_kit
    from medusa_kit.base.gguf import embedded_gguf
    from medusa_kit.bench.machine import describe_setup

    began = time.monotonic()
    name, gguf = (str(given.model),) * 2 if given.model else (EMBEDDED_NAME, embedded_gguf())
    engine = medusa_kit.load(name, activations=given.activations)
    cases = Cases(given, name, Path(gguf), engine)
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": engine.base.info.name,
        "file": {"name": Path(gguf).name, "bytes": Path(gguf).stat().st_size},
        "setup": describe_setup(engine),
        "options": {key: value
                    for key, value in vars(given).items() if key not in PRIVATE},
        "complete": is_complete(given),
    }  # fmt: skip

    def tell(found: list[Measured]) -> None:
        record["cases"] = [one.record() for one in found]
        record["llama_cpp"] = {"sdist": llama_tools.LLAMA_CPP_PYTHON, **cases.about}
        record["minutes"] = (time.monotonic() - began) / 60
        keep(record)

    wanted = [case for part in given.parts for case in cases.of(part)]
    if {START, MEMORY} & set(given.parts):
        cases.warm_up()
    found = run_rounds(wanted, given.rounds, tell)
    record |= whole_answers(given, engine, Path(gguf))
    tell(found)
    return record


def whole_answers(given: argparse.Namespace, engine: Any, gguf: Path) -> dict[str, Any]:
    """The reports of the parts with real prompts."""
    from whole_answers import Answers

    from medusa_kit.bench.oracle import Oracle

    record: dict[str, Any] = {}
    tokens = given.max_new_tokens
    if ANSWERS in given.parts:
        drafters = ["medusa", "auto"] if engine.heads is not None else ["auto"]
        answers, oracle = (
            Answers(engine, given.prompts, given.limit, tokens),
            Oracle.beside(engine.base),
        )
        with servers(given, gguf, []) as urls:
            record[ANSWERS] = answers.beside_transformers(oracle, drafters, urls).to_json()
    if GUESSING in given.parts:
        answers = Answers(engine, given.copying or given.prompts, given.copying_limit, tokens)
        with servers(given, gguf, given.speculation) as urls:
            record[GUESSING] = answers.by_guessing(DRAFTERS, urls).to_json()
    return record


@contextmanager
def servers(
    given: argparse.Namespace, gguf: Path, kinds: Sequence[str]
) -> Iterator[dict[str, str]]:
    """URLs of llama-server by name: plain, and with each kind of n-gram speculation."""
    with ExitStack() as stack:
        urls = {NAME: stack.enter_context(llama_tools.serve(gguf, given.threads))}
        for kind in kinds:
            name, options = f"{NAME}, {kind}", llama_tools.speculation_options(kind)
            serving = llama_tools.serve(gguf, given.threads, *options, name=name)
            urls[name] = stack.enter_context(serving)
        yield urls


def is_complete(given: argparse.Namespace) -> bool:
    """Whether this is the run that the documentation's charts are drawn from."""
    usual = given.model is None and given.activations == "float32"
    return usual and not given.quick and set(given.parts) == set(PARTS)


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def _parts(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := set(chosen) - set(PARTS):
        raise argparse.ArgumentTypeError(f"unknown: {sorted(unknown)}; expected {', '.join(PARTS)}")
    return [part for part in PARTS if part in chosen]


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--build-only", action="store_true", help="build llama.cpp's programs, no more")
    add("--draw-only", action="store_true", help="show and draw the figures of --output again")
    add("--quick", action="store_true", help="small sizes and one round, to try the script")
    add("--model", type=Path, help="a GGUF file; the embedded model's unless given")
    add("--activations", default="float32", help="this kit's: float32, int16 or int8")
    add("--parts", type=_parts, default=list(PARTS), help=f"by commas, of {', '.join(PARTS)}")
    add("--rounds", type=int, default=5, help="of all parts but answers and guessing")
    add("--threads", type=int, default=os.cpu_count())
    add("--prompt-sizes", type=_numbers, default=[64, 256, 1024], help="tokens")
    add("--depths", type=_numbers, default=[0, 256, 2048], help="tokens before those decoded")
    add("--tokens", type=int, default=64, help="decoded at each depth")
    add("--rows", type=_numbers, default=[1, 2, 4, 8, 16], help="tokens of a step")
    add("--step-depth", type=int, default=256, help="tokens before a step")
    add("--repeats", type=int, default=20, help="of a step in a round, of which the median counts")
    add("--memory-tokens", type=int, default=128, help="of the answer whose memory is measured")
    add("--prompts", help="of the part answers; the kit's own unless given")
    add("--limit", type=int, help="take this many of them")
    add("--copying", help="prompts of the part guessing; those of --prompts unless given")
    add("--copying-limit", type=int, help="take this many of them")
    add("-n", "--max-new-tokens", type=int, default=128, help="of whole answers")
    add("--speculation", type=lambda text: text.split(","), default=["ngram-simple"],
        help="kinds of llama-server's --spec-type, by commas")  # fmt: skip
    add("--output", type=Path, help=f"folder of {FIGURES}")
    if made.parse_args(given).quick:
        made.set_defaults(**QUICK, copying_limit=QUICK["limit"])
    found = made.parse_args(given)
    usual = "figures" if found.draw_only or is_complete(found) else "trial"
    found.output = found.output or llama_tools.FOLDER / usual
    return found


def main() -> None:
    given = arguments()
    path = given.output / FIGURES
    if given.draw_only:
        if not path.is_file():
            raise SystemExit(f"no figures at {path}; run this without --draw-only first")
        show(json.loads(path.read_text(encoding="utf-8")), given.output)
        return
    llama_tools.build()
    if given.build_only:
        return
    import torch

    torch.set_num_threads(given.threads)
    given.output.mkdir(parents=True, exist_ok=True)

    def keep(record: dict[str, Any]) -> None:
        write_json(path, record)

    show(measure(given, keep), given.output)
    console.note(f"wrote {path}")


if __name__ == "__main__":
    main()
