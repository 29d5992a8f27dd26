"""Makes the table of how often text drafters' guesses are right in an engine's first answer.

    python benchmarks/guess_chances.py --prompts prompts.jsonl --output guess_chances.json

Each prompt is answered by an engine that has seen nothing before; all guesses of `suffix`,
`recycling` and `prompt-lookup` are verified, and each whose parent was reached is counted as right
or wrong, by its kind. A kind with fewer than `--least` guesses is left out: what its drafter
estimates counts there. Nothing here depends on speed.
"""

import argparse
import json
from collections import Counter
from collections.abc import Hashable
from pathlib import Path

import medusa_kit
from medusa_kit.drafters.estimates import AcceptanceEstimate
from medusa_kit.drafters.memory import Memory
from medusa_kit.drafters.mixed.sources import ACCEPTANCE
from medusa_kit.files import atomic_write


class Counting(AcceptanceEstimate):
    """Counts without end, and lets drafters rank guesses by their own estimates."""

    def __init__(self) -> None:
        super().__init__()
        self.tried, self.right = Counter[Hashable](), Counter[Hashable]()

    def chance(self, key: Hashable, believed: float) -> float:
        return believed

    def record(self, key: Hashable, right: bool) -> None:
        self.tried[key] += 1
        self.right[key] += right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--prompts", required=True, help="rows with conversations")
    parser.add_argument("--every", type=int, default=241, help="take each so many-th prompt")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--least", type=int, default=30)
    parser.add_argument("--output", required=True)
    options = parser.parse_args()
    engine = medusa_kit.load(options.model, heads=None, guesses="all", prefix_cache="off")
    lines = Path(options.prompts).read_text(encoding="utf-8").splitlines()
    lines = lines[options.every // 2 :: options.every]
    counting, num_tokens = Counting(), 0
    for sources in (["suffix", "recycling"], ["prompt-lookup"]):
        for line in lines:
            engine.memory = Memory()
            engine.memory.remembered(ACCEPTANCE, lambda: counting)
            text = json.loads(line)["conversations"][0]["value"]
            result = engine.generate(
                [{"role": "user", "content": text[:4000]}],
                max_new_tokens=options.tokens,
                drafter="auto",
                drafter_options={"sources": sources, "max_nodes": 16},
            )
            num_tokens += result.stats.new_tokens
    kinds = [
        [list(key), round(counting.right[key] / tried, 3), tried]
        for key, tried in sorted(counting.tried.items(), key=lambda item: str(item[0]))
        if tried >= options.least and isinstance(key, tuple)
    ]
    table = {
        "made_by": "benchmarks/guess_chances.py",
        "model": engine.base.info.name,
        "prompts": len(lines),
        "tokens": num_tokens,
        "kinds": kinds,
    }
    with atomic_write(Path(options.output)) as path:
        body = json.dumps(table)
        path.write_text(body.replace("[[", "[\n[", 1).replace("], [[", "],\n[[") + "\n")


if __name__ == "__main__":
    main()
