"""Lists of prompts through `Engine.generate`, by rows decoded together: plain, heads and auto.

python benchmarks/batches.py PROMPTS.jsonl [--rows 1,2,4,8,16] [--rounds 5] [--tokens 96]

Rounds are interleaved; each ratio to plain decoding is taken within a round and stated with the
least and the greatest of the rounds.
"""

import argparse
import statistics
import time

import medusa_kit
from medusa_kit import console
from medusa_kit.data.readers import read_rows

DRAFTERS = ("none", "medusa", "auto")


def seconds_of(engine, prompts, rows, drafter, tokens):
    start = time.perf_counter()
    results = engine.generate(prompts, max_new_tokens=tokens, batch_size=rows, drafter=drafter)
    taken = time.perf_counter() - start
    return sum(len(one.token_ids) for one in results) / taken, [one.token_ids for one in results]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rows", default="1,2,4,8,16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--limit", type=int, default=24)
    given = parser.parse_args()
    engine = medusa_kit.load(given.model, prefix_cache="off")  # else later rounds read no prompts
    rows_read = read_rows(given.prompts, limit=given.limit)
    prompts = [engine.encode(one.messages[:1]) for one in rows_read]
    sizes = [int(rows) for rows in given.rows.split(",")]
    speeds = {}
    for number in range(1 + given.rounds):
        for rows in sizes:
            order = DRAFTERS if number % 2 else DRAFTERS[::-1]
            ran = {name: seconds_of(engine, prompts, rows, name, given.tokens) for name in order}
            answers = [ran[name][1] for name in DRAFTERS]
            if answers[1:] != answers[:-1]:
                raise SystemExit(f"answers differ with {rows} rows")
            if number:  # the first round warms up
                for name in DRAFTERS:
                    speeds.setdefault((rows, name), []).append(ran[name][0])
    table = []
    for rows in sizes:
        line = [rows, f"{statistics.median(speeds[rows, 'none']):.0f}"]
        for name in DRAFTERS[1:]:
            pairs = zip(speeds[rows, name], speeds[rows, "none"], strict=True)
            ratios = sorted(ours / plain for ours, plain in pairs)
            line.append(f"{statistics.median(speeds[rows, name]):.0f}")
            line.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        table.append(line)
    columns = ["rows", "plain tokens/s", "heads", "of plain", "auto", "of plain"]
    console.out.print(console.table(f"{len(prompts)} prompts", columns, table))


if __name__ == "__main__":
    main()
