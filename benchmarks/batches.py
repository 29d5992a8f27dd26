"""Lists of prompts through `Engine.generate`, by rows decoded together: plain, heads and auto.

python benchmarks/batches.py PROMPTS.jsonl [--rows 1,2,4,8,16] [--rounds 5] [--tokens 96]

Drafters take turns at each block of as many prompts as there are rows, since a machine's speed may
change within seconds. A block gives a ratio to plain decoding, a round the median of its blocks,
and what is told is the median of the rounds with the least and the greatest.
"""

import argparse
import statistics
import time

from rounds import rotated, spread

import medusa_kit
from medusa_kit import console
from medusa_kit.data.readers import read_rows

DRAFTERS = ("none", "medusa", "auto")


def seconds_of(engine, prompts, rows, drafter, tokens):
    start = time.perf_counter()
    results = engine.generate(prompts, max_new_tokens=tokens, batch_size=rows, drafter=drafter)
    taken = time.perf_counter() - start
    return sum(len(one.token_ids) for one in results) / taken, [one.token_ids for one in results]


def blocks_of(prompts, rows, count, number):
    """`count` blocks of `rows` prompts; each round begins elsewhere."""
    first = number * count * rows
    picked = [prompts[(first + n) % len(prompts)] for n in range(count * rows)]
    return [picked[n : n + rows] for n in range(0, len(picked), rows)]


def run_block(engine, block, tokens, turn):
    """Tokens a second of each drafter; whose turn it is first changes from block to block."""
    order = rotated(DRAFTERS, turn)
    ran = {name: seconds_of(engine, block, len(block), name, tokens) for name in order}
    answers = [ran[name][1] for name in DRAFTERS]
    if answers[1:] != answers[:-1]:
        raise SystemExit(f"answers differ with {len(block)} rows")
    return {name: ran[name][0] for name in DRAFTERS}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rows", default="1,2,4,8,16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=6, help="in a round, of each size")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--limit", type=int, default=24)
    given = parser.parse_args()
    engine = medusa_kit.load(given.model, prefix_cache="off")  # else later rounds read no prompts
    rows_read = read_rows(given.prompts, limit=given.limit)
    prompts = [engine.encode(one.messages[:1]) for one in rows_read]
    sizes = [int(rows) for rows in given.rows.split(",")]
    speeds, ratios = {}, {}
    for number in range(1 + given.rounds):
        for rows in sizes:
            found = [
                run_block(engine, block, given.tokens, turn)
                for turn, block in enumerate(blocks_of(prompts, rows, given.blocks, number))
            ]
            if not number:  # the first round warms up
                continue
            for name in DRAFTERS:
                own = ratios.setdefault((rows, name), [])
                own.append(statistics.median(one[name] / one["none"] for one in found))
                speeds.setdefault((rows, name), []).extend(one[name] for one in found)
    table = []
    for rows in sizes:
        line = [rows, f"{statistics.median(speeds[rows, 'none']):.0f}"]
        for name in DRAFTERS[1:]:
            line.append(f"{statistics.median(speeds[rows, name]):.0f}")
            line.append(spread(ratios[rows, name]))
        table.append(line)
    columns = ["rows", "plain tokens/s", "heads", "of plain", "auto", "of plain"]
    console.out.print(console.table(f"{len(prompts)} prompts", columns, table))


if __name__ == "__main__":
    main()
