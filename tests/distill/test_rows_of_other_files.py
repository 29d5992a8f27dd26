"""Rows under settings that are not theirs are told by their numbers: of another model, of another
file, edited or added by hand."""

import copy
import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.base.tokenizer.encoding_digest import Encodings
from medusa_kit.data.answer_settings import how_encoded, rows_of
from medusa_kit.data.readers import Conversation
from medusa_kit.distill.answer_file import check_answer_file
from medusa_kit.distill.generate import generate_answers
from medusa_kit.errors import ConfigError
from medusa_kit.settings.recipe import DataSection, TrainRecipe
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.train.trainer import load_examples


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return load_base_model("debug-tiny", device="cpu")


@pytest.fixture(scope="module")
def other(base: BaseModel) -> BaseModel:
    """A model with the same tokens, config and output embedding, whose answers differ."""
    tuned = copy.deepcopy(base.model)
    tuned.model.layers[0].mlp.down_proj.weight.data *= -3
    return wrap_model(tuned, base.tokenizer)


def prompts(count: int) -> list[Conversation]:
    return [Conversation([{"role": "user", "content": f"question {row}"}], row, None, "p.jsonl")
            for row in range(1, count + 1)]  # fmt: skip


def answered(base: BaseModel, path: Path, count: int = 4, **options: Any) -> Path:
    generate_answers(base, prompts(count), path, **{"max_new_tokens": 3, **options})
    return path


def meta(path: Path) -> Path:
    return path.with_name(path.name + ".meta.json")


def words(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


def learn(base: BaseModel, path: Path) -> int:
    recipe = TrainRecipe(
        output_dir="out", base={"model": "debug-tiny"}, data=DataSection(sources=[str(path)])
    )
    return len(load_examples(base, recipe))


@pytest.mark.parametrize("how", ["copied", "joined", "renamed"])
def test_another_models_rows_are_refused_and_told_of(
    base: BaseModel, other: BaseModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    """By a run that goes on, before it loads a model; training warns."""
    out, theirs = answered(base, tmp_path / "a.jsonl"), answered(other, tmp_path / "b.jsonl", 6)
    if how == "joined":
        out.write_bytes(out.read_bytes() + theirs.read_bytes())
    else:
        (shutil.copy if how == "copied" else Path.replace)(theirs, out)
    before, numbers = out.read_bytes(), "rows 5 to 10" if how == "joined" else "rows 1 to 6"
    for check in (lambda: check_answer_file(out), lambda: answered(base, out, 8)):
        with pytest.raises(ConfigError, match=rf"{numbers} \(made with another base") as caught:
            check()
        assert caught.value.hint
    assert out.read_bytes() == before
    capsys.readouterr()
    assert learn(base, out) == before.count(b"\n")
    told = words(capsys)
    assert f"warning: {out}: no run that a.jsonl.meta.json tells of wrote {numbers}" in told
    assert how_encoded(str(out), base.encoding) is Encodings.UNKNOWN


@pytest.mark.parametrize(
    "settings",
    [{"max_new_tokens": 2}, {"sampling": SamplingParams(1.0, seed=1)}, {"turns": "last"}],
)
def test_rows_of_other_settings_are_refused(
    base: BaseModel, tmp_path: Path, settings: dict[str, Any]
) -> None:
    out = answered(base, tmp_path / "a.jsonl")
    shutil.copy(answered(base, tmp_path / "b.jsonl", **settings), out)
    with pytest.raises(ConfigError, match=r"rows 1 to 4 \(made with other settings\)"):
        answered(base, out)


def test_a_persons_own_rows_stay_in_use_and_are_told_of(
    base: BaseModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = answered(base, tmp_path / "a.jsonl", 5)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    rows[1]["response_ids"][0] ^= 1  # edited
    rows[3] = {
        name: rows[3][name] for name in ("id", "prompt_ids", "response_ids", "finish_reason")
    }
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for use in (lambda: learn(base, out), lambda: answered(base, out, 5)):
        capsys.readouterr()
        use()
        told = words(capsys)
        assert "row 2 (edited since), row 4 (not saying what made them)" in told
        assert told.count("warning") == 1
    assert len(out.read_text().splitlines()) == 5


def test_answers_without_settings_are_plain_data_with_one_line(
    base: BaseModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = answered(base, tmp_path / "a.jsonl")
    meta(out).unlink()
    capsys.readouterr()
    assert learn(base, out) == 4
    told = words(capsys)
    assert told.count("a.jsonl has no a.jsonl.meta.json with it") == 1
    conversation = tmp_path / "c.jsonl"
    conversation.write_text('{"prompt": "Why?", "completion": "Because."}\n')
    learn(base, conversation)
    assert "meta.json" not in words(capsys)


def test_what_a_run_wrote_is_known_wherever_it_lies(
    base: BaseModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Renamed, reordered, cut off in a row, gone on with, its rows moved aside and taken back."""
    out, options = answered(base, tmp_path / "a.jsonl", 6), {"max_new_tokens": 3}
    text = out.read_text()
    moved = tmp_path / "moved.jsonl"
    meta(out).replace(meta(moved))
    out.unlink()
    moved.write_text("".join(reversed(text.splitlines(True))) + text[:40])
    answered(base, moved, 8)
    generate_answers(base, prompts(3), moved, **options)
    assert generate_answers(base, prompts(8), moved, **options).already_there == 8
    packed = tmp_path / "moved.jsonl.gz"
    packed.write_bytes(gzip.compress(moved.read_bytes()))
    shutil.copy(meta(moved), meta(packed))
    for path in (moved, packed):
        learn(base, path)
        rows = rows_of(str(path))
        assert (rows.doubtful, rows.num_earlier) == ([], 0)
    told = words(capsys)
    assert "not be checked" not in told
    assert "no run that" not in told


def test_a_file_of_an_earlier_version_goes_on_with_one_line(
    base: BaseModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = answered(base, tmp_path / "a.jsonl")
    settings = json.loads(meta(out).read_text())
    del settings["row_origins"]
    meta(out).write_text(json.dumps(settings))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    out.write_text("".join(json.dumps(row | {"origin": None}) + "\n" for row in rows))
    capsys.readouterr()
    answered(base, out, 6)
    assert words(capsys).count("4 rows do not say with what they were made") == 1
    assert json.loads(meta(out).read_text()) == settings
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["origin"] is None for row in rows] == [True] * 4 + [False] * 2
    assert rows_of(str(out)).doubtful == []


def test_earlier_answers_that_were_not_made_so_do_not_serve(
    base: BaseModel, other: BaseModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = answered(base, tmp_path / "a.jsonl")
    shutil.copy(answered(other, tmp_path / "b.jsonl"), before)
    out, options = tmp_path / "new.jsonl", {"max_new_tokens": 3}
    report = generate_answers(base, prompts(4), out, **options, earlier=[before])
    assert (report.written, report.already_there) == (4, 0)
    assert "rows 1 to 4 (made with another base model)" in words(capsys)
