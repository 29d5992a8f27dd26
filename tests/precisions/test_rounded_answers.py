"""Answers to train on in another precision of activations: by `data generate`, and by
`train --quick` for its training prompts alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.debug_model import MODEL
from support.kernels.rounded import (
    base_of,
    engine_of,
    gguf_file,
    multiplies_integers,
    plainly,
)
from support.small_engines import lively_chat_base
from support.typed import typed_command

from medusa_kit import console
from medusa_kit.base.model import BaseModel
from medusa_kit.data.answer_settings import read_settings
from medusa_kit.data.readers import AnswerRow, Conversation, read_rows
from medusa_kit.distill import generate
from medusa_kit.distill.generate import generate_answers
from medusa_kit.errors import ConfigError, IncompatibleBaseError
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.decode.request import Request
from medusa_kit.infer.decode.slots import common_length
from medusa_kit.infer.model_parts import Unsupported
from medusa_kit.infer.runners import backends
from medusa_kit.quick import answers as quick_answers
from medusa_kit.quick import run as quick_run
from medusa_kit.quick import session, settings
from medusa_kit.quick.answers import activations_for
from medusa_kit.quick.run import prepared, run

TOKENS = 12
KIND = "Q4_K"
integers_only = pytest.mark.skipif(
    not multiplies_integers(), reason="no integers are multiplied here"
)


def prompts(count: int) -> list[Conversation]:
    return [
        Conversation([{"role": "user", "content": f"Count to {n * n}."}], n, None, "prompts.jsonl")
        for n in range(1, count + 1)
    ]


def rows_of(path: Path) -> list[AnswerRow]:
    return [row for row in read_rows(str(path)) if isinstance(row, AnswerRow)]


def expected(rows: list[AnswerRow], activations: str) -> list[list[int]]:
    verifier = engine_of(KIND, activations).verifier
    return [plainly(verifier, row.prompt_ids, TOKENS) for row in rows]


@integers_only
def test_answers_are_those_of_plain_decoding_in_the_precision(tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    for count in (4, 9):  # the second call goes on
        report = generate_answers(
            base_of(KIND), prompts(count), out, max_new_tokens=TOKENS, batch_size=4,
            activations="int8",
        )  # fmt: skip
    assert (report.written, report.already_there) == (5, 4)
    rows = rows_of(out)
    answers = [row.response_ids for row in rows]
    assert answers == expected(rows, "int8")
    assert answers != expected(rows, "float32")


def unsupported(base: BaseModel) -> None:
    raise Unsupported("this is a test of torch")


@pytest.mark.parametrize("in_cpp", [True, False])
def test_a_system_prompt_is_read_once_where_that_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_cpp: bool
) -> None:
    """In C++: in torch a reused prefix differs from one read anew by rounding."""
    if in_cpp and kernels.load_library() is None:
        pytest.skip("the C++ kernels cannot be built here")
    if not in_cpp:
        monkeypatch.setattr(backends, "native_decoder", unsupported)
    requests, make = list[Request](), generate.make_request

    def noted(*arguments: Any) -> Request:
        requests.append(make(*arguments))
        return requests[-1]

    monkeypatch.setattr(generate, "make_request", noted)
    begin = "You answer as briefly as you can, and never without a reason. "
    asked = [
        Conversation([{"role": "user", "content": begin + word}], n, None, "prompts.jsonl")
        for n, word in enumerate(("one", "two", "six", "four"), start=1)
    ]
    out = tmp_path / "answers.jsonl"
    generate_answers(lively_chat_base(), asked, out, max_new_tokens=4, batch_size=2)
    texts = [list(request.prompt_ids) for request in requests]
    shared = common_length(min(texts), max(texts))
    assert shared > 20
    cached = [request.num_cached for request in requests]
    assert cached == ([0, 0, shared, shared] if in_cpp else [0] * 4)  # two are read together


@integers_only
def test_another_precision_is_another_setting(tmp_path: Path) -> None:
    """Files that do not name one are of float32, as earlier versions wrote them."""
    base, files = base_of(KIND), {name: tmp_path / name for name in ("float32", "int8")}
    for name, file in files.items():
        generate_answers(base, prompts(2), file, max_new_tokens=TOKENS, activations=name)
    assert "activations" not in (read_settings(files["float32"]) or {})
    for name, other in (("float32", "int8"), ("int8", "float32"), ("int8", "int16")):
        with pytest.raises(ConfigError, match=f"activations: '{other}' ≠ '{name}'"):
            generate_answers(
                base, prompts(3), files[name], max_new_tokens=TOKENS, activations=other
            )
    files["float32"].write_bytes(files["int8"].read_bytes())
    with pytest.raises(ConfigError, match="rows 1 to 2 \\(made with other settings"):
        generate_answers(base, prompts(2), files["float32"], max_new_tokens=TOKENS)


@integers_only
def test_the_command_takes_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, out = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    asked.write_text("One.\nTwo.\n")
    run_words = typed_command(monkeypatch, capsys)
    words = ["data", "generate", str(asked), "-m", str(gguf_file(KIND)), "-o", str(out)]
    words += ["-n", str(TOKENS)]
    code, _, err = run_words(*words, "--activations", "int8")
    assert code == 0, err
    assert [row.response_ids for row in rows_of(out)] == expected(rows_of(out), "int8")
    code, _, err = run_words(*words)
    assert code == 2
    assert "activations: 'float32' ≠ 'int8'" in " ".join(err.split())


def test_the_command_refuses_before_a_base_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_words = typed_command(monkeypatch, capsys)
    monkeypatch.setattr(console.err, "width", 160)
    words = ["data", "generate", "prompts.txt", "-o", str(tmp_path / "a.jsonl")]
    code, _, err = run_words(*words, *MODEL, "--activations", "int8")
    assert (code, "stored as floats" in err) == (2, True)
    code, _, err = run_words(*words, *MODEL, "--activations", "int9")
    assert (code, "activations 'int9' is unknown" in err) == (2, True)
    code, _, err = run_words(*words, "--endpoint", "http://x/v1", "--activations", "int8")
    assert (code, "--activations would not be used" in err) == (2, True)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def quick_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> session.Request:
    monkeypatch.setattr(settings, "ANSWER_TOKENS", TOKENS)
    asked = tmp_path / "prompts.txt"
    asked.write_text("".join(f"Count from {i} to {i * i}.\n" for i in range(30)))
    return session.Request(str(gguf_file(KIND)), str(asked), 1.0, tmp_path / "heads", "cpu",
                   clock=lambda: 0.0)  # fmt: skip


def until_training(request: session.Request, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(quick_run, "run_training", stop)
    with pytest.raises(KeyboardInterrupt):
        run(prepared(request))


@integers_only
def test_quick_answers_training_prompts_in_8_bits_and_no_others(
    quick_request: session.Request,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    until_training(quick_request, monkeypatch)
    folder = quick_request.output
    for name, precision in (("held_out", "float32"), ("answers", "int8")):
        rows = rows_of(folder / f"{name}.jsonl")
        assert rows
        assert [row.response_ids for row in rows] == expected(rows, precision)
    assert "answered with int8 activations" in capsys.readouterr().err
    record = json.loads((folder / "quick.json").read_text())
    assert record["phases"]["answers"]["figures"]["activations"] == "int8"


@integers_only
def test_a_quick_run_of_an_earlier_version_goes_on_in_float32(
    quick_request: session.Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers were made so."""
    with monkeypatch.context() as patch:
        patch.setattr(quick_answers, "INT8", "float32")
        patch.setattr(quick_run, "run_answers", lambda session: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(prepared(quick_request))
    answers = quick_request.output / "answers.jsonl"
    training = prepared(quick_request).prompts.training[:3]
    generate_answers(base_of(KIND), training, answers, max_new_tokens=TOKENS)  # type: ignore[arg-type]
    until_training(quick_request, monkeypatch)
    rows = rows_of(answers)
    assert len(rows) > 3
    assert [row.response_ids for row in rows] == expected(rows, "float32")


@pytest.mark.parametrize("error", [ConfigError, IncompatibleBaseError])
def test_8_bits_that_a_base_cannot_have_or_that_fail_the_check(
    error: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(base: BaseModel, activations: str) -> None:
        raise error("no")

    base = base_of(KIND)
    if multiplies_integers():
        assert activations_for(base, tmp_path / "none") == "int8"
    monkeypatch.setattr(quick_answers, "prepare_backends", refused)
    assert activations_for(base, tmp_path / "none") == "float32"
    assert activations_for(base_of("llama"), tmp_path / "none") == "float32"
