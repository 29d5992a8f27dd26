"""Heads that are trained over others take with them what was made from those."""

import json

import pytest

from medusa_kit.heads.checkpoint import stored_digest
from medusa_kit.heads.derived import DERIVED
from medusa_kit.train.trainer import train_heads

PNG = "\x89PNG\r\n\x1a\n".encode("latin-1")
WRITTEN = {
    "tree.json": b'{"table": []}', "tree.png": PNG + b"tEXtSoftware\0medusa-kit",
    "statistics.npz": b"cut off, beside its tree", "bench.json": b'{"methods": []}',
    "bench.png": PNG + b"tEXtSoftware\0Matplotlib version3", "verify.json": b'{"greedy": {}}',
}  # fmt: skip
OWN_FILES = {
    "tree.json": b"[[0]]", "tree.png": PNG + b"tEXtSoftware\0Matplotlib version3",
    "statistics.npz": b"mine", "bench.json": b'{"mine": 1}',
    "bench.png": PNG + b"tEXtSoftware\0Paint", "verify.json": b"[]",
}  # fmt: skip


@pytest.mark.parametrize("files", [WRITTEN, OWN_FILES], ids=["found", "a person's"])
def test_other_heads_take_with_them_what_was_made_from_those_before(
    files, tiny_base, counting_rows, make_recipe, tmp_path, capsys
):
    base, recipe = tiny_base(), make_recipe()
    heads = train_heads(base, counting_rows(), recipe).heads_folder
    provenance = json.loads((heads / "provenance.json").read_text())
    assert provenance["heads"] == stored_digest(heads)
    assert files.keys() == DERIVED.keys()
    for name, content in {**files, "calibration_answers.jsonl": b"", "notes.txt": b""}.items():
        (heads / name).write_bytes(content)
    train_heads(base, counting_rows(), recipe, fresh=True)  # the same heads again
    assert all((heads / name).is_file() for name in DERIVED)
    other = recipe.model_copy(update={"seed": 5})
    before = stored_digest(heads)
    train_heads(base, counting_rows(), other, fresh=True)
    assert stored_digest(heads) != before
    left = {path.name for path in heads.iterdir()} - {"config.json", "heads.safetensors"}
    own = set() if files is WRITTEN else set(DERIVED)
    assert left == {"provenance.json", "calibration_answers.jsonl", "notes.txt"} | own
    said = " ".join(capsys.readouterr().err.split())
    assert ("of those before are removed" in said) == (files is WRITTEN)
