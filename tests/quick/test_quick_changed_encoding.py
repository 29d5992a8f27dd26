"""A quick run does not go on with answers to prompts that were tokenized differently."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.text.other_encodings import with_pairs
from support.tiny_models import model_of

from medusa_kit.errors import ConfigError
from medusa_kit.quick import trial
from medusa_kit.quick.run import prepared, run
from medusa_kit.quick.session import Request

Build = Callable[..., Request]


def interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


@pytest.fixture
def stopped(
    request_for: Build, prompt_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Request:
    """A run that was stopped once it had its kept-out answers."""
    prompt_file.write_text("".join(f"Count from 12 to {i}.\n" for i in range(30)))
    tokenizer = with_pairs(single_digits=False)
    model = model_of("llama", vocab_size=len(tokenizer), pad_token_id=None, bos_token_id=None)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "base")
    request = request_for(model=str(tmp_path / "base"))
    with monkeypatch.context() as patch:
        patch.setattr(trial, "measure", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(prepared(request))
    return request


def forget_encoding(request: Request) -> Path:
    """As an older version left the settings."""
    path = request.output / "held_out.jsonl.meta.json"
    found = json.loads(path.read_text())
    del found["encoding"]
    path.write_text(json.dumps(found))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
def test_it_is_refused_where_the_tokenizer_changed(
    stopped: Request, tmp_path: Path, known: bool
) -> None:
    if not known:
        forget_encoding(stopped)
    before = (stopped.output / "held_out.jsonl").read_bytes()
    with_pairs(single_digits=True).save_pretrained(tmp_path / "base")
    with pytest.raises(ConfigError, match="another tokenizer or chat template") as caught:
        run(prepared(stopped))
    assert "--fresh" in str(caught.value.hint)
    assert (stopped.output / "held_out.jsonl").read_bytes() == before
    assert run(prepared(stopped, fresh=True), fresh=True)["bugs"] == 0


@pytest.mark.slow
def test_a_run_of_an_older_version_goes_on_where_the_tokens_are_the_same(stopped: Request) -> None:
    settings = forget_encoding(stopped)
    before = (stopped.output / "held_out.jsonl").read_bytes()
    session = prepared(stopped)
    assert run(session)["bugs"] == 0
    assert (stopped.output / "held_out.jsonl").read_bytes() == before
    made = (stopped.output / "answers.jsonl.meta.json", session.heads / "config.json", settings)
    for path in (*made, session.heads / "tree.json"):
        assert json.loads(path.read_text())["encoding"] == session.base.encoding
