"""Training speed and memory of `medusa-kit train`, against a straightforward trainer.

    python benchmarks/train_throughput.py --data answers.jsonl --rows 64 --threads 2

naive: all heads' logits over the whole vocabulary at every token, prompts included. live:
medusa-kit, features=live, with the same rows, heads and tokens a forward. cached: medusa-kit,
hidden states in memory, the recipe's reduced projection and epochs. It gets copies of rows with new
tokens in the answers until the projection is full, since with few rows it would be small and fast.
The time to collect its states is the difference of its set-up to live's. Each run is a process, to
measure its own peak memory. Variants take turns; figures are medians over rounds, and medians of
the rounds' ratios to naive.
"""

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_kit import console
from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import BaseModel
from medusa_kit.data.chat import EncodedExample, encode_rows
from medusa_kit.data.readers import read_rows
from medusa_kit.heads import MedusaHeads
from medusa_kit.settings.recipe import TrainRecipe, load_recipe
from medusa_kit.train.data import prepare, split
from medusa_kit.train.loss.loss import LossOptions, heads_loss
from medusa_kit.train.trainer import train

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "smollm2_135m_heads.yaml"
# One row is held out; no evaluation or checkpoint is inside the timed part. Logs are, as in the
# recipe, since what is between two of them is kept in memory.
COMMON = ["data.eval_fraction=1.0e-9", "data.train_on=answers", "base.dtype=float32",
          "heads.kind=medusa", "heads.mlp_size=null", "heads.num_blocks=1",
          "train.loss=cross_entropy", "train.soft_share=null", "train.soft_top=null",
          "train.precision=float32", "train.chunk_positions=1024", "train.average=null",
          "train.optimizer=adamw",
          "deepspeed.enabled=false",
          "train.eval_every=1000000000", "train.save_every=1000000000"]  # fmt: skip
WHOLE = ["heads.projection=shared", "heads.reduced_size=null", "train.epochs=1"]
VARIANTS = {"naive": WHOLE, "live": [*WHOLE, "train.features=live"],
            "cached": ["train.features=memory", "train.epochs=3"]}  # fmt: skip
Examples = list[EncodedExample]
Result = dict[str, Any]


def naive_batches(examples: Examples, tokens: int) -> list[Examples]:
    """Shuffled conversations, as many in a batch as fit into so many padded tokens."""
    batches: list[Examples] = []
    for index in torch.randperm(len(examples), generator=torch.Generator().manual_seed(0)).tolist():
        wider = [*(batches[-1] if batches else []), examples[index]]
        if batches and len(wider) * max(len(e.input_ids) for e in wider) <= tokens:
            batches[-1] = wider
        else:
            batches.append([examples[index]])
    return batches


def naive_loss(base: BaseModel, heads: nn.ModuleList, batch: Examples, decay: float) -> Tensor:
    def padded(rows: list[list[Any]]) -> Tensor:
        tensors = [torch.tensor(row) for row in rows]
        return nn.utils.rnn.pad_sequence(tensors, batch_first=True).to(base.device)

    def ahead(x_BT: Tensor, steps: int) -> Tensor:
        return F.pad(x_BT[:, steps:], (0, steps))

    ids_BT, written_BT = padded([e.input_ids for e in batch]), padded([e.loss_mask for e in batch])
    mask_BT = padded([[1] * len(e.input_ids) for e in batch])
    embedding, decoder = base.model.get_output_embeddings(), base.model.get_decoder()
    with torch.no_grad():
        hidden_BTD = decoder(ids_BT, attention_mask=mask_BT, use_cache=False).last_hidden_state
    x_BTD = hidden_BTD.float()
    z_KBTD = [x_BTD + F.silu(block(x_BTD)) for block in heads]
    logits_KBTV = [embedding(z_BTD.to(hidden_BTD.dtype)) for z_BTD in z_KBTD]
    loss, learned_BT = torch.zeros((), device=base.device), ahead(written_BT, 1)
    for k, logits_BTV in enumerate(logits_KBTV):
        learned_BT = learned_BT & ahead(written_BT, k + 2)
        labels_BT = ahead(ids_BT, k + 2).masked_fill(~learned_BT, -100)  # which is ignored
        entropy = F.cross_entropy(logits_BTV.flatten(0, 1).float(), labels_BT.flatten())
        loss = loss + decay ** (k + 1) * entropy
    return loss


