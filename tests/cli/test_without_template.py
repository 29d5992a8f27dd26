"""A base without a chat template: every command that reads prompts says what becomes of them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.debug_model import ROOT

from medusa_kit.base.loading import load_base_model
from medusa_kit.cli import serve
from medusa_kit.data.without_template import CONTINUES, INCOMPLETE, template_note

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module", params=["tiny", "tiny-Instruct"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / request.param
    base = load_base_model("debug-tiny", device="cpu")
    base.tokenizer.chat_template = None
    base.model.save_pretrained(path)
    base.tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "ab", "-n", "2"],
        ["verify", "--prompts", "PROMPTS", "-n", "2"],
        ["bench", "--prompts", "PROMPTS", "-n", "2", "--drafters", "none"],
        ["data", "generate", "PROMPTS", "-o", "OUT", "-n", "2"],
        ["serve"],
        ["train", f"{ROOT}/recipes/debug.yaml", "--dry-run", "data.sources=[OUT]"],
    ],
    ids=lambda command: command[0],
)  # fmt: skip
def test_one_line_says_so(
    run: Run, folder: Path, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("ab\nba\n")
    monkeypatch.setattr(serve, "_run", lambda *_: None)
    given = [one.replace("PROMPTS", str(prompts)).replace("OUT", str(tmp_path / "out.jsonl"))
             for one in command]  # fmt: skip
    model = [f"base.model={folder}"] if command[0] == "train" else ["-m", str(folder)]
    port = ["--port", "0"] if command[0] == "serve" else []
    _, _, err = run(*given, *model, *port)
    said = " ".join(err.split())
    assert said.count(CONTINUES) == 1
    assert (INCOMPLETE in said) == (folder.name == "tiny-Instruct")


@pytest.mark.parametrize(
    ("name", "talks"),
    [("org/Some-7B-Instruct", True), ("org/gemma-3-4b-it", True), ("Llama-2-7b-chat-hf", True),
     ("/chat/it/gpt2", False), ("org/bitnet-2b", False), ("org/Qwen2.5-0.5B", False)],
)  # fmt: skip
def test_names_of_models_that_were_trained_on_conversations(name: str, talks: bool) -> None:
    tokenizer = load_base_model("debug-tiny", device="cpu").tokenizer
    assert template_note(tokenizer, name) == ""
    tokenizer.chat_template = None
    assert (INCOMPLETE in template_note(tokenizer, name)) == talks
    assert template_note(None, name) == ""
