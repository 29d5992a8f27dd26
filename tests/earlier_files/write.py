"""Write the files that later versions must read: by hand, with the code of the version to be kept.

    git worktree add /tmp/before VERSION
    PYTHONPATH=/tmp/before:/tmp/before/tests python tests/earlier_files/write.py FOLDER

The files in `written/` are those of commit 599e94d. Paths and the machine's name in them stand as
@HERE@ and @MACHINE@. What that version answered is in answers.json; only what no rounding can
change is written there.

Shapes: X rows, D hidden, J tokens of a path, R columns, T tokens, V vocabulary.
"""

import contextlib
import itertools
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml
from safetensors.torch import load_file
from support.debug_model import CHATML_TEMPLATE, small_tokenizer
from support.tiny_models import model_of

import medusa_kit
from medusa_kit import cli
from medusa_kit.base.loading import load_base_model
from medusa_kit.heads import load_heads
from medusa_kit.heads.order import best_columns
from medusa_kit.quick import search, settings
from medusa_kit.quick.run import prepared, run
from medusa_kit.quick.session import Request
from medusa_kit.settings.recipe import load_recipe
from medusa_kit.train.loop import TrainingLoop
from medusa_kit.train.trainer import train
from medusa_kit.tuning import tree_search

PROMPTS = [f"Count from {i} to {i * i}." for i in range(16)]
ASKED, TOKENS = 4, 24  # prompts answered in answers.json, tokens of each answer
SAFE = 1e-3  # least distance of two logits in question; rounding moves them by a hundredth of it
HEADS: dict[str, dict[str, Any]] = {
    "medusa": {"kind": "medusa", "num_heads": 3, "projection": "own"},
    "hydra": {"kind": "hydra", "num_heads": 3, "projection": "reduced", "reduced_size": 64},
    "recurrent": {"kind": "recurrent", "num_heads": 2, "further_heads": 1, "mlp_size": 32},
    "rooted": {"kind": "rooted", "num_heads": 2},
    "prefixed": {"kind": "medusa", "num_heads": 2, "prefix_layers": 1},
}
STATIC = ("medusa", "rooted")
TRAIN = {"epochs": 6, "micro_batch_positions": 48, "learning_rate": 0.02, "log_every": 1,
         "eval_every": 8, "save_every": 5, "chunk_positions": 64}  # fmt: skip


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.environ["MEDUSA_KIT_CACHE"] = str(Path("cache").resolve())
        make_base()
        Path("prompts.txt").write_text("\n".join(PROMPTS) + "\n")
        command("data", "generate", "-m", "base", "prompts.txt", "-o", "answers.jsonl", "-n", "24")
        for name, heads in HEADS.items():
            make_heads(name, heads)
        stop_training()
        stop_quick()
        Path("engine.yaml").write_text(yaml.safe_dump(ENGINE, sort_keys=False))
        answers = {name: answers_of(name) for name in HEADS}
        Path("answers.json").write_text(json.dumps(answers, indent=1) + "\n")
        keep(Path(folder), target)


def command(*arguments: str) -> None:
    """One that a user types."""
    with patch.object(sys, "argv", ["medusa-kit", *arguments]):
        try:
            cli.main()
        except SystemExit as leaving:
            if leaving.code:
                raise


def make_base() -> None:
    tokenizer = small_tokenizer(CHATML_TEMPLATE)
    model = model_of("llama", vocab_size=len(tokenizer), hidden_size=64, num_attention_heads=4,
                     num_hidden_layers=2, eos_token_id=3, bos_token_id=None)  # fmt: skip
    model.generation_config.eos_token_id = 3
    for part in (model.to(torch.bfloat16), tokenizer):
        part.save_pretrained("base")


def recipe_for(output: str, heads: dict[str, Any], **train: Any) -> Path:
    sections = {
        "output_dir": output,
        "base": {"model": "base", "device": "cpu"},
        "heads": heads,
        "data": {"sources": ["answers.jsonl"], "eval_fraction": 0.2},
        "train": TRAIN | train,
        "deepspeed": {"enabled": False},
    }
    path = Path(f"{Path(output).name}.yaml")
    path.write_text(yaml.safe_dump(sections, sort_keys=False))
    return path


def make_heads(name: str, heads: dict[str, Any]) -> None:
    """Trained, with a tree and what was measured beside them."""
    recipe, folder = recipe_for(f"trained/{name}", heads), Path("heads", name)
    command("train", str(recipe))
    recipe.unlink()
    shutil.copytree(Path("trained", name, "heads"), folder)
    of = ("-m", "base", "--heads", str(folder), "--device", "cpu")
    grown = "--no-dynamic" if name in STATIC else "--dynamic"
    with patch.object(tree_search, "ALIKE", 0.0):  # dynamic trees are chosen where there are any
        command("tree-search", *of, "--answers", "answers.jsonl", "--nodes", "8", grown,
                "--sizes", "1,4,8", "--batch-sizes", "1,4")  # fmt: skip
    tree = json.loads((folder / "tree.json").read_text())
    assert ("dynamic" in tree) == (name not in STATIC), f"the search chose otherwise for {name}"
    if name == "medusa":
        few = ("--prompts", "prompts.txt", "--limit", "4", "-n", "12")
        command("bench", *of, *few, "--output", str(folder))
        command("verify", *of, *few, "--output", str(folder / "verify.json"))


