"""Run in each of several processes by test_processes.py: trains one class of runs, prints losses.

Arguments: a folder, then for each run a name and the recipe's sections as JSON.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from medusa_kit.base.model import wrap_model
from medusa_kit.data.chat import EncodedExample
from medusa_kit.heads import load_heads
from medusa_kit.settings.recipe import TrainRecipe
from medusa_kit.train.processes import distributed, sharded_base
from medusa_kit.train.trainer import train_heads


class NoTokenizer:
    """As much of a tokenizer as saving needs."""

    def save_pretrained(self, folder):
        pass

    def get_vocab(self):
        return {}


def make_base(dtype="float32"):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3, eos_token_id=31,
        tie_word_embeddings=True,
    )  # fmt: skip
    return wrap_model(LlamaForCausalLM(config).to(getattr(torch, dtype)), NoTokenizer())


def rows():
    generator = torch.Generator().manual_seed(1)
    found = []
    for row in range(12):
        length = 12 + int(torch.randint(0, 12, (), generator=generator))
        ids = [(5 * row + i) % 23 for i in range(length)]
        found.append(EncodedExample(ids, [i >= 3 for i in range(length)], row + 1))
    return found


def run(folder, sections):
    """Losses, saved heads, the base's dtypes and whether it was whole before training, of a run."""
    train = {"epochs": 1, "learning_rate": 0.01, "loss": "cross_entropy", "chunk_positions": 16,
             "log_every": 1, "eval_every": 1000, "save_every": 1000, "keep": "last",
             "feature_batch_tokens": 100}  # fmt: skip
    recipe = TrainRecipe.model_validate({
        "output_dir": str(folder), "base": {"model": "debug-tiny"}, "data": {"sources": ["none"]},
        **sections, "train": train | sections["train"],
    })  # fmt: skip
    layerwise = recipe.base.model != "debug-tiny" and sharded_base.loads_layerwise(recipe)
    base = sharded_base.load(recipe, torch.device("cpu")) if layerwise else None
    base = base or make_base(recipe.base.dtype)
    dtypes = sorted({str(parameter.dtype) for parameter in base.model.parameters()})
    held = sum(parameter.numel() for parameter in base.model.parameters())
    report = train_heads(base, rows(), recipe)
    if not distributed.is_main():
        return None
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if "loss" in line]
    stage2 = recipe.stage == "medusa2"
    heads = load_heads(report.heads_folder, make_base(), force=stage2)
    sums = {name: float(tensor.double().abs().sum()) for name, tensor in heads.state_dict().items()}
    assert base.info.num_parameters == make_base().info.num_parameters
    whole = base.info.num_parameters == held
    return {"losses": losses, "weights": sums, "base was whole": whole, "base": dtypes}


def main():
    warnings.simplefilter("ignore")
    distributed.start(torch.device("cpu"))
    folder, found = Path(sys.argv[1]), {}
    for name, sections in json.loads(sys.argv[2]).items():
        found[name] = run(folder / name, sections)
    if distributed.is_main():
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
