"""Pull, and heads by their name on the Hub: whole or not at all, resumed, refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import standin_hub
from huggingface_hub import constants
from standin_hub import Fault, StandInHub

from medusa_kit.base_model import BaseModel
from medusa_kit.errors import CheckpointError, HubError, UsageError
from medusa_kit.heads import load_heads
from medusa_kit.hub_client import HubName, on_hub
from medusa_kit.infer.loading import find_heads

Run = Callable[..., tuple[int, str, str]]

MODEL = ["--model", "debug-tiny", "--device", "cpu"]


@pytest.fixture
def pushed(hub: StandInHub, folder: Path) -> StandInHub:
    """Branch `main` with the heads, `next` with the same but their tree."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    repository = hub.add("me/heads", files)
    repository.commit("next", {name: files[name] for name in files if name != "tree.json"})
    return hub


def test_pull(pushed: StandInHub, run: Run, folder: Path, tmp_path: Path) -> None:
    code, out, err = run("pull", "me/heads")
    assert (code, out.strip()) == (0, "heads"), err
    got = {path.name: path.read_bytes() for path in (tmp_path / "heads").iterdir()}
    assert got == {path.name: path.read_bytes() for path in folder.iterdir()}
    code, _, err = run("pull", "me/heads@next")
    assert (code, "exists and is not empty" in err) == (2, True)
    assert run("pull", "me/heads@next", "heads", "--force")[0] == 0
    assert not (tmp_path / "heads/tree.json").exists()
    assert not list(tmp_path.glob(".heads*"))


def test_a_drop_is_resumed_where_it_was(
    pushed: StandInHub, run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    pushed.faults.append(Fault("GET /me/heads/resolve", status=429, headers={"Retry-After": "3"}))
    weights = f"GET /me/heads/resolve/{pushed.repositories['me/heads'].at('main')}/heads.safet"
    pushed.faults += [Fault(weights, after=5000), Fault(weights, after=3000)]
    code, _, err = run("pull", "me/heads", "deep/er")
    assert (code, pushed.faults) == (0, []), err
    assert pushed.resumed == [5000, 8000]
    pulled = Path("deep/er/heads.safetensors").read_bytes()
    assert pulled == (folder / "heads.safetensors").read_bytes()


def test_an_interrupted_pull_leaves_nothing_half_and_goes_on(
    pushed: StandInHub, run: Run, folder: Path, tmp_path: Path
) -> None:
    weights = "GET /me/heads/resolve/" + str(pushed.repositories["me/heads"].at("main"))
    pushed.faults.append(Fault(f"{weights}/heads.safetensors", status=403))
    code, out, err = run("pull", "me/heads")
    assert (code, out) == (1, ""), err
    assert not (tmp_path / "heads").exists()
    asked = len(pushed.requests)
    assert run("pull", "me/heads")[0] == 0
    again = [one for one in pushed.requests[asked:] if one.startswith(weights)]
    assert f"{weights}/heads.safetensors" in again
    assert f"{weights}/config.json" not in again
    assert load_files(tmp_path / "heads") == load_files(folder)


def load_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_damage_is_seen(
    pushed: StandInHub, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A large file of the right size whose bytes are not those the Hub names."""
    monkeypatch.setattr(standin_hub, "_oid", lambda path, content: "0" * 64)
    code, _, err = run("pull", "me/heads")
    assert (code, "statistics.npz arrived damaged" in err or "heads.safe" in err) == (1, True), err
    assert not (tmp_path / "heads").exists()


def test_pull_bad_input(pushed: StandInHub, run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    pushed.add("me/model", {"config.json": b'{"model_type": "llama"}'})
    pushed.add("me/data", {"rows.jsonl": b""})
    for arguments, code, told in [
        (["heads"], 2, "expected ORG/NAME or ORG/NAME@REVISION"),
        (["me/heads@never"], 1, "it has no revision 'never'"),
        (["me/nothing"], 1, "there is no such repository, or you may not see it"),
        (["me/heads", "."], 2, "is the working folder"),
        (["me/heads", "file"], 2, "file is a file, expected a folder"),
        (["me/model"], 1, "holds no heads of ours"),
        (["me/data"], 1, "config.json is missing"),
    ]:  # fmt: skip
        found = run("pull", *arguments)
        assert (found[0], told in found[2]) == (code, True), found[2]
    assert not {path.name for path in tmp_path.iterdir()} - {"file", "made", "cache"}


def test_heads_by_name_and_revision(
    pushed: StandInHub, run: Run, chat_base: BaseModel, waits: list[float]
) -> None:
    found = find_heads(chat_base, "me/heads@next")
    assert found is not None
    assert load_heads(found, chat_base).num_heads == 3
    assert not (found / "tree.json").exists()
    newest = find_heads(chat_base, "me/heads")
    assert newest is not None
    assert (newest / "tree.json").exists()
    assert not (newest / "statistics.npz").exists()  # decoding has no use for it
    with pytest.raises(HubError, match="it has no revision 'never'") as caught:
        find_heads(chat_base, "me/heads@never")
    assert isinstance(caught.value, CheckpointError)
    pushed.faults += [Fault("GET /api/models", lost=True)]
    assert find_heads(chat_base, "me/heads@next") == found
    code, _, err = run("generate", "Name a tree.", *MODEL, "--heads", "me/heads", "-n", "4")
    assert code == 0, err
    code, _, err = run("tree-search", *MODEL, "--heads", "me/heads", "--sizes", "1,2")
    assert (code, "--output" in err, "medusa-kit pull me/heads" in err) == (2, True, True)


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert on_hub("a/b@refs/pr/1") == HubName("a/b", "refs/pr/1")
    assert str(HubName("a/b", "c")) == "a/b@c"
    for folder in ("./a/b", "~/a", "/a/b", "a/b/c", "heads", Path("a/b")):
        assert on_hub(folder) is None
    (tmp_path / "a/b").mkdir(parents=True)
    assert on_hub("a/b") is None
    with pytest.raises(UsageError):
        HubName.parse("a/b/c")
    assert json.dumps(str(HubName.parse("a/b")))