@contextlib.contextmanager
def stopped_after(updates: int) -> Iterator[None]:
    """Training that Ctrl-C stops after so many updates."""
    original, done = TrainingLoop._update, itertools.count(1)

    def update(self: TrainingLoop, arguments: Any) -> None:
        original(self, arguments)
        if next(done) == updates:
            signal.raise_signal(signal.SIGINT)

    with patch.object(TrainingLoop, "_update", update), contextlib.suppress(KeyboardInterrupt):
        yield


def stop_training() -> None:
    """A run with features on disk: `whole`, of which metrics are kept, and the same stopped."""
    for output in ("whole", "stopped"):
        features = {"features": "disk", "cache_dir": "features"}
        recipe = load_recipe(recipe_for(output, {"kind": "medusa", "num_heads": 2}, **features))
        with stopped_after(7) if output == "stopped" else contextlib.nullcontext():
            train(recipe)


def stop_quick() -> None:
    """A quick run that has its answers and some updates. Its clock stands still."""
    small = {"ANSWER_TOKENS": 12, "CPU_POSITIONS": 48, "EVAL_FRACTION": 0.2,
             "HEADS": HEADS["recurrent"]}  # fmt: skip
    request = Request("base", "prompts.txt", 0.01, Path("quick"), "cpu", clock=lambda: 0.0)
    with patch.multiple(settings, **small), patch.object(search, "CHOICES", (((1, 2, 4), False),)):
        session = prepared(request)
        with stopped_after(3):
            run(session)


ENGINE = {
    "model": "base",
    "heads": "heads/medusa",
    "tree": "heads/medusa/tree.json",
    "drafter": {"name": "medusa"},
    "dtype": "float32",
    "device": "cpu",
    "guesses": "all",
    "fallback": "suffix",
    "serve": {"max_rows": 4},
}


def answers_of(name: str) -> dict[str, Any]:
    """Tokens and numbers of steps for some prompts, greedy and drawn, and what heads guess."""
    engine = medusa_kit.load("base", heads=f"heads/{name}", drafter="medusa", guesses="all",
                             dtype="float32", device="cpu")  # fmt: skip
    greedy = [engine.generate(one, max_new_tokens=TOKENS) for one in PROMPTS[:ASKED]]
    check_margins([(engine.encode(p), r.token_ids) for p, r in zip(PROMPTS, greedy, strict=False)])
    for seed in itertools.count():
        drawn = [
            [engine.generate(one, max_new_tokens=TOKENS, temperature=0.8 * off, seed=seed).token_ids
             for one in PROMPTS[:ASKED]]
            for off in (1 - SAFE, 1.0, 1 + SAFE)
        ]  # fmt: skip
        if drawn[0] == drawn[1] == drawn[2]:  # so no rounding changes them
            break
    return {
        "greedy": [result.token_ids for result in greedy],
        "steps": [result.stats.num_steps for result in greedy],
        "sampled": {"seed": seed, "temperature": 0.8, "tokens": drawn[1]},
        "guesses": guesses_of(name),
    }


def check_margins(texts: list[tuple[list[int], list[int]]]) -> None:
    model = load_base_model("base", dtype="float32", device="cpu").model
    for prompt, answer in texts:
        with torch.no_grad():
            logits_TV = model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
        best_T2 = logits_TV.topk(2).values
        assert (best_T2[:, 0] - best_T2[:, 1]).min() > SAFE, "choose other prompts"


def guesses_of(name: str) -> dict[str, Any]:
    """The four likeliest tokens of each head after drawn hidden states and paths."""
    base = load_base_model("base", dtype="float32", device="cpu")
    heads = load_heads(Path("heads", name), base)
    for seed in itertools.count():
        generator = torch.Generator().manual_seed(seed)
        hidden_XD = torch.randn(3, heads.config.width, generator=generator)
        path_XJ = torch.randint(4, 260, (3, heads.num_heads), generator=generator)
        found, gaps = [], []
        with torch.no_grad():
            for k, z_XD in enumerate(heads.transforms(hidden_XD, path_XJ)):
                logits_XR = heads.project(z_XD, k)
                gaps.append(float(-logits_XR.topk(5).values.diff().max()))
                found.append(heads.to_ids(best_columns(logits_XR, 4)).tolist())
        if min(gaps) > SAFE:
            return {"seed": seed, "tokens": found}
    raise AssertionError


def keep(folder: Path, target: Path) -> None:
    """What is read again, without this machine's names."""
    for cached in Path("cache").iterdir():
        if cached.name != "packed":
            shutil.rmtree(cached)
    shutil.rmtree("trained")
    for path in [*Path().rglob("*.png"), *Path().rglob(".*.lock")]:
        path.unlink()
    for path in Path("whole").rglob("*"):
        if path.is_file() and path.name != "metrics.jsonl":
            path.unlink()
    for path in filter(Path.is_file, Path().rglob("*")):
        found = path.read_bytes()
        with contextlib.suppress(UnicodeDecodeError):
            text = found.decode().replace(str(folder.resolve()), "@HERE@")
            path.write_text(text.replace(f'"{platform.node()}"', '"@MACHINE@"'))
        assert str(folder).encode() not in path.read_bytes(), f"{path} names this machine"
        if path.suffix == ".safetensors":
            load_file(path)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
