"""Make a smaller model with the same tokenizer to measure draft models: some layers of a base,
trained on the base's own answers.

python benchmarks/draft_pair.py ANSWERS.jsonl OUT [--layers 0,1,2,27,28,29] [--minutes 12]

ANSWERS: a file from `medusa-kit data generate`. OUT can be loaded like any model folder.
"""

import argparse
import random
import time

import torch
from torch.nn import functional as F

from medusa_kit import console
from medusa_kit.base.loading import load_base_model
from medusa_kit.data.readers import AnswerRow, read_rows

BATCH, LEARNING_RATE, MAX_TOKENS, WARM_UP = 8, 6e-4, 320, 30


def truncated(model, layers):
    model.model.layers = torch.nn.ModuleList(model.model.layers[i] for i in layers)
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    model.config.num_hidden_layers = len(layers)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[i] for i in layers]
    return model


def loss_of(model, rows):
    T = max(len(ids) for ids, _ in rows)
    ids_BT = torch.tensor([ids + [0] * (T - len(ids)) for ids, _ in rows])
    labels_BT = ids_BT.clone()
    for row, (ids, start) in enumerate(rows):
        labels_BT[row, :start] = -100
        labels_BT[row, len(ids) :] = -100
    mask_BT = torch.tensor([[1] * len(ids) + [0] * (T - len(ids)) for ids, _ in rows])
    hidden_BTD = model.model(ids_BT, attention_mask=mask_BT).last_hidden_state[:, :-1]
    wanted = labels_BT[:, 1:] >= 0
    return F.cross_entropy(model.lm_head(hidden_BTD[wanted]), labels_BT[:, 1:][wanted])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answers")
    parser.add_argument("out")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--layers", default="0,1,2,27,28,29")
    parser.add_argument("--minutes", type=float, default=12)
    given = parser.parse_args()
    base = load_base_model(given.model, device="cpu")
    model = truncated(base.model, [int(layer) for layer in given.layers.split(",")])
    model.train().requires_grad_(True)
    answers = [row for row in read_rows(given.answers) if isinstance(row, AnswerRow)]
    rows = [((a.prompt_ids + a.response_ids)[:MAX_TOKENS], len(a.prompt_ids)) for a in answers]
    rows = [(ids, start) for ids, start in rows if start < len(ids)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    draw, start, step = random.Random(0), time.monotonic(), 0
    while (done := (time.monotonic() - start) / (60 * given.minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min((step + 1) / WARM_UP, 1 - done + 0.02)
        loss = loss_of(model, draw.sample(rows, BATCH))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 20 == 0:
            console.note(f"update {step}, {done:.0%} of the time, loss {loss.item():.3f}")
    model.eval().save_pretrained(given.out)
    base.tokenizer.save_pretrained(given.out)


if __name__ == "__main__":
    main()
