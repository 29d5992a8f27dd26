"""Drafters on the command line and in an engine file: what reaches the engine, what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.debug_model import MODEL, PLAIN, plain_text

from medusa_kit.drafters.factory import DraftContext
from medusa_kit.drafters.plain import PlainDrafter
from medusa_kit.engine import load as loading

Run = Callable[..., tuple[int, str, str]]
COMMANDS = [["generate", "hi"], ["chat"], ["verify"], ["bench"]]


class Loaded(Exception):
    """Instead of loading: the arguments that would have been used."""


@pytest.fixture
def loaded(run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """What a command gives to `medusa_kit.load`."""

    def load(**arguments: Any) -> Any:
        raise Loaded(arguments)

    monkeypatch.setattr(loading, "load", load)
    monkeypatch.setattr("medusa_kit.base.names._cached", lambda: ["other"])

    def call(*arguments: object) -> dict[str, Any]:
        with pytest.raises(Loaded) as caught:
            run(*arguments)
        given: dict[str, Any] = caught.value.args[0]
        return given

    return call


class Noting(PlainDrafter):
    notes: ClassVar = ["nothing was found", "a second note"]


@pytest.fixture
def suffix(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options that a stand-in for the drafter `suffix` is built with; it says something."""
    seen: list[Any] = []

    def build(context: DraftContext, options: Any) -> PlainDrafter:
        seen.append(options)
        return Noting(context.device)

    monkeypatch.setattr("medusa_kit.drafters.text.suffix.build", build)
    return seen


@pytest.fixture
def engine_file(tmp_path: Path) -> Path:
    path = tmp_path / "engine.yaml"
    path.write_text("""
model: debug-tiny
revision: abc
heads: untrained
tree: tree.json
dtype: bfloat16
device: cpu
force: true
drafter: {name: suffix, options: {num_nodes: 12, max_match: 4}}
fallback: prompt-lookup
""")
    return path


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_drafter_options_reach_the_engine(loaded: Any, command: list[str]) -> None:
    given = loaded(*command, *MODEL, "--drafter", "draft-model", "--draft-model", "small",
                   "--drafter-option", "threshold=0.5", "--drafter-option",
                   "staged.drafter=suffix", "--fallback", "suffix", "--revision", "v2")  # fmt: skip
    assert (given["fallback"], given["revision"]) == ("suffix", "v2")
    assert (given["model"], given["heads"], given["device"]) == ("debug-tiny", "auto", "cpu")
    assert (given["drafter"], given["draft_model"]) == ("draft-model", "small")
    assert given["drafter_options"] == {"threshold": 0.5, "staged": {"drafter": "suffix"}}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_file_gives_what_no_option_does(loaded: Any, engine_file: Path, command: Any) -> None:
    given = loaded(*command, "--config", engine_file)
    assert given == {
        "model": "debug-tiny", "revision": "abc", "heads": "untrained", "dtype": "bfloat16",
        "tree": str(engine_file.parent / "tree.json"), "device": "cpu", "weights": "checkpoint",
        "activations": "float32",
        "attention": "auto", "fixed_shapes": "auto", "compiled": False, "force": True,
        "check": False, "cache": "float32", "drafter": "suffix",
        "drafter_options": {"num_nodes": 12, "max_match": 4}, "draft_model": None,
        "fallback": "prompt-lookup", "prefix_cache": "on",
        "guesses": "paying"}  # fmt: skip


def test_options_win_over_the_file(loaded: Any, engine_file: Path) -> None:
    """Given ones only, those that repeat a default among them; what belongs to them goes too."""
    ask = ["generate", "hi", "--config", engine_file]
    given = loaded(*ask, "--dtype", "float32", "--heads", "auto", "--drafter-option", "num_nodes=6")
    assert (given["dtype"], given["heads"], given["tree"]) == ("float32", "auto", None)
    assert given["drafter_options"] == {"num_nodes": 6, "max_match": 4}
    given = loaded(*ask, "--drafter", "recycling", "-m", "other")
    assert (given["drafter"], given["drafter_options"]) == ("recycling", {})
    assert given["model"] == "other"
    assert given["revision"] is None
    given = loaded(*ask, "--drafter", "suffix", "--tree", "t.json")
    assert given["drafter_options"] == {"num_nodes": 12, "max_match": 4}
    assert (given["heads"], given["tree"]) == ("untrained", "t.json")
    assert loaded("bench", "--config", engine_file, "--heads", "x=auto")["heads"] == "auto"


