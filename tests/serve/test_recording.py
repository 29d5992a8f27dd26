"""`serve --record FILE`: what is in the file, what is not, and that answers do not depend on it."""

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from support.serving.live_server import LiveServer, live_server
from support.serving.waiting import until
from support.small_engines import engine_with_heads, lively_chat_base

from medusa_kit.data.answer_settings import read_settings, rows_of, write_settings
from medusa_kit.data.readers import AnswerRow, read_rows
from medusa_kit.distill.answer_file import AnswerFile
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import ConfigError, MedusaKitError
from medusa_kit.serve import recording
from medusa_kit.serve.calls.call_grammar import calls_grammar
from medusa_kit.serve.recording import Recorder, check_recording, chosen_by_model
from medusa_kit.settings.grammar import Grammar
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.settings.serve import ServeConfig

TOKENS = 12


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_with_heads(lively_chat_base())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "served.jsonl"


def ask(live: LiveServer, text: str, **fields: Any) -> list[int]:
    """The tokens of the answer to a prompt."""
    asked = {"model": live.model, "prompt": text, "max_tokens": TOKENS, "temperature": 0,
             "return_token_ids": True, **fields}  # fmt: skip
    key = {"Authorization": "Bearer sk-a-secret-key"}
    with live.http() as http:
        response = http.post("/v1/completions", json=asked, headers=key)
    assert response.status_code == 200, response.text
    if fields.get("stream"):
        lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
        choices = [choice for line in lines for choice in json.loads(line[6:])["choices"]]
        return [token for choice in choices for token in choice.get("token_ids", [])]
    ids: list[int] = response.json()["choices"][0]["token_ids"]
    return ids


def tokens_of(engine: Engine, prompt: str) -> list[int]:
    ids: list[int] = engine.base.tokenizer(prompt).input_ids
    return ids


def test_rows_are_what_was_asked_and_answered(engine: Engine, file: Path) -> None:
    with live_server(engine, record=str(file)) as live:
        answers = {
            "One": ask(live, "One"),
            "Two": ask(live, "Two", stream=True),
            "Three": ask(live, "Three", temperature=0.7, seed=5),
        }
        assert ask(live, "One") == answers["One"]  # not recorded again
    rows = [row for row in read_rows(str(file)) if isinstance(row, AnswerRow)]
    asked = {text: tokens_of(engine, text) for text in answers}
    assert {tuple(row.prompt_ids): row.response_ids for row in rows} == {
        tuple(asked[text]): ids for text, ids in answers.items()
    }
    drawn = {tuple(row.prompt_ids): (row.sampling or {})["temperature"] for row in rows}
    assert drawn[tuple(asked["Three"])] == 0.7
    assert drawn[tuple(asked["One"])] == 0.0
    assert not rows_of(str(file)).doubtful
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_nothing_else_of_a_request_is_written(engine: Engine, file: Path) -> None:
    with live_server(engine, record=str(file)) as live:
        ask(live, "One", user="somebody@example.org")
    written = file.read_text() + json.dumps(read_settings(file))
    for secret in ("secret", "127.0.0.1", "somebody", "Bearer"):
        assert secret not in written
    keys = set(json.loads(file.read_text()))
    assert keys == {"id", "asked", "prompt_ids", "response_ids", "finish_reason", "sampling",
                    "origin"}  # fmt: skip


WEATHER = {"weather": {"type": "object"}}
SCHEMA = {"type": "object", "description": "a secret"}


@pytest.mark.parametrize(
    ("sampling", "recorded"),
    [
        ({}, True),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 3}, True),
        ({"temperature": 0.7, "min_p": 0.1, "repetition_penalty": 1.0}, True),
        ({"logit_bias": {}}, True),
        ({"logit_bias": {5: 1.0}}, False),
        ({"presence_penalty": 0.5}, False),
        ({"frequency_penalty": 0.5}, False),
        ({"repetition_penalty": 1.3}, False),
        ({"temperature": 0.7, "acceptance": "typical"}, False),
        ({"grammar": Grammar.json_schema(SCHEMA)}, False),
        ({"grammar": calls_grammar(WEATHER, None, forced=True, at_most_one=False)}, False),
        ({"grammar": calls_grammar(WEATHER, None, forced=False, at_most_one=False)}, True),
    ],
)
def test_what_the_model_alone_chose_is_recorded(sampling: dict[str, Any], recorded: bool) -> None:
    assert chosen_by_model(SamplingParams(**sampling)) is recorded


def test_answers_that_others_decided_are_left_out(engine: Engine, file: Path) -> None:
    with live_server(engine, record=str(file)) as live:
        (first, *_) = ask(live, "One")
        assert ask(live, "Two", logit_bias={str(first): -5})
    assert [row.prompt_ids for row in read_rows(str(file)) if isinstance(row, AnswerRow)] == [
        tokens_of(engine, "One")
    ]


