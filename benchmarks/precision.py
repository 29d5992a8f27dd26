"""How often a precision of activations changes a greedy token, against float32 on the same text.

python benchmarks/precision.py ANSWERS.jsonl [--tokens 30000] [--precisions int16,int8]

Rows have `prompt_ids` and `response_ids`, such as `medusa-kit data generate` writes. Each precision
reads the same prompt and the same answer, so that a token that differs does not change those after
it. Where the likeliest token differs, the margin is that of float32 between its first two tokens.
Rates have 95 % bounds by Wilson. KL is from float32's distribution to the other's, in nats.

Shapes: N nodes of a piece, V vocabulary.
"""

import argparse
import json
import math
import random
from pathlib import Path

import torch

import medusa_kit
from medusa_kit import console
from medusa_kit.infer.cpu.activations import with_activations
from medusa_kit.infer.cpu.binding.kernels import MAX_ROWS
from medusa_kit.infer.forest import Forest

Z = 1.96  # 95 %


def wilson(found, tried):
    """(low, high) of a share."""
    share, square = found / tried, Z * Z / tried
    middle = share + square / 2
    apart = Z * math.sqrt(share * (1 - share) / tried + square / tried / 4)
    return max(middle - apart, 0.0) / (1 + square), (middle + apart) / (1 + square)


def pieces_of(verifier, cache, tokens):
    """logits_NV after each token, a piece at a time."""
    for first in range(0, len(tokens), MAX_ROWS):
        piece = tokens[first : first + MAX_ROWS]
        nodes = Forest.chains([piece], verifier.base.device)
        yield verifier.score(cache, nodes, [0]).logits_NV
        cache.commit([range(len(piece))], [0])


class Agreement:
    """What one precision did on all tokens so far."""

    def __init__(self):
        self.margins, self.tokens, self.kl, self.largest_kl = [], 0, 0.0, 0.0

    def add(self, exact_NV, other_NV):
        top_N2 = exact_NV.topk(2).values
        differs_N = exact_NV.argmax(-1) != other_NV.argmax(-1)
        self.margins += (top_N2[:, 0] - top_N2[:, 1])[differs_N].tolist()
        exact_NV, other_NV = exact_NV.double().log_softmax(-1), other_NV.double().log_softmax(-1)
        kl_N = (exact_NV.exp() * (exact_NV - other_NV)).sum(-1)
        self.tokens += len(kl_N)
        self.kl += float(kl_N.sum())
        self.largest_kl = max(self.largest_kl, float(kl_N.max()))

    def line(self):
        found = len(self.margins)
        low, high = (f"{100 * share:.3f}" for share in wilson(found, self.tokens))
        rate = f"{100 * found / self.tokens:.3f} ({low} to {high})"
        margins = sorted(self.margins) or [math.nan]
        middle, most = margins[len(margins) // 2], margins[-1]
        kl = f"{self.kl / self.tokens:.1e}"
        return [self.tokens, found, rate, f"{middle:.4f}", f"{most:.4f}", kl,
                f"{self.largest_kl:.1e}"]  # fmt: skip


def answers(path, wanted):
    """(prompt, answer) of rows in a random order, up to so many tokens of answers."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    random.Random(0).shuffle(lines)
    for row in map(json.loads, lines):
        if wanted > 0:
            yield row["prompt_ids"], row["response_ids"]
        wanted -= len(row["response_ids"])


def compare(verifiers, found, prompt, answer):
    """The token after a prompt and after each of an answer's but the last."""
    caches = [one.new_cache(1, len(prompt) + len(answer)) for one in verifiers]
    read = [(one, cache, prompt[:-1]) for one, cache in zip(verifiers, caches, strict=True)]
    for verifier, cache, before in read:
        if before:
            verifier.read_prompts(cache, [0], [before])
    text = [prompt[-1], *answer[:-1]]
    pieces = [pieces_of(one, cache, text) for one, cache, _ in read]
    for exact_NV, *others in zip(*pieces, strict=True):
        for agreement, other_NV in zip(found.values(), others, strict=True):
            agreement.add(exact_NV, other_NV)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answers")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--precisions", default="int16,int8")
    parser.add_argument("--tokens", type=int, default=30_000)
    given = parser.parse_args()
    engine = medusa_kit.load(given.model, heads=None)
    names = given.precisions.split(",")
    checked = [with_activations(engine.verifier, engine.check, name) for name in names]
    found = {name: Agreement() for name in names}
    verifiers = [engine.verifier, *(verifier for verifier, _ in checked)]
    with torch.inference_mode():
        for prompt, answer in answers(given.answers, given.tokens):
            compare(verifiers, found, prompt, answer)
    columns = ["activations", "tokens", "differ", "% (95 %)", "margin", "most", "KL", "most KL"]
    table = [[name, *agreement.line()] for name, agreement in found.items()]
    console.out.print(console.table(f"{engine.verifier.steps_run_by}", columns, table))


if __name__ == "__main__":
    main()