@torch.no_grad()
def check_same_job(base: BaseModel, heads: nn.ModuleList, batch: Examples, decay: float) -> None:
    """Untrained heads must have the same loss here and in the kit, with the kit's own targets."""
    items = prepare(batch, len(heads))
    hidden = [base.hidden_states(torch.tensor([i.input_ids], device=base.device)) for i in items]
    hidden_PD = torch.cat([h[0, i.positions_P] for h, i in zip(hidden, items, strict=True)])
    ahead_PJ = torch.cat([torch.from_numpy(item.ahead_PJ) for item in items])
    kit_heads = MedusaHeads.for_base(base, len(heads)).float()
    kit = float(heads_loss(kit_heads, hidden_PD, ahead_PJ, LossOptions(decay, 128)).loss)
    naive = float(naive_loss(base, heads, batch, decay))
    # A mask off by one token changes it by 1e-3, rounding in bfloat16 by nearly as much.
    allowed = 1e-4 if base.dtype == torch.float32 else 1e-3
    if not abs(naive - kit) <= allowed * abs(kit):
        raise SystemExit(f"naive's loss is {naive:.6f}, the kit's {kit:.6f}: not the same job")


def run_naive(recipe: TrainRecipe) -> Result:
    base = load_base_model(recipe.base.model, dtype=recipe.base.dtype, device=recipe.base.device)
    loaded, options, size = memory()[0], recipe.train, base.info.hidden_size
    rows = read_rows(recipe.data.sources[0])
    examples, _ = encode_rows(rows, base.tokenizer, recipe.data.max_length)
    training, _ = split(examples, recipe.data.eval_fraction, recipe.seed)  # the kit's own rows
    heads = nn.ModuleList(nn.Linear(size, size) for _ in range(recipe.heads.num_heads))
    for parameter in heads.to(base.device).parameters():
        nn.init.zeros_(parameter)  # as the kit's blocks start
    check_same_job(base, heads, training[:2], options.head_decay)
    optimizer = torch.optim.AdamW(heads.parameters(), options.learning_rate, weight_decay=0.0)
    batches = naive_batches(training, options.feature_batch_tokens)
    start = time.perf_counter()
    for batch in batches:
        naive_loss(base, heads, batch, options.head_decay).backward()
        nn.utils.clip_grad_norm_(heads.parameters(), options.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if base.device.type == "cuda":
        torch.cuda.synchronize()
    return {"seconds": time.perf_counter() - start, "updates": len(batches), "loaded": loaded,
            "positions": sum(sum(e.loss_mask[1:]) for e in training), "rows": len(training),
            "tokens": sum(len(e.input_ids) for e in training), "columns": base.info.vocab_size,
            "on": f"{base.device}, {torch.get_num_threads()} threads"}  # fmt: skip


def run_kit(recipe: TrainRecipe) -> Result:
    loaded: list[float] = []
    report = train(recipe, self_check=lambda _: loaded.extend((memory()[0], time.perf_counter())))
    setup = time.perf_counter() - loaded[1] - report.seconds
    metrics = (Path(recipe.output_dir) / "metrics.jsonl").read_text().splitlines()
    heads = json.loads((report.heads_folder / "config.json").read_text())
    # Up to the last update, since the report's own seconds include scoring and saving.
    seconds = [line["seconds"] for line in map(json.loads, metrics) if "loss" in line][-1]
    return {"seconds": seconds, "updates": report.num_updates, "loaded": loaded[0], "setup": setup,
            "positions": report.num_positions * recipe.train.epochs,
            "columns": heads["reduced_size"] or heads["vocab_size"]}  # fmt: skip


def memory() -> tuple[int, int]:
    """(bytes now, peak) of this process under Linux; on a GPU, what torch allocated there."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def child(variant: str, overrides: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        recipe = load_recipe(RECIPE, [*overrides, f"output_dir={folder}"])
        result = (run_naive if variant == "naive" else run_kit)(recipe)
    print(json.dumps({**result, "peak": memory()[1]}))


def run(variant: str, overrides: list[str], threads: int | None) -> Result:
    command = [sys.executable, __file__, "--child", variant, *overrides]
    given = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=os.environ | given, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{variant} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def figures(runs: dict[str, Result], variant: str) -> dict[str, float]:
    run, naive = runs[variant], runs["naive"]
    collecting = max(run["setup"] - runs["live"]["setup"], 0.0) if variant == "cached" else 0.0
    rate = run["positions"] / run["seconds"]
    whole = run["seconds"] + collecting
    return {"positions/s": rate, "with collecting": run["positions"] / whole,
            "all tokens/s": rate * naive["tokens"] / naive["positions"],
            "peak MB": run["peak"] / 1e6,
            "over model": (run["peak"] - run["loaded"]) / 1e6}  # fmt: skip


def show(rounds: list[dict[str, Result]], settings: str) -> None:
    rows, naives = [], [figures(runs, "naive") for runs in rounds]
    for variant, first in rounds[0].items():
        ours, cells = [figures(runs, variant) for runs in rounds], []
        for name in naives[0]:
            ratio = statistics.median(a[name] / b[name] for a, b in zip(ours, naives, strict=True))
            cells.append(f"{statistics.median(a[name] for a in ours):,.0f}\n{ratio:.2f} ×")
        rows.append((variant, f"{first['columns']:,}", first["updates"], *cells))
    n = rounds[0]["naive"]
    prompt = f"{n['tokens']:,} tokens ({1 - n['positions'] / n['tokens']:.0%} not trained on)"
    title = f"vocabulary {n['columns']:,}, {n['rows']} rows, {prompt}, {settings}; {n['on']}"
    console.out.print(console.table(title, ("", "columns", "updates", *naives[0]), rows))


def filled(answers: list[Result], columns: int) -> list[Result]:
    """With more answers of the same lengths and prompts but other tokens, if these are too few."""
    if len({i for row in answers for i in row["response_ids"]}) > 1.1 * columns:
        return answers  # a tenth more, since not every token is a target
    count = 1.1 * columns * len(answers) / sum(len(row["response_ids"]) for row in answers)
    more, ids = itertools.islice(itertools.cycle(answers), round(count)), itertools.count()
    return answers + [r | {"response_ids": [next(ids) for _ in r["response_ids"]]} for r in more]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="from `medusa-kit data generate`")
    parser.add_argument("--rows", type=int, default=64, help="spread evenly over the file")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="padded tokens a forward")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true", help="print every run as JSON")
    parser.add_argument("overrides", nargs="*", help="of the recipe, section.key=value")
    options = parser.parse_args()
    recipe, tokens = load_recipe(RECIPE, options.overrides), options.batch_tokens
    answers = [json.loads(line) for line in options.data.read_text().splitlines()]
    answers = [answers[i * len(answers) // options.rows] for i in range(options.rows)]
    written, read = (sum(len(r[f"{k}_ids"]) for r in answers) for k in ("response", "prompt"))
    with tempfile.TemporaryDirectory() as folder:
        common = [*COMMON, f"base.model={options.model}", f"train.feature_batch_tokens={tokens}"]
        each = {}
        for variant, own in VARIANTS.items():
            cached = variant == "cached"
            rows = filled(answers, recipe.heads.reduced_size or 0) if cached else answers
            data = Path(folder, f"{variant}.jsonl")
            data.write_text("\n".join(map(json.dumps, rows)))
            each[variant] = [*common, *own, f"data.sources=[{data}]"]
        # An update has as many positions as one of naive's batches can have.
        each["live"].append(f"train.micro_batch_positions={tokens * written // (written + read)}")
        rounds = [{v: run(v, each[v] + options.overrides, options.threads) for v in VARIANTS}
                  for _ in range(options.rounds)]  # fmt: skip
    if any(runs["naive"]["positions"] != runs["live"]["positions"] for runs in rounds):
        raise SystemExit("naive and live trained on different positions")
    if options.json:
        print(json.dumps(rounds))
    else:
        heads = f"{recipe.heads.num_heads} heads of one block"
        show(rounds, f"{heads}, at most {tokens} tokens a forward, rounds: {options.rounds}")


if __name__ == "__main__":
    child(sys.argv[2], sys.argv[3:]) if sys.argv[1:2] == ["--child"] else main()
