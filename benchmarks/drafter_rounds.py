"""Compares drafters on prompts in several interleaved rounds, decoding only, with intervals.

    python benchmarks/drafter_rounds.py mt_bench_question.jsonl --drafters medusa,auto --rounds 2

Each drafter has an engine of its own, so they share nothing that they learn. They answer each
prompt one after another, in an order drawn anew for each prompt and round; the reading of the
prompt does not count. Speeds are ratios to plain decoding by the same kit, over all and for each
category: of all tokens and seconds, then a prompt's with its 95 % interval over prompts, and tokens
a step. Greedy answers are compared with plain decoding's; sampled ones too, since a seed has one
text. An answer that ends in a loop counts in no speed. The report of all rounds so far is printed
after each. Rows may have `tools`, which the template tells the model of.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from rounds import in_turn

import medusa_kit
from medusa_kit import console
from medusa_kit.bench.interval import interval_of
from medusa_kit.data.chat import encode_row_prompt
from medusa_kit.loops import loop_start

PLAIN = "none"


class Answer(NamedTuple):
    drafter: str
    round: int
    prompt: int
    category: str
    tokens: int  # after the first
    seconds: float  # after the first token
    steps: int

    @classmethod
    def of(
        cls, stats: Any, drafter: str, number: int, prompt: int, row: dict[str, Any]
    ) -> "Answer":
        seconds = stats.seconds - stats.first_token_seconds
        tokens, category = stats.new_tokens - 1, row.get("category", "")
        return cls(drafter, number, prompt, category, tokens, seconds, stats.num_steps)


def main() -> None:
    options = _options()
    rows = [json.loads(line) for line in options.prompts.read_text().splitlines()]
    names = [PLAIN, *options.drafters.split(",")]
    engines = {name: _engine(name, options) for name in names}
    answers, others, loops = list[Answer](), 0, 0
    for number in range(options.rounds):
        with console.progress(f"round {number + 1}", len(rows), "prompts") as bar:
            for prompt, row in enumerate(rows):
                texts, timed = {}, list[Answer]()
                for name in in_turn(names, number, prompt):
                    result = _answer(engines[name], row, options, prompt)
                    texts[name] = result.token_ids
                    timed.append(Answer.of(result.stats, name, number, prompt, row))
                if any(loop_start(ids) is not None for ids in texts.values()):
                    loops += 1
                else:
                    answers += timed
                others += any(texts[name] != texts[PLAIN] for name in names)
                bar.advance()
        asked = (number + 1) * len(rows)
        print(
            f"round {number + 1}: {others} of {asked} prompts with another answer than plain, "
            f"{loops} left out of the speeds for a loop at the end"
        )
        _report(answers, names)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts", type=Path, help="the first of each row's `turns` is asked")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--drafters", default="medusa,auto", help="NAME or NAME:KEY=VALUE:...")
    parser.add_argument("--draft-model")
    parser.add_argument("--heads", default="auto")
    parser.add_argument("--activations", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    return parser.parse_args()


def _engine(named: str, options: argparse.Namespace) -> Any:
    """`named`: a drafter, with options of its own after colons; `model` names its draft model."""
    name, *pairs = re.split(r":(?=\w+=)", named)  # a value may be a mapping
    own = {key: yaml.safe_load(value) for key, value in (pair.split("=", 1) for pair in pairs)}
    draft_model = own.pop("model", options.draft_model) if name == "draft-model" else None
    return medusa_kit.load(
        options.model, drafter=name, drafter_options=own, draft_model=draft_model,
        heads=options.heads, activations=options.activations,
    )  # fmt: skip


def _answer(engine: Any, row: dict[str, Any], options: argparse.Namespace, prompt: int) -> Any:
    asked = [{"role": "user", "content": row["turns"][0]}]
    ids = encode_row_prompt(engine.base.tokenizer, asked, row.get("tools"))
    drawn = {"temperature": options.temperature, "seed": prompt} if options.temperature else {}
    return engine.generate(ids, max_new_tokens=options.max_new_tokens, **drawn)


def _report(answers: Sequence[Answer], names: Sequence[str]) -> None:
    cells = []
    for category in ["all", *dict.fromkeys(one.category for one in answers)]:
        own = [one for one in answers if category in ("all", one.category)]
        prompts = len({one.prompt for one in own})
        row = [category, f"{prompts}", f"{_rate(own, PLAIN):.1f}"]
        cells.append([*row, *(_against_plain(own, name) for name in names[1:])])
    print(console.markdown(["task", "prompts", "plain, tokens/s", *names[1:]], cells), flush=True)


def _against_plain(answers: Sequence[Answer], name: str) -> str:
    own = [one for one in answers if one.drafter == name]
    length = sum(one.tokens for one in own) / sum(one.steps for one in own)
    rate = _rate(answers, name) / _rate(answers, PLAIN)
    return f"{rate:.2f}; {_interval(answers, name)}; {length:.2f}"


def _rate(answers: Sequence[Answer], name: str) -> float:
    own = [one for one in answers if one.drafter == name]
    return sum(one.tokens for one in own) / sum(one.seconds for one in own)


def _interval(answers: Sequence[Answer], name: str) -> str:
    """Of the prompts' ratios, each over all rounds."""
    by_prompt: dict[int, list[Answer]] = {}
    for one in answers:
        by_prompt.setdefault(one.prompt, []).append(one)
    found = interval_of([_rate(own, name) / _rate(own, PLAIN) for own in by_prompt.values()])
    if found is None:
        return "too few prompts"
    return f"{found.ratio:.2f} ({found.low:.2f} to {found.high:.2f})"


if __name__ == "__main__":
    main()
