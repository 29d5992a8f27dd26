"""What training takes for models of usual sizes, computed from their shapes: nothing is measured.

    python benchmarks/training_needs.py

prints the table of docs/training.md and the figures in the headers of the recipes for 7B and 8B
models. Both come from the estimate behind `train --dry-run` (medusa_kit/train/forecast/), with the
assumptions below in place of this machine's speed. A test holds the page and the headers to it.
"""

import json
import tempfile
from pathlib import Path

import torch

from medusa_kit.settings.recipe import TrainRecipe, load_recipe
from medusa_kit.train.forecast.from_config import Described, described

ROOT = Path(__file__).parents[1]
POSITIONS = 4_000_000  # training tokens: about as many as the shipped heads had
# The device: an H100's peak of bfloat16 products, dense, and of memory, by NVIDIA's data sheet; and
# the share of each that is assumed to be reached.
FLOP_A_SECOND, BYTES_A_SECOND = 989e12, 3.35e12
PRODUCTS_REACHED, MEMORY_REACHED = 0.4, 0.5
REQUESTS = 96  # answered at once
ANSWER_SHARE = 192 / 300  # of a row's tokens, as --dry-run assumes

LLAMA = {"model_type": "llama", "vocab_size": 128_256, "architectures": ["LlamaForCausalLM"]}
SHAPES: dict[str, dict[str, object]] = {
    "Llama-3.2-1B": {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192,
                     "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
                     "tie_word_embeddings": True},
    "Llama-3.1-8B": {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336,
                     "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    "Llama-3.1-70B": {**LLAMA, "hidden_size": 8192, "intermediate_size": 28672,
                      "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8},
    "Qwen2.5-7B": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"],
                   "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18944,
                   "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
    "Qwen3-8B": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"],
                 "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12288,
                 "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
                 "head_dim": 128},
    "Mistral-7B": {"model_type": "mistral", "architectures": ["MistralForCausalLM"],
                   "vocab_size": 32_768, "hidden_size": 4096, "intermediate_size": 14336,
                   "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
}  # fmt: skip
TABLE = ("Llama-3.2-1B", "Llama-3.1-8B", "Llama-3.1-70B")
RECIPES = {"llama3.1_8b_instruct": "Llama-3.1-8B", "qwen2.5_7b_instruct": "Qwen2.5-7B",
           "qwen3_8b": "Qwen3-8B", "mistral_7b_instruct": "Mistral-7B"}  # fmt: skip
KINDS = {"": "recurrent", "_vllm": "medusa"}  # by the end of a recipe's name


def products_a_second(_: torch.dtype) -> float:
    return PRODUCTS_REACHED * FLOP_A_SECOND / 2  # a product with its addition is two operations


def described_on(shape: str, recipe: TrainRecipe) -> Described:
    """The recipe's run on a base of this shape."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]))
        base = recipe.base.model_copy(update={"model": folder})
        return described(recipe.model_copy(update={"base": base}), products_a_second, 0.0)


def needs(found: Described) -> dict[str, float]:
    """Gigabytes and hours for POSITIONS training tokens."""
    forecast, text = found.forecast, found.text.scaled(POSITIONS)
    mapped = forecast.features(text) if forecast.on_disk else 0.0
    weights = 2 * found.numbers  # bytes, in bfloat16, read once for a token of each request
    answers_a_second = REQUESTS * MEMORY_REACHED * BYTES_A_SECOND / weights
    return {
        "gpu_gb": (forecast.memory(text) - mapped) / 1e9,
        "disk_gb": forecast.disk(text) / 1e9,
        "answers_h": text.tokens * ANSWER_SHARE / answers_a_second / 3600,
        "hidden_states_h": forecast.reading(text) / 3600,
        "updates_h": forecast.updating(text) / 3600,
    }


def table() -> str:
    """The table of docs/training.md."""
    lines = [
        "| base, bfloat16 | heads | GPU memory, GB | disk, GB | answers, h | hidden states, h | "
        "updates, h |",
        "|---|---|---|---|---|---|---|",
    ]
    for shape in TABLE:
        for end, kind in KINDS.items():
            recipe = load_recipe(ROOT / f"recipes/llama3.1_8b_instruct{end}.yaml")
            found = needs(described_on(shape, recipe))
            lines.append(
                f"| {shape} | `{kind}` | {found['gpu_gb']:.0f} | {found['disk_gb']:.0f} | "
                f"{found['answers_h']:.2g} | {found['hidden_states_h']:.2g} | "
                f"{found['updates_h']:.2g} |"
            )
    return "\n".join(lines)


def header(name: str) -> str:
    """What the header of recipes/NAME.yaml says that its run takes."""
    end = next(end for end in sorted(KINDS, reverse=True) if name.endswith(end))
    shape = RECIPES[name.removesuffix(end)]
    found = needs(described_on(shape, load_recipe(ROOT / f"recipes/{name}.yaml")))
    return (
        f"computed for {POSITIONS:,} training tokens: {found['gpu_gb']:.0f} GB of GPU memory, "
        f"{found['disk_gb']:.0f} GB of disk"
    )


def main() -> None:
    print(table())
    for name in RECIPES:
        for end in KINDS:
            print(f"recipes/{name}{end}.yaml: {header(name + end)}")


if __name__ == "__main__":
    main()
