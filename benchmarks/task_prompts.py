"""Prompts for what people ask a coding model, as many of each of five tasks, for drafter_rounds.py.

    python benchmarks/task_prompts.py FOLDER --each 12 > tasks.jsonl

FOLDER has humaneval_80_question.jsonl, mt_bench_question.jsonl and spec_bench_half.jsonl. Code is
half HumanEval, whose answers repeat their prompts, and half tasks in words. Chat is MT-bench
without code, maths, reasoning and extraction; summaries are Spec-Bench's. Edits are of files of
this kit, given whole and wanted whole. Calls choose among four tools.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KIT = Path(__file__).parents[1] / "medusa_kit"
SEED = 0
NOT_CHAT = ("coding", "math", "extraction", "reasoning")
IN_WORDS = [
    "Write a Python class for an LRU cache with a capacity, with get and put in constant time.",
    "Write a SQL query that lists the ten customers with the largest total of orders in 2025.",
    "Write a bash script that renames all .jpeg files below a folder to .jpg, with a dry run.",
    "Implement Dijkstra's algorithm in Python with heapq and show how it is called.",
    "Write a React component with a text field and a button that adds entries to a list.",
    "Write a Python function that parses an Apache access log into a list of dictionaries.",
    "Write a Go function that reads lines from a channel and counts words.",
    "Write pytest tests for a function slugify(text) that makes lower-case names with hyphens.",
    "Write a Dockerfile and a docker-compose.yml for a FastAPI service with PostgreSQL.",
    "Write a C function that reverses a singly linked list, with a test in main.",
    "Write a Python decorator that retries a function with exponential back-off.",
    "Write a JavaScript function that groups an array of objects by the value of a key.",
]
EDITS = [
    ("bench/interval.py", "Rename CONFIDENCE to LEVEL, wherever it stands."),
    ("drafters/estimates.py", "Rename all private names so that they have no leading underscore."),
    ("drafters/slots.py", "Add a docstring to each function that has none."),
    ("infer/likeliest.py", "Add type annotations to all local variables."),
    ("serve/deadline.py", "Raise ValueError with a message where a time is negative."),
    ("serve/bounds.py", "Rewrite the comments as one docstring for each constant."),
    ("heads/order.py", "Add a logging statement at the beginning of each function."),
    ("train/finite.py", "Turn the free functions into static methods of one class."),
    ("demo/curve.py", "Replace f-strings by str.format."),
    ("data/sources.py", "Add an __all__ with the public names."),
    ("transfer.py", "Rename the first function to move_everything, wherever it stands."),
    ("background.py", "Add an optional argument for a timeout."),
]
TOOLS = {
    "get_weather": ("The weather at a place", {"city": "string", "days": "integer"}),
    "search_files": (
        "Files whose text matches", {"pattern": "string", "folder": "string", "limit": "integer"}
    ),
    "create_event": (
        "Writes an event into the calendar",
        {"title": "string", "date": "string", "start": "string", "minutes": "integer"},
    ),
    "send_mail": ("Sends a mail", {"to": "string", "subject": "string", "body": "string"}),
}  # fmt: skip
CALLS = [
    "What will the weather be in Lisbon for the next three days?",
    "Find all files under src/server that contain the word deprecated, at most 20.",
    "Put a dentist's appointment into my calendar on 2027-03-14 at 9:30 for 45 minutes.",
    "Tell anna@example.org by mail that the release is moved to Friday because tests fail.",
    "Is it going to rain in Bergen tomorrow, and in Oslo? Look up both.",
    "Schedule a review of the quarterly figures on 2027-01-11 from 14:00 to 15:30.",
    "Write a mail to team@example.org with the subject Lunch and suggest three places.",
    "Search the folder docs for TODO and for FIXME, five results each.",
    "Which weather awaits me in Kyoto next week? Plan with seven days.",
    "Book an hour called Planning every day from 2027-02-01 to 2027-02-03 at 10:00.",
    "Find the file in which the function parse_config is defined, in the folder lib.",
    "Send bob@example.org a mail: the invoice of May is paid, thank him for his patience.",
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--each", type=int, default=12, help="prompts of each task, up to 12")
    options = parser.parse_args()
    for category, prompts in tasks(options.folder).items():
        for number, row in enumerate(prompts[: options.each]):
            print(json.dumps({"question_id": f"{category}-{number}", "category": category, **row}))


def tasks(folder: Path) -> dict[str, list[dict[str, Any]]]:
    humaneval = list(_drawn(folder / "humaneval_80_question.jsonl", "code"))
    chat = _drawn(folder / "mt_bench_question.jsonl")
    summaries = _drawn(folder / "spec_bench_half.jsonl", "summarization")
    return {
        "code": [_asked(text) for pair in zip(humaneval, IN_WORDS, strict=False) for text in pair],
        "chat": [_asked(text) for text in chat],
        "summaries": [_asked(text) for text in summaries],
        "editing": [_asked(_edit(*edit)) for edit in EDITS],
        "tool calls": [_asked(text) | {"tools": _tools()} for text in CALLS],
    }


def _drawn(file: Path, category: str | None = None) -> Iterator[str]:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    random.Random(SEED).shuffle(rows)
    for row in rows:
        own = row["category"]
        if own == category or (category is None and own not in NOT_CHAT):
            yield row["turns"][0]


def _asked(text: str) -> dict[str, Any]:
    return {"turns": [text]}


def _edit(file: str, wish: str) -> str:
    text = (KIT / file).read_text()
    return f"{wish} Answer with the whole file and nothing else.\n\n```python\n{text}```"


def _tools() -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": says,
                "parameters": {
                    "type": "object",
                    "properties": {key: {"type": kind} for key, kind in keys.items()},
                    "required": list(keys),
                },
            },
        }
        for name, (says, keys) in TOOLS.items()
    ]


if __name__ == "__main__":
    main()
