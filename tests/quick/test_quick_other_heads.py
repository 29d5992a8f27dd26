"""A report is of the heads that lie in the folder, or they are measured anew."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from quick_runs import Whole, note_phases

from medusa_kit.heads.checkpoint import read_heads, stored_digest
from medusa_kit.quick import report
from medusa_kit.quick.run import prepared, run
from medusa_kit.quick.session import Request
from medusa_kit.quick.state import PHASES

Build = Callable[..., Request]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return note_phases(monkeypatch)


def other_heads(folder: Path) -> None:
    """As a training by hand into the run's folder leaves them."""
    from safetensors.torch import save_file

    _, tensors = read_heads(folder)
    save_file({name: tensor + 0.01 for name, tensor in tensors.items()},
              folder / "heads.safetensors")  # fmt: skip
    (folder / "tree.json").unlink()


def test_other_heads_are_searched_verified_and_measured_anew(
    request_for: Build, whole: Whole, begun: list[str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    whole.copied(tmp_path / "heads")
    session = prepared(request_for())
    other_heads(session.heads)
    run(session)
    assert begun == list(PHASES[2:])
    assert "holds other heads than this run trained" in " ".join(capsys.readouterr().err.split())
    tree = json.loads((session.heads / "tree.json").read_text())
    found = stored_digest(session.heads)
    assert tree["heads"] == report.record_of(session)["heads_digest"] == found
    begun.clear()
    run(prepared(request_for()))
    assert begun == []


def test_a_run_of_an_earlier_version_has_one_line(
    request_for: Build, whole: Whole, begun: list[str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    whole.copied(tmp_path / "heads")
    path = tmp_path / "heads/quick.json"
    record = json.loads(path.read_text())
    del record["notes"]["heads"]
    path.write_text(json.dumps(record))
    run(prepared(request_for()))
    assert begun == []
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("quick.json does not say with which heads") == 1


def test_a_search_that_fails_leaves_statistics_and_tree_of_one_search(
    request_for: Build, whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole.copied(tmp_path / "heads")
    session = prepared(request_for())
    path = session.state.path
    record = json.loads(path.read_text())
    del record["phases"]["search"]
    path.write_text(json.dumps(record))
    names = ("statistics.npz", "tree.json")
    before = [(session.heads / name).read_bytes() for name in names]

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("medusa_kit.quick.search.search_tree", fail)
    with pytest.raises(KeyboardInterrupt):
        run(session)
    assert [(session.heads / name).read_bytes() for name in names] == before
