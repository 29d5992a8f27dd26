"""What `tree-search`, `verify` and `bench` leave is what the card of `push` reads."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from support.debug_model import MODEL

Run = Callable[..., tuple[int, str, str]]


def test_card_of_the_commands_own_reports(
    run: Run, trained: Path, prompts: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "heads"
    shutil.copytree(trained, folder)
    asked = [*MODEL, "--heads", folder, "--prompts", prompts, "--limit", "2", "-n", "6"]
    assert run("verify", *asked, "--output", folder / "verify.json")[0] == 0
    assert run("bench", *asked, "--peers", "transformers", "--output", folder)[0] == 0
    code, card, err = run("push", folder, "me/heads", "--dry-run")
    assert code == 0, err
    assert "**Not measured.**" not in card
    assert str(tmp_path) not in card
    assert "stays here: bench.png, calibration_answers.jsonl" in err  # drawn with the folder's name
    assert "![Trees compared](tree.png)" in card
    assert f"| {prompts.name} (" in card  # answers held out of the calibration
    assert f"| {prompts.name} (2 prompts) | medusa-kit" in card
    assert f"| sampled | {prompts.name} | auto | 2 of 2 | 12 |" in card
    assert "| training data | `debug_conversations.jsonl` |" in card
    record = json.loads((folder / "bench.json").read_text())
    assert [f"`{digest}`" in card for digest in record["heads"].values()] == [True]
