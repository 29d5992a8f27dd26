"""What a step costs by the precision of activations: the same steps and prompts in each, in turns.

    python benchmarks/activation_steps.py --nodes 1 2 4 8 --rounds 7

Milliseconds are medians over rounds. Ratios are medians of float32's time over the precision's in
the same round, with the smallest and the largest.
"""

import argparse
import statistics
from collections import defaultdict

from own_speed import OwnSpeed
from rounds import spread

import medusa_kit
from medusa_kit import console
from medusa_kit.settings.engine import allowed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--weights", default="checkpoint")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8, 12, 16, 32])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--depth", type=int, default=128, help="tokens before the nodes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=9, help="steps of a size in a round")
    asked = parser.parse_args()
    speeds = {
        name: OwnSpeed(
            medusa_kit.load(asked.model, heads=None, weights=asked.weights, activations=name)
        )
        for name in allowed("activations")
    }
    taken: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(asked.rounds):
        for nodes in asked.nodes:
            for name, speed in speeds.items():
                seconds = speed.steps(nodes, asked.depth, asked.repeats)
                taken[f"{nodes} nodes", name].append(statistics.median(seconds))
        for name, speed in speeds.items():
            taken[f"prompt of {asked.prompt}", name].append(min(speed.prompt(asked.prompt, 2)))
    rows = []
    for what in dict.fromkeys(key[0] for key in taken):
        row = [what]
        for name in speeds:
            own, exact = taken[what, name], taken[what, "float32"]
            row.append(f"{1000 * statistics.median(own):.2f}")
            row.append(spread([a / b for a, b in zip(exact, own, strict=True)]))
        rows.append(row)
    columns = ["", *(part for name in speeds for part in (f"{name}, ms", "÷"))]
    title = next(iter(speeds.values())).engine.steps_run_by
    console.out.print(console.table(title, columns, rows))


if __name__ == "__main__":
    main()
