"""The first answer of a fresh engine beside plain decoding, and that of one in long use.

    python benchmarks/first_answers.py --prompts prompts.jsonl --categories roleplay,chat

Plain decoding, `auto` that has seen nothing, and `auto` that has seen the answers before take turns
on each prompt, reading of the prompt excluded. Prints the ratio of speeds for each prompt (medians
of the rounds), nodes a step and tokens a step, then the median over the prompts. Step times are
measured beforehand, as they are once per machine.
"""

import argparse
import itertools
import json
from pathlib import Path
from statistics import median
from typing import Any

import medusa_kit
from medusa_kit.drafters.memory import Memory
from medusa_kit.infer.decode.measured import MeasuredSteps


def prompts_of(path: str, categories: list[str], each: int, skip: int) -> list[tuple[str, str]]:
    """(category, text) of the first turns, `each` of every category."""
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    chosen = []
    for category in categories:
        texts = (row["conversations"][0]["value"] for row in rows if row["category"] == category)
        chosen += [(category, text) for text in itertools.islice(texts, skip, skip + each)]
    return chosen


def answer(engine: Any, text: str, tokens: int, drafter: str) -> Any:
    message = [{"role": "user", "content": text}]
    return engine.generate(message, max_new_tokens=tokens, drafter=drafter)


def fresh(engine: Any) -> None:
    """As if the engine was new, with the step times that the file has."""
    engine.memory, engine.scheduler.steps = Memory(), MeasuredSteps(engine.verifier)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--heads", default="auto", help="auto, none or a folder")
    parser.add_argument("--prompts", required=True, help="rows with conversations and category")
    parser.add_argument("--categories", default="roleplay,chat,long_form,instruction,math")
    parser.add_argument("--each", type=int, default=2)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    engine = medusa_kit.load(options.model, heads=options.heads)
    chosen = prompts_of(options.prompts, options.categories.split(","), options.each, options.skip)
    used = Memory()
    steps = MeasuredSteps(engine.verifier)
    for _, text in chosen:  # warms up, and gives the engine in long use its experience
        answer(engine, text, options.tokens, "none")
        engine.memory, engine.scheduler.steps = used, steps
        answer(engine, text, options.tokens, "auto")
    ratios: dict[str, list[float]] = {"fresh": [], "used": []}
    for category, text in chosen:
        speeds: dict[str, list[float]] = {"none": [], "fresh": [], "used": []}
        said: dict[str, Any] = {}
        for _ in range(options.rounds):
            for how, values in speeds.items():
                fresh(engine)
                if how == "used":
                    engine.memory, engine.scheduler.steps = used, steps
                drafter = "none" if how == "none" else "auto"
                result = answer(engine, text, options.tokens, drafter)
                values.append(result.stats.decoding_tokens_per_second or 0.0)
                said[how] = result
        assert said["fresh"].token_ids == said["none"].token_ids, "auto changed the text"
        row = [f"{category:14}"]
        for how, found in ratios.items():
            found.append(median(speeds[how]) / median(speeds["none"]))
            stats = said[how].stats
            row.append(
                f"{how} {found[-1]:.3f} ({stats.nodes_per_step:.2f} nodes, "
                f"{stats.acceptance_length:.2f} tokens)"
            )
        print("  ".join(row), said["fresh"].stats.drafter, sep="  ", flush=True)
    for how, found in ratios.items():
        print(f"{how}: median {median(found):.3f}, least {min(found):.3f} of {len(found)} prompts")


if __name__ == "__main__":
    main()
