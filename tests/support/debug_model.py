"""What the tests of the command line share: the debug model, and what it answers by itself."""

from pathlib import Path

import torch

from medusa_kit.base.model import load_base_model

ROOT = Path(__file__).parents[2]
MODEL = ["--model", "debug-tiny", "--device", "cpu"]
PLAIN = [*MODEL, "--heads", "none", "-n", "8"]


def plain_answer(messages: list[dict[str, str]], tokens: int = 8) -> str:
    """What the model answers by transformers' own generate."""
    base = load_base_model("debug-tiny", device="cpu")
    ids = base.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    ids_1T = torch.tensor([ids])
    out_1T = base.model.generate(
        ids_1T, attention_mask=torch.ones_like(ids_1T), max_new_tokens=tokens, do_sample=False
    )
    return base.tokenizer.decode(out_1T[0, len(ids) :], skip_special_tokens=True)


def plain_text(prompt: str) -> str:
    return plain_answer([{"role": "user", "content": prompt}])