def test_a_call_that_the_model_may_make_is_recorded_without_its_grammar(
    engine: Engine, file: Path
) -> None:
    free = calls_grammar({"weather": SCHEMA}, None, forced=False, at_most_one=False)
    recorder = Recorder(str(file), engine.base)
    recorder.add(answered(engine, "One", grammar=free))
    recorder.close()
    assert json.loads(file.read_text())["sampling"] == {"temperature": 0.0}
    assert "secret" not in file.read_text()


def test_an_answer_that_a_stop_string_cuts_has_not_ended(engine: Engine, file: Path) -> None:
    ids = engine.generate(tokens_of(engine, "One"), max_new_tokens=TOKENS).token_ids
    with live_server(engine, record=str(file)) as live:
        cut = ask(live, "One", stop=[engine.base.tokenizer.decode(ids[3:4])])
    (row,) = (row for row in read_rows(str(file)) if isinstance(row, AnswerRow))
    assert len(row.response_ids) < TOKENS
    assert row.response_ids == cut
    assert row.finish_reason == "length"


def test_the_precision_of_answers_is_said(engine: Engine, file: Path) -> None:
    recorder = Recorder(str(file), engine.base, "int8")
    recorder.add(answered(engine, "One"))
    recorder.close()
    assert (read_settings(file) or {})["activations"] == "int8"
    with pytest.raises(ConfigError, match="activations"):
        Recorder(str(file), engine.base)


def test_a_server_goes_on_with_its_file_and_refuses_another_models(
    engine: Engine, file: Path
) -> None:
    for text in ("One", "Two", "One"):
        with live_server(engine, record=str(file)) as live:
            ask(live, text)
    assert len(list(read_rows(str(file)))) == 2
    check_recording(str(file))
    other = lively_chat_base()
    other.own_model.get_input_embeddings().weight.data[5] += 1.0
    with pytest.raises(ConfigError, match="made with other settings"):
        Recorder(str(file), other)


def test_other_files_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"mine": 1}\n')
    with pytest.raises(ConfigError, match="is missing"):
        check_recording(str(own))
    with pytest.raises(ConfigError, match="--record"):
        check_recording(str(tmp_path))
    generated = tmp_path / "answers.jsonl"
    write_settings(generated, {"base": "x", "max_new_tokens": 8})
    with pytest.raises(ConfigError, match="data generate"):
        check_recording(str(generated))
    with pytest.raises(ConfigError, match="record does not go with replicas"):
        ServeConfig(record="a.jsonl", replicas=2)
    assert own.read_text() == '{"mine": 1}\n'


def test_two_servers_do_not_write_one_file(engine: Engine, file: Path) -> None:
    recorder = Recorder(str(file), engine.base)
    with pytest.raises(ConfigError, match="is being written to"):
        Recorder(str(file), engine.base)
    recorder.close()
    Recorder(str(file), engine.base).close()
    assert not file.exists()  # nothing was asked


def test_a_file_has_a_size_that_it_does_not_outgrow(
    engine: Engine, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recording, "MAX_BYTES", 1)
    with live_server(engine, record=str(file)) as live:
        for text in ("One", "Two", "Three"):
            assert ask(live, text)
    assert len(list(read_rows(str(file)))) == 1
    assert capsys.readouterr().err.count("nothing more is recorded") == 1


def test_a_full_disk_ends_the_recording_alone(
    engine: Engine, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise MedusaKitError("cannot write: No space left on device")

    expected = engine.generate(tokens_of(engine, "Two"), max_new_tokens=TOKENS).token_ids
    with live_server(engine, record=str(file)) as live:
        ask(live, "One")
        until(lambda: file.exists() and file.stat().st_size > 0)
        monkeypatch.setattr(AnswerFile, "append", full)
        assert ask(live, "Two") == ask(live, "Two") == expected
    assert capsys.readouterr().err.count("No space left") == 1
    assert len(list(read_rows(str(file)))) == 1


def answered(engine: Engine, text: str, **options: Any) -> Any:
    """A request that has ended."""
    with engine.shared_batch() as batch:
        answer = batch.submit(prompt=tokens_of(engine, text), max_new_tokens=3, **options)
        answer.result()
    return answer.submission.request


def test_answers_of_another_model_are_left_out(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one with an adapter, then of weights that have changed since."""
    engine, other = engine_with_heads(lively_chat_base()), lively_chat_base()
    other.own_model.get_input_embeddings().weight.data[5] += 1.0
    recorder = Recorder(str(file), engine.base)
    recorder.add(answered(engine, "One"))
    recorder.add(answered(engine_with_heads(other), "Two"))
    until(lambda: file.exists() and file.stat().st_size > 0)
    engine.base.own_model.get_input_embeddings().weight.data[5] += 1.0
    recorder.add(answered(engine, "Three"))
    recorder.close()
    assert len(list(read_rows(str(file)))) == 1
    assert "the model was changed" in capsys.readouterr().err
