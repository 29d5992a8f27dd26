"""Is this version as fast as an older commit? Both run in turn, case by case, on this machine.

    make speed-gate OLD=599e94d PROMPTS=mt_bench.jsonl TASKS=spec_bench.jsonl

For a verdict run it alone, on a machine that does nothing else: all cases are meant to take 15 to
20 minutes on two cores. CASES=names (parts of names will do) and ROUNDS=n choose; six pairs of
figures are the fewest that have an interval. PROMPTS are rows with `turns` (default: the kit's own
prompts), TASKS have `category` too: two tasks are asked, and skipped without the file.

Each version has a process (`worker.py`) that stays between rounds and works through the public API.
A question is asked of both, one right after the other, in an order that changes; that is a pair. No
question is asked twice, so that `auto` can't answer from memory. Caches are the versions' own.

Prints a table and writes JSON; logs are beside it. Exit code 1 where the 95% interval of a ratio
lies below 0.98, a count is higher, or the new version fails at what the old one does.
"""
