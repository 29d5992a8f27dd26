"""What a precision of activations changes in greedy answers, beside what llama.cpp changes.

    python benchmarks/precision.py ANSWERS.jsonl --model qwen2.5-coder-1.5b-instruct

Rows have `prompt_ids` and `response_ids`, greedy answers of float32, such as `medusa-kit data
generate` writes. Every arithmetic reads the prompt and the first tokens of the answer;
changed_answers.py says why that is enough. Float32 reads, on this machine, the first answers whole,
and others as far as some arithmetic differs; an answer that it would leave counts up to there. A
margin is float32's, between the logits of its two likeliest tokens.

With `--others int16,int8,llama.cpp` llama.cpp reads them too, through `llama-cpp-python` and from
the same GGUF file; its keys and values are of 16 bits, as is its default.

Shapes: T tokens of an answer, V vocabulary.
"""

import argparse
import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from changed_answers import COLUMNS, NEAR_COLUMNS, Changed, shares_near
from llama_reader import LlamaReader
from torch import Tensor

import medusa_kit
from medusa_kit import console
from medusa_kit.base.files import gguf_source
from medusa_kit.bench.agreement import first_difference
from medusa_kit.infer.cpu.activations import with_activations
from medusa_kit.infer.cpu.binding.kernels import MAX_ROWS
from medusa_kit.infer.forest import Forest

LLAMA_CPP = "llama.cpp"
WHOLE = 20  # answers that float32 reads to their end


class Ours:
    """Reads with a verifier, and so in its precision."""

    def __init__(self, verifier: Any, context: int) -> None:
        self.verifier, self.cache = verifier, verifier.new_cache(1, context)
        self.before: Sequence[int] = []  # what the cache holds

    def read(self, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        """logits_TV: after the prompt and after each token of the answer but the last."""
        prefix, text = prompt[:-1], [prompt[-1], *answer[:-1]]
        known = first_difference(self.before, prefix)
        self.cache.keep_first(0, known)
        if prefix[known:]:
            self.verifier.read_prompts(self.cache, [0], [prefix[known:]])
        self.before = [*prefix, *text]
        return torch.cat([self._score(text[first : first + MAX_ROWS])
                          for first in range(0, len(text), MAX_ROWS)])  # fmt: skip

    def _score(self, piece: Sequence[int]) -> Tensor:
        nodes = Forest.chains([piece], self.verifier.base.device)
        logits_TV = self.verifier.score(self.cache, nodes, [0]).logits_NV
        self.cache.commit([range(len(piece))], [0])
        return logits_TV


def answers(path: str | Path, wanted: int, tokens: int) -> list[tuple[list[int], list[int]]]:
    """(prompt, the beginning of the answer) of so many rows, drawn by a fixed seed."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    random.Random(0).shuffle(lines)
    rows = map(json.loads, lines[:wanted])
    return [(row["prompt_ids"], row["response_ids"][:tokens]) for row in rows]


class Comparison:
    """Float32 and the others, answer after answer."""

    def __init__(self, exact: Any, others: Mapping[str, Any]) -> None:
        self.exact, self.others = exact, others
        self.found = {name: Changed() for name in others}
        self.whole: list[float] = []  # float32's margins, in answers read whole
        self.left: list[tuple[int, float]] = []  # (place, margin) where float32 leaves an answer
        self.count = 0

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        chosen = {name: other.read(prompt, answer).argmax(-1).tolist()
                  for name, other in self.others.items()}  # fmt: skip
        size = self._needed(list(chosen.values()), answer)
        exact, margins = self._exact(prompt, answer[:size])
        if self.count < WHOLE:
            self.whole += margins
        if (place := first_difference(exact, answer)) < size:
            self.left.append((place, margins[place]))
        for name, changed in self.found.items():
            changed.add(chosen[name], exact, margins, answer)
        self.count += 1

    def _needed(self, chosen: Sequence[Sequence[int]], answer: Sequence[int]) -> int:
        """How many of an answer's tokens float32 has to read."""
        if self.count < WHOLE:
            return len(answer)
        places = [first_difference(one, answer) for one in chosen]
        return max([place + 1 for place in places if place < len(answer)], default=0)

    def _exact(self, prompt: Sequence[int], answer: Sequence[int]) -> tuple[list[int], list[float]]:
        """What float32 chooses at these tokens, and by which margins."""
        if not answer:
            return [], []
        top = self.exact.read(prompt, answer).topk(2)
        values_T2 = top.values
        return top.indices[:, 0].tolist(), (values_T2[:, 0] - values_T2[:, 1]).tolist()

    def tables(self) -> Iterator[tuple[str, list[str], list[list[str]]]]:
        """(title, columns, rows)."""
        rows = [[name, *one.row()] for name, one in self.found.items()]
        yield "greedy answers, against float32's", ["arithmetic", *COLUMNS], rows
        yield "float32's margins at all tokens of the first answers", [
            "tokens", *NEAR_COLUMNS,
        ], [[str(len(self.whole)), *shares_near(self.whole)]]  # fmt: skip


def compare(given: argparse.Namespace) -> Comparison:
    rows = answers(given.file, given.answers, given.tokens)
    context = max(len(prompt) + len(answer) for prompt, answer in rows)
    engine = medusa_kit.load(given.model, heads=None)
    others: dict[str, Any] = {}
    for name in given.others.split(","):
        if name == LLAMA_CPP:
            others[name] = LlamaReader(gguf_source(given.model), context, given.threads)
        else:
            rounded, _ = with_activations(engine.verifier, engine.check, name)
            others[name] = Ours(rounded, context)
    compared = Comparison(Ours(engine.verifier, context), others)
    with torch.inference_mode():
        for prompt, answer in rows:
            compared.add(prompt, answer)
    return compared


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", metavar="ANSWERS.jsonl")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--others", default="int16,int8", help=f"by commas; {LLAMA_CPP} is one")
    parser.add_argument("--answers", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer, at most")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    compared = compare(given)
    for title, columns, cells in compared.tables():
        console.out.print(console.table(title, columns, cells))
    console.note(f"float32 here leaves {len(compared.left)} of the answers that it read: "
                 f"(token, margin) {compared.left}")  # fmt: skip


if __name__ == "__main__":
    main()
