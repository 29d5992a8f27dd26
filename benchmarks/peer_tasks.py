"""llama-server and this kit on prompts of several tasks, each with its own speculation, in turn.

    python benchmarks/peer_tasks.py tasks.jsonl --model qwen2.5-coder-1.5b-instruct \
        --figures peer_tasks.json --rounds 2 --ours int16,int8 --drafters plain,medusa,auto,suffix \
        --theirs "draft=--spec-type draft-simple -md DRAFT.gguf" \
        --theirs "n-grams=--spec-type ngram-simple"

llama-server runs plainly, and once more for each of --theirs with those options. Everybody gets the
same token ids (this kit's template), stays loaded, has one slot, and answers each prompt in turn,
in an order drawn anew for each prompt and round. Both sides' own clocks count, so HTTP counts for
nobody. Two speeds: decoding only, after the first token, and with the reading of the prompt.

Rounds are added to those that FIGURES has. After each, the table by task: tokens a second of plain
llama-server, and everybody's ratio to it, of all tokens and seconds, then a prompt's with its 95 %
interval over prompts. Then this kit's over the best of llama.cpp's on that task. A prompt for which
anybody's answer ends in a loop counts in no speed of that round.
"""

import argparse
import json
import os
import shlex
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import llama_tools
from peer_report import PLAIN, Answer, report
from rounds import in_turn

from medusa_kit.files import write_json

OWN_SLOT = ("--cache-ram", "0")  # else it would find the prompts of earlier rounds


Asked = Callable[[list[int]], tuple[float, float, list[int], int]]  # the last four of an answer


def served(url: str, tokens: int) -> Asked:
    """llama-server's answers, by its own clock."""
    address = url.removesuffix("/v1") + "/completion"

    def ask(ids: list[int]) -> tuple[float, float, list[int], int]:
        body = {"prompt": ids, "n_predict": tokens, "temperature": 0, "return_tokens": True}
        request = urllib.request.Request(address, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=600) as response:
            got = json.load(response)
        took = got["timings"]
        seconds = took["prompt_ms"] / 1e3, took["predicted_ms"] / 1e3
        return *seconds, got["tokens"][: took["predicted_n"]], took["cache_n"]

    return ask


def loaded(engine: Any, tokens: int) -> Asked:
    def ask(ids: list[int]) -> tuple[float, float, list[int], int]:
        result = engine.generate(ids, max_new_tokens=tokens)
        stats = result.stats
        first = stats.first_token_seconds
        return first, stats.seconds - first, result.token_ids, stats.cached_tokens

    return ask


def methods(given: argparse.Namespace, stack: ExitStack) -> dict[str, Asked]:
    import medusa_kit
    from medusa_kit.base.files import gguf_source

    gguf, tokens = gguf_source(given.model), given.max_new_tokens
    assert gguf is not None, f"{given.model} is no GGUF file"
    found = dict[str, Asked]()
    for name, options in {PLAIN: "", **dict(one.split("=", 1) for one in given.theirs)}.items():
        own = (*OWN_SLOT, *shlex.split(options))
        name = name if name == PLAIN else f"{PLAIN}, {name}"
        url = stack.enter_context(llama_tools.serve(gguf, given.threads, *own, name=name))
        found[name] = served(url, tokens)
    for activations in given.ours:
        for drafter in given.drafters:
            engine = medusa_kit.load(
                given.model, activations=activations, heads="auto",
                drafter="none" if drafter == "plain" else drafter,
            )  # fmt: skip
            found[f"{activations}, {drafter}"] = loaded(engine, tokens)
    return found


def measure(
    rows: Sequence[Mapping[str, Any]], asked: Mapping[str, Asked], known: Sequence[Answer]
) -> Iterator[list[Answer]]:
    """Everybody's answers to one prompt, prompt by prompt: those of the first round in which some
    are missing."""
    have = {(one.method, one.round, one.prompt) for one in known}
    number = 0
    while all((name, number, at) in have for name in asked for at in range(len(rows))):
        number += 1
    for at, row in enumerate(rows):
        todo = [name for name in asked if (name, number, at) not in have]
        yield [
            Answer(name, number, at, row["category"], *asked[name](row["ids"]))
            for name in in_turn(todo, number, at)
        ]


def encoded(path: Path, model: str) -> list[dict[str, Any]]:
    from medusa_kit.base.loading import load_tokenizer
    from medusa_kit.data.chat import encode_row_prompt

    tokenizer = load_tokenizer(model)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        asked = [{"role": "user", "content": row["turns"][0]}]
        row["ids"] = encode_row_prompt(tokenizer, asked, row.get("tools"))
    return rows


def arguments() -> argparse.Namespace:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("prompts", type=Path, help="of task_prompts.py")
    made.add_argument("--model", required=True)
    made.add_argument("--figures", type=Path, required=True)
    made.add_argument("--ours", type=_list, default=["int8"], help="precisions")
    made.add_argument("--drafters", type=_list, default=["plain", "auto"])
    made.add_argument("--theirs", action="append", default=[], metavar="NAME=OPTIONS")
    made.add_argument("--rounds", type=int, default=1)
    made.add_argument("-n", "--max-new-tokens", type=int, default=64)
    made.add_argument("--threads", type=int, default=os.cpu_count())
    return made.parse_args()


def _list(text: str) -> list[str]:
    return [one for one in text.split(",") if one]


def read(figures: Path) -> list[Answer]:
    return [Answer(*one) for one in json.loads(figures.read_text())] if figures.is_file() else []


def main() -> None:
    import torch

    given = arguments()
    torch.set_num_threads(given.threads)
    llama_tools.build(["llama-server"])
    rows, answers = encoded(given.prompts, given.model), read(given.figures)
    with ExitStack() as stack:
        asked = methods(given, stack) if given.rounds else {}
        for ask in asked.values():
            ask(rows[0]["ids"][:16])  # pages of the file, threads
        for _ in range(given.rounds):
            for found in measure(rows, asked, answers):
                answers += found
                write_json(given.figures, answers)
    print(report(answers))


if __name__ == "__main__":
    main()
