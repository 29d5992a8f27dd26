"""Pull, and heads by their name on the Hub: whole or not at all, resumed, refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from support import standin_hub
from support.clocks import own_time
from support.standin_hub import Fault, StandInHub

import medusa_kit
from medusa_kit.base import names
from medusa_kit.base.hub_client import HubName, on_hub
from medusa_kit.base.model import BaseModel
from medusa_kit.engine.load import find_heads
from medusa_kit.errors import CheckpointError, HubError, UsageError
from medusa_kit.heads import load_heads
from medusa_kit.hub import pull
from medusa_kit.hub.pull import RECORD

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
    assert load_files(tmp_path / "heads") == load_files(folder)
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


def test_a_hub_that_could_not_be_reached_is_asked_again_later(
    pushed: StandInHub, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    own_time(monkeypatch, names, monotonic=lambda: now[0])
    with monkeypatch.context() as cut_off:
        cut_off.setattr(names, "reached", lambda _: False)
        for _ in range(2):
            code, _, err = run("pull", "me/heads")
            assert code == 1
            assert "cannot be reached" in err
    assert pushed.requests == []
    assert run("pull", "me/heads")[0] == 1, "at once it is not tried again"
    now[0] += names.AGAIN
    code, _, err = run("pull", "me/heads")
    assert code == 0, err


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
    """All but the record of a pull, which was not pulled."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != RECORD}


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"a folder"
            for path in folder.rglob("*")}  # fmt: skip


@pytest.mark.parametrize(
    "name", ["notes.txt", "config.json", "deep/model.bin", "empty/", "link", "tree.json"]
)
def test_force_deletes_nothing_that_no_pull_put_there(
    pushed: StandInHub, run: Run, tmp_path: Path, name: str
) -> None:
    """A folder that was never pulled, and files added to one that was."""
    place = tmp_path / "heads"
    if name == "config.json":
        place.mkdir()  # never pulled: all of it is the user's
    else:
        assert run("pull", "me/heads", "heads")[0] == 0
    if name == "link":
        (place / name).symlink_to(tmp_path / "made")
    elif name.endswith("/"):
        (place / name).mkdir()
    else:
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text("years of work")
    before, made = everything(place), everything(tmp_path / "made")
    code, _, err = run("pull", "me/heads@next", "heads", "--force")
    assert (code, "no pull put there" in err, name.split("/")[0] in err) == (2, True, True), err
    assert everything(place) == before
    assert everything(tmp_path / "made") == made


def test_what_is_written_while_files_arrive_is_kept(
    pushed: StandInHub, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("pull", "me/heads")[0] == 0
    download = pull._download

    def slow(*arguments: Any) -> None:
        download(*arguments)
        (tmp_path / "heads/notes.txt").write_text("years of work")

    monkeypatch.setattr(pull, "_download", slow)
    assert run("pull", "me/heads@next", "heads", "--force")[0] == 2
    assert (tmp_path / "heads/notes.txt").read_text() == "years of work"


def test_an_interrupted_replacement_leaves_what_was_there(
    pushed: StandInHub, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("pull", "me/heads")[0] == 0
    before, rename = everything(tmp_path / "heads"), Path.replace

    def interrupted(self: Path, target: Path) -> Path:
        if target == tmp_path / "heads" and self.suffix == ".tmp":
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupted)
        assert run("pull", "me/heads@next", str(tmp_path / "heads"), "--force")[0] != 0
    assert everything(tmp_path / "heads") == before
    assert run("pull", "me/heads@next", "heads", "--force")[0] == 0
    assert not (tmp_path / "heads/tree.json").exists()


def test_a_linked_destination_is_filled_where_it_points(
    pushed: StandInHub, run: Run, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "disk/heads").mkdir(parents=True)
    (tmp_path / "heads").symlink_to("disk/heads")
    assert run("pull", "me/heads")[0] == 0
    assert (tmp_path / "heads").is_symlink()
    assert load_files(tmp_path / "disk/heads") == load_files(folder)


def test_a_destination_named_by_way_of_itself(pushed: StandInHub, run: Run, tmp_path: Path) -> None:
    assert run("pull", "me/heads")[0] == 0
    code, _, err = run("pull", "me/heads@next", "heads/../heads", "--force")
    assert (code, (tmp_path / "heads/tree.json").exists()) == (0, False), err
    assert not list(tmp_path.glob(".heads*"))


def test_links_in_a_circle_are_no_destination(pushed: StandInHub, run: Run, tmp_path: Path) -> None:
    (tmp_path / "heads").symlink_to("other")
    (tmp_path / "other").symlink_to("heads")
    code, _, err = run("pull", "me/heads")
    assert (code, "heads is no place to write to" in err) == (2, True), err


def test_only_what_a_pull_left_is_cleared_away(
    pushed: StandInHub, run: Run, tmp_path: Path
) -> None:
    """An interrupted pull of another commit, and a folder of the user's with such a name."""
    pushed.faults.append(Fault("GET /me/heads/resolve", status=403))
    assert run("pull", "me/heads@next")[0] == 1
    (left,) = tmp_path.glob(".heads.*.pull")
    own = tmp_path / ".heads.0123456789ab.pull"
    own.mkdir()
    (own / "notes.txt").write_text("years of work")
    assert run("pull", "me/heads")[0] == 0
    assert not left.exists()
    assert (own / "notes.txt").read_text() == "years of work"
    (tmp_path / "heads").rename(tmp_path / "before")
    own.rename(left)  # where the next pull's files would gather
    code, _, err = run("pull", "me/heads@next")
    assert (code, "no pull made it" in err) == (2, True), err
    assert everything(left) == {"notes.txt": b"years of work"}


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
    pushed: StandInHub, run: Run, chat_base: BaseModel, waits: list[float], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
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
    search = ("tree-search", *MODEL, "--heads", "me/heads", "--sizes", "1,2", "--no-dynamic")
    code, _, err = run(*search)
    assert (code, "no statistics at" in err, "--prompts" in err) == (2, True, True)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Name a tree.\n\nName a city.\n")
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))
    before = sorted(newest.rglob("*"))
    code, _, err = run(*search, "--prompts", prompts, "-n", "8", "--nodes", "2")
    assert code == 0, err
    assert sorted(newest.rglob("*")) == before, "the Hub's cache is not ours to write to"
    engine = medusa_kit.load("debug-tiny", heads="me/heads", device="cpu")
    assert engine.tree.num_nodes == 2


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
