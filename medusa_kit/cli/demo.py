"""`make demo`: the whole loop on the embedded model, step by step.

Every step is a command of the command line; the demo shows and runs one after the other.
"""

import subprocess
import sys
import time
from pathlib import Path

from medusa_kit import console
from medusa_kit.cli.prompts import asset

FOLDER = Path("demo")
RECIPE = Path("recipes/demo.yaml")
TRAINING_PROMPTS = 240  # of the 400; two cores answer so many in about four minutes
ANSWER_TOKENS = 96


def steps() -> list[tuple[str, list[str]]]:
    """(what happens, the arguments of `medusa-kit`) in order."""
    prompts, others = str(asset("demo_prompts.jsonl")), str(asset("verify_prompts.jsonl"))
    fresh = str(FOLDER / "run" / "heads")
    return [
        (
            "The model answers prompts itself: that is what its heads learn from",
            ["data", "generate", prompts, "-o", str(FOLDER / "answers.jsonl"),
             "-n", str(ANSWER_TOKENS), "--batch-size", "48", "--limit", str(TRAINING_PROMPTS)],
        ),
        (
            "What training sees of it: trained and masked tokens",
            ["data", "inspect", str(FOLDER / "answers.jsonl")],
        ),
        ("Heads are trained on these answers, the base stays as it is", ["train", str(RECIPE)]),
        (
            "The tree that suits these heads on this machine",
            ["tree-search", "--heads", fresh, "--prompts", others, "-n", "112",
             "--batch-size", "40", "--sizes", "1,2,4,6,8,12,16"],
        ),
        (
            "Verification: token by token against plain transformers",
            ["verify", "--heads", fresh, "--prompts", others, "--limit", "4", "-n", "40"],
        ),
        (
            "Speed: fresh heads and the shipped ones against plain transformers, in one run",
            ["bench", "--heads", f"fresh heads={fresh}", "--heads", "shipped heads=auto",
             "--drafters", "medusa,auto",
             "--prompts", others, "--limit", "5", "-n", "64", "--output", str(FOLDER)],
        ),
    ]  # fmt: skip


NEXT = f"""What to type next:
  medusa-kit chat                                  talk to the model with the shipped heads
  medusa-kit chat --heads {FOLDER}/run/heads            the same with the heads just trained
  medusa-kit train recipes/smollm2_135m_heads.yaml the recipe behind the shipped heads
  medusa-kit --help                                everything else
The chart is {FOLDER}/bench.png, the tree's {FOLDER}/run/heads/tree.png."""


def main() -> None:
    """Run all steps; stop at the first that fails. A second run goes on from what is there."""
    if not RECIPE.is_file():
        sys.exit(f"error: {RECIPE} is missing: run the demo from the repository's folder")
    FOLDER.mkdir(exist_ok=True)
    start = time.monotonic()
    for number, (what, arguments) in enumerate(steps(), start=1):
        command = ["medusa-kit", *arguments]
        if arguments[0] == "train" and (FOLDER / "run" / "run.json").is_file():
            console.note("the heads are trained already; delete demo/ to start over")
            continue
        console.out.rule(f"{number}. {what}", align="left")
        console.out.print("$ " + " ".join(command), style="bold", highlight=False, soft_wrap=True)
        done = subprocess.run([sys.executable, "-m", "medusa_kit", *arguments], check=False)
        if done.returncode:
            sys.exit(done.returncode)
    minutes = (time.monotonic() - start) / 60
    console.out.rule(f"Done in {minutes:.1f} minutes", align="left")
    console.out.print(NEXT, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
