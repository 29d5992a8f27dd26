"""Small heads of every projection for the embedded model: some are trained, the rest follow."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from medusa_kit.base.loading import load_base_model
from medusa_kit.cli.prompts import asset
from medusa_kit.heads import MedusaHeads, load_heads, save_heads
from medusa_kit.settings.engine import EMBEDDED_NAME

HERE = Path(__file__).parent
PROJECTIONS = ("reduced", "shared", "own")
SPREAD = 0.1  # of the spread of the base's matrix: own matrices that differ from head to head


def kit(*arguments: object, **settings: str) -> str:
    """What `medusa-kit` prints, with `settings` in its environment; raises CalledProcessError where
    it fails."""
    command = [sys.executable, "-m", "medusa_kit", *map(str, arguments)]
    print("$ medusa-kit", *command[3:], file=sys.stderr, flush=True)
    environment = {**os.environ, **settings}
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=environment
    ).stdout


def make_heads(folder: Path) -> dict[str, Path]:
    """A folder for each projection under `folder`; what an earlier run made is taken."""
    trained, answers = folder / "run" / "heads", folder / "answers.jsonl"
    if not (trained / "config.json").is_file():
        kit("data", "generate", asset("demo_prompts.jsonl"), "-o", answers, "--limit", 64, "-n", 64,
            "--batch-size", 32)  # fmt: skip
        kit("train", HERE / "recipe.yaml")
    places = {"reduced": trained, "shared": folder / "shared", "own": folder / "own"}
    if not all((place / "config.json").is_file() for place in places.values()):
        _derive(trained, places)
    return places


def _derive(trained: Path, places: dict[str, Path]) -> None:
    """The same blocks in front of the base's whole matrix, and of one each that is near to it."""
    base = load_base_model(EMBEDDED_NAME, device="cpu")
    reduced = load_heads(trained, base)
    for projection in ("shared", "own"):
        heads = MedusaHeads.for_base(base, reduced.config.num_heads, 1, projection)
        heads.blocks.load_state_dict(reduced.blocks.state_dict())
        torch.manual_seed(0)
        for matrix in heads.projections or ():
            matrix.weight.data += SPREAD * matrix.weight.std() * torch.randn_like(matrix.weight)
        save_heads(heads, places[projection])
