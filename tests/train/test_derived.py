"""Heads that are trained over others take with them what was made from those."""

import json

import pytest

from medusa_kit.heads.checkpoint import stored_digest
from medusa_kit.heads.derived import DERIVED
from medusa_kit.train.trainer import train_heads

FOUND, OWN = '{"table": []}', "[[0]]"


@pytest.mark.parametrize("tree", [FOUND, OWN], ids=["found", "by hand"])
def test_other_heads_take_with_them_what_was_made_from_those_before(
    tree, tiny_base, counting_rows, make_recipe, tmp_path, capsys
):
    base, recipe = tiny_base(), make_recipe()
    heads = train_heads(base, counting_rows(), recipe).heads_folder
    provenance = json.loads((heads / "provenance.json").read_text())
    assert provenance["heads"] == stored_digest(heads)
    for name in (*DERIVED, "calibration_answers.jsonl", "notes.txt"):
        (heads / name).write_text(tree)
    train_heads(base, counting_rows(), recipe, fresh=True)  # the same heads again
    assert all((heads / name).is_file() for name in DERIVED)
    other = recipe.model_copy(update={"seed": 5})
    before = stored_digest(heads)
    train_heads(base, counting_rows(), other, fresh=True)
    assert stored_digest(heads) != before
    left = {path.name for path in heads.iterdir()} - {"config.json", "heads.safetensors"}
    own = {"tree.json"} if tree == OWN else set()
    assert left == {"provenance.json", "calibration_answers.jsonl", "notes.txt"} | own
    assert "of those before are removed" in " ".join(capsys.readouterr().err.split())
