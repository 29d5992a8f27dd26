"""`train --quick` on a base that is on the Hub."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.standin_hub import StandInHub

from medusa_kit.base.model import BaseModel
from medusa_kit.quick import search, settings

NAME = "someone/tiny-chat"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "ANSWER_TOKENS", 12)
    monkeypatch.setattr(settings, "CPU_POSITIONS", 48)
    monkeypatch.setattr(settings, "EVAL_FRACTION", 0.2)
    monkeypatch.setattr(search, "CHOICES", (((1, 2, 4), False),))
    monkeypatch.setattr(search, "REPORTED", (2, 4))


def test_heads_for_a_base_on_the_hub(
    hub: StandInHub, run: Callable[..., tuple[int, str, str]], chat_base: BaseModel, tmp_path: Path
) -> None:
    """From its id alone; the recipe and what to type next name it so, and it is fetched once."""
    folder = tmp_path / "saved"
    chat_base.model.save_pretrained(folder)
    chat_base.tokenizer.save_pretrained(folder)
    hub.add(NAME, {path.name: path.read_bytes() for path in folder.iterdir()})
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"Count from {i} to {i * i}.\n" for i in range(30)))
    asked = ("train", "--quick", "-m", NAME, "--prompts", prompts.name, "--device", "cpu")
    code, out, err = run(*asked)
    assert code == 0, err
    assert f"heads for {NAME}" in out
    assert f"medusa-kit chat -m {NAME} --heads " in out
    made = next(tmp_path.glob("heads-*"))
    assert json.loads((made / "run/heads/config.json").read_text())["base_model_name"] == NAME
    assert f"model: {NAME}" in (made / "recipe.yaml").read_text()
    assert hub.count("GET /someone/tiny-chat/resolve/") > 0
    assert hub.count("model.safetensors") <= 4  # what the client asks about one file