WRONG_CALLS: dict[str, tuple[list[str], str]] = {
    "name": (["generate", "hi", "--drafter", "sufix"], "did you mean suffix?"),
    "option": (["chat", "--drafter", "suffix", "--drafter-option", "nodes=3"], "num_nodes?"),
    "form": (["verify", "--drafter", "suffix", "--drafter-option", "3"],
             "drafter option '3' is not of the form KEY=VALUE"),
    "no YAML": (["verify", "--drafter", "suffix", "--drafter-option", "store=[1"], "no YAML"),
    "no name": (["verify", "--drafter-option", "num_nodes=3"], "without a drafter"),
    "no model": (["chat", "--drafter", "draft-model"], "needs a smaller model"),
    "unused model": (["chat", "--drafter", "suffix", "--draft-model", "x"],
                     "drafter suffix does not use the draft model 'x'"),
    "no file": (["chat", "--config", "nowhere.yaml"], "no engine file at nowhere.yaml"),
    "compared": (["bench", "--drafters", "medusa,sufix"], "did you mean suffix?"),
    "no model to compare": (["bench", "--drafters", "draft-model"], "--draft-model MODEL"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_wrong_drafters_are_refused_before_loading(
    run: Run, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(loading, "load", None)
    arguments, message = WRONG_CALLS[case]
    code, out, err = run(*arguments, "-m", "debug-tiny")
    assert (code, out) == (2, "")
    assert message in err


def test_notes_of_a_drafter_are_told(
    run: Run, suffix: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = ["--drafter", "suffix", "--drafter-option", "num_nodes=5"]
    code, out, err = run("generate", "Name a tree.", *PLAIN, *ask, "--json")
    assert code == 0
    answer = json.loads(out)
    assert answer["text"] == plain_text("Name a tree.")
    assert answer["stats"]["drafter_notes"] == ["nothing was found", "a second note"]
    assert err.splitlines()[-1] == "nothing was found"
    assert {options.num_nodes for options in suffix} == {5}  # at load, and to answer
    lines = iter(["Name a tree."])
    monkeypatch.setattr("builtins.input", lambda _: next(lines, "/exit"))
    code, _, err = run("chat", *PLAIN, *ask)
    assert (code, err.splitlines()[-1]) == (0, "nothing was found")
    assert "drafter suffix\n" in err


def test_verify_and_bench_with_drafters(
    run: Run, suffix: list[Any], prompts: Path, tmp_path: Path
) -> None:
    short = [*MODEL, "--heads", "untrained", "--prompts", prompts, "--limit", "1", "-n", "6"]
    code, out, _ = run("verify", *short, "--drafter", "suffix", "--temperature", "0",
                       "--output", tmp_path / "verify.json")  # fmt: skip
    assert code == 0, out
    assert "drafter suffix" in out
    assert json.loads((tmp_path / "verify.json").read_text())["greedy"]["drafter"] == "suffix"
    assert suffix
    code, out, err = run("bench", *short, "--drafters", "medusa,suffix", "--peers", "assisted",
                         "--draft-model", "debug-tiny", "--output", tmp_path)  # fmt: skip
    assert code == 0, err
    record = json.loads((tmp_path / "bench.json").read_text())
    assert [method["name"] for method in record["methods"]] == [
        "transformers generate", "transformers assisted (debug-tiny)", "medusa-kit, plain decoding",
        "medusa-kit, untrained, medusa", "medusa-kit, suffix"]  # fmt: skip
    assert [method["identical"] for method in record["methods"]] == [1] * 5
    assert record["methods"][-1]["drafter_notes"] == ["nothing was found", "a second note"]
    assert all(method["decoding_tokens_per_second"] > 0 for method in record["methods"])
    assert "medusa-kit, suffix: nothing was found" in out
    assert "decoding" in out
    assert (record["drafter"], record["heads_refused"]) == ("auto", None)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_the_dtype_is_the_checkpoints_own_but_for_verify(loaded: Any, command: Any) -> None:
    """What verify promises is said of float32, unless a file or an option says otherwise."""
    usual = "float32" if command[0] == "verify" else "auto"
    assert loaded(*command, *MODEL)["dtype"] == usual
    assert loaded(*command, *MODEL, "--dtype", "auto")["dtype"] == "auto"
