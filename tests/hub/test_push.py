"""Push, by the real client against a stand-in Hub: whole, resumed, refused."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from support.small_engines import build_engine
from support.standin_hub import TOKEN, Fault, StandInHub

import medusa_kit
from medusa_kit.base.model import BaseModel
from medusa_kit.heads import MedusaHeads, save_heads

Run = Callable[..., tuple[int, str, str]]

# The client's own, about how it hands files to its HTTP library.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

LICENSES = ["--license", "apache-2.0", "--data-license", "cc-by-4.0"]


def test_push_then_load_by_name(
    hub: StandInHub, run: Run, folder: Path, chat_base: BaseModel
) -> None:
    (folder / "calibration_answers.jsonl").write_text("{}")
    code, out, err = run("push", folder, "me/heads", "--private", *LICENSES)
    assert code == 0, err
    assert "stays here: calibration_answers.jsonl" in err
    repository = hub.repositories["me/heads"]
    assert out.strip() == f"{hub.url}/me/heads/commit/{repository.branches['main']}"
    assert repository.private
    files = hub.files("me/heads")
    assert set(files) == {".gitattributes", "README.md", "config.json", "heads.safetensors",
                          "tree.json", "statistics.npz", "bench.json", "verify.json"}  # fmt: skip
    assert files["heads.safetensors"] == (folder / "heads.safetensors").read_bytes()
    assert not [name for name, content in files.items() if b"/home/me" in content]
    engine = build_engine(chat_base, heads="me/heads@main")
    assert engine.heads is not None
    assert engine.heads.num_heads == 3
    assert engine.tree.num_nodes == 5


def test_nothing_is_sent_twice(hub: StandInHub, run: Run, folder: Path) -> None:
    assert run("push", folder, "me/heads")[0] == 0
    received, commits = hub.received, len(hub.repositories["me/heads"].commits)
    code, _, err = run("push", folder, "me/heads")
    assert (code, "the repository has all of this" in err) == (0, True)
    assert (hub.received, len(hub.repositories["me/heads"].commits)) == (received, commits)
    (folder / "verify.json").unlink()
    code, _, err = run("push", folder, "me/heads")
    assert (code, "what is no more here: verify.json" in err) == (0, True)
    assert "verify.json" not in hub.files("me/heads")


def test_branch(hub: StandInHub, run: Run, folder: Path) -> None:
    assert run("push", folder, "me/heads", "--revision", "try/one")[0] == 0
    assert set(hub.files("me/heads")) == {".gitattributes"}
    assert "heads.safetensors" in hub.files("me/heads", "try/one")
    assert b"--heads me/heads@try/one" in hub.files("me/heads", "try/one")["README.md"]


@pytest.mark.parametrize(
    "fault",
    [
        Fault("PUT /storage", after=1000),
        Fault("/commit/", after=10),
        Fault("/commit/", lost=True),
        Fault("/commit/", status=429, headers={"Retry-After": "7"}),
        Fault("/preupload/", status=429, headers={"Retry-After": "7"}),
        Fault("/create", status=503),
        Fault("GET /api/models", lost=True),
    ],
    ids=lambda fault: f"{fault.where.strip('/')}-{fault.status or fault.after or 'lost'}",
)
def test_faults_are_lived_through(
    hub: StandInHub, run: Run, folder: Path, fault: Fault, waits: list[float]
) -> None:
    hub.faults.append(fault)
    code, out, err = run("push", folder, "me/heads")
    assert code == 0, err
    assert not hub.faults
    assert len(out.splitlines()) == 1
    assert hub.files("me/heads")["heads.safetensors"] == (folder / "heads.safetensors").read_bytes()
    large = [folder / "heads.safetensors", folder / "statistics.npz"]
    assert hub.received >= large[0].stat().st_size
    assert hub.count("PUT /storage") <= len(large) + (fault.where == "PUT /storage")
    assert len(hub.repositories["me/heads"].commits) == 2  # of the repository itself, and ours
    assert waits
    if "Retry-After" in fault.headers:
        assert max(waits) in (7, 8)  # the client adds a second


def test_rerun_after_a_lasting_fault_sends_only_the_rest(
    hub: StandInHub, run: Run, folder: Path, waits: list[float]
) -> None:
    hub.faults += [Fault("/commit/", after=10) for _ in range(5)]
    code, out, err = run("push", folder, "me/heads")
    assert (code, out) == (1, "")
    assert "no connection with" in err
    assert "again to resume" in err
    assert len(waits) == 4
    arrived = hub.received
    assert arrived > 0
    assert run("push", folder, "me/heads")[0] == 0
    assert hub.received == arrived
    assert "heads.safetensors" in hub.files("me/heads")


def test_a_wait_too_long_is_refused(
    hub: StandInHub, run: Run, folder: Path, waits: list[float]
) -> None:
    hub.faults.append(Fault("/commit/", status=429, headers={"Retry-After": "3600"}))
    code, _, err = run("push", folder, "me/heads")
    assert (code, "too many requests (429)" in err, waits) == (1, True, [])


def test_created_by_another_client_meanwhile(hub: StandInHub, run: Run, folder: Path) -> None:
    """The repository appears between look-up and creation: 409 is no error."""
    hub.add("me/heads", {})
    missing = {"X-Error-Code": "RepoNotFound"}
    hub.faults.append(Fault("GET /api/models", status=404, headers=missing))
    assert run("push", folder, "me/heads")[0] == 0
    assert hub.count("POST /api/repos/create") == 1


@pytest.mark.parametrize("there", ["other heads", "a model", "no config"])
def test_something_else_there_is_refused(
    hub: StandInHub, run: Run, folder: Path, there: str, chat_base: BaseModel, tmp_path: Path
) -> None:
    save_heads(MedusaHeads.for_base(chat_base, 2), tmp_path / "two")
    config = (tmp_path / "two/config.json").read_bytes()
    files = {
        "other heads": {"config.json": config, "run.txt": b"", "verify.json": b"{}"},
        "a model": {"config.json": b'{"model_type": "llama"}'},
        "no config": {"model.gguf": b"x"},
    }[there]
    hub.add("me/heads", files)
    before = hub.files("me/heads")
    (folder / "verify.json").unlink()
    code, _, err = run("push", folder, "me/heads")
    assert (code, "--force" in err) == (2, True)
    told = {"other heads": "num_heads 3 ≠ 2", "a model": "config.json", "no config": "model.gguf"}
    assert told[there] in err
    assert hub.files("me/heads") == before
    assert hub.received == 0
    assert run("push", folder, "me/heads", "--force")[0] == 0
    after = hub.files("me/heads")
    assert json.loads(after["config.json"])["num_heads"] == 3
    assert "verify.json" not in after  # a report about other heads
    assert files.keys() - after.keys() <= {"verify.json"}


def test_wrong_token_is_not_shown(
    hub: StandInHub, run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "abc-secret-of-no-known-form"
    monkeypatch.setenv("HF_TOKEN", secret)
    code, out, err = run("push", folder, "me/heads")
    assert (code, out) == (1, "")
    assert "does not accept your token (401: Invalid credentials" in err
    assert "hf auth login" in err
    assert secret not in err
    hub.faults.append(Fault("/create", status=403, message=f"not with {TOKEN}"))
    _, _, err = run("push", folder, "me/heads")  # `run` looks for the token
    assert "your token may not do that (403: not with ***" in err
    assert "a token with write access to me" in err


def test_no_token(hub: StandInHub, run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    code, _, err = run("push", folder, "me/heads")
    assert (code, "no token" in err, "`hf auth login`" in err, "HF_TOKEN" in err) == (
        1, True, True, True)  # fmt: skip
    assert not hub.requests


def test_no_network(
    hub: StandInHub, run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    code, _, err = run("push", folder, "me/heads")
    assert (code, "unset HF_HUB_OFFLINE" in err) == (1, True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    code, _, err = run("push", folder, "me/heads")
    assert (code, "http://127.0.0.1:9 cannot be reached" in err, waits) == (1, True, [])


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["FOLDER", "heads"], 2, "'heads' is no repository on the Hub, expected ORG/NAME"),
        (["FOLDER", "me/heads@x"], 2, "name the branch with --revision"),
        (["FOLDER", "me/a--b..c"], 1, "a name has letters"),
        (["nowhere", "me/heads"], 1, "no heads at nowhere"),
        (["FOLDER/..", "me/heads"], 1, "no heads at"),
        (["FOLDER", "me/heads", "--base-model", "llama"], 2, "'llama' is no repository"),
        (["FOLDER", "me/heads", "--bench", "FOLDER/config.json"], 1, "is no bench report"),
        (["FOLDER", "me/heads", "--verify", "FOLDER/tree.json"], 1, "is no verify report"),
        (["FOLDER", "me/public", "--private"], 2, "exists and is public"),
    ],
    ids=lambda value: None if isinstance(value, int) else str(value)[:40],
)
def test_bad_input(
    hub: StandInHub, run: Run, folder: Path, arguments: list[str], code: int, told: str
) -> None:
    hub.add("me/public", {})
    found = run("push", *(one.replace("FOLDER", str(folder)) for one in arguments))
    assert (found[0], told in found[2]) == (code, True), found[2]
    assert hub.received == 0


def test_reports_about_other_heads_are_refused(
    hub: StandInHub, run: Run, folder: Path, chat_base: BaseModel
) -> None:
    heads = MedusaHeads.for_base(chat_base, 3)
    for block in heads.blocks.parameters():
        block.data.add_(1)
    save_heads(heads, folder)
    code, _, err = run("push", folder, "me/heads")
    assert (code, "bench.json was measured with other heads" in err) == (2, True)
    (folder / "bench.json").unlink()
    record = json.loads((folder / "verify.json").read_text())
    record["greedy"]["base"]["fingerprint"] = "of another"
    (folder / "verify.json").write_text(json.dumps(record))
    code, _, err = run("push", folder, "me/heads")
    assert (code, "verify.json was measured on another base" in err) == (2, True)


def test_figures_of_rounded_weights_are_refused(
    hub: StandInHub, run: Run, folder: Path, tmp_path: Path
) -> None:
    def mark_base(record: Any) -> None:
        record["base"]["weights"] = "int8"

    changes: list[tuple[str, Callable[[Any], None]]] = [
        ("bench.json", mark_base),
        ("bench.json", lambda record: record["methods"][1].update(lossy=True)),
        ("verify.json", lambda record: mark_base(record["greedy"])),
        ("tree.json", lambda record: record.update(base_weights="int8")),
    ]
    for name, change in changes:
        whole = (folder / name).read_text()
        record = json.loads(whole)
        change(record)
        (folder / name).write_text(json.dumps(record))
        code, _, err = run("push", folder, "me/heads")
        assert (code, f"{name} was measured with" in err, "lossy" in err) == (2, True, True)
        (folder / name).write_text(whole)
    assert hub.received == 0


@pytest.mark.slow
def test_in_a_process_of_its_own(hub: StandInHub, folder: Path, tmp_path: Path) -> None:
    """Settings by environment alone, as a person gives them."""
    settings = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
                "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN}  # fmt: skip
    root = str(Path(medusa_kit.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "medusa_kit", "push", str(folder), "me/heads"], cwd=tmp_path,
        capture_output=True, text=True, check=False,
        env={**os.environ, **settings, "PYTHONPATH": root},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert TOKEN not in done.stdout + done.stderr
    assert "heads.safetensors" in hub.files("me/heads")
