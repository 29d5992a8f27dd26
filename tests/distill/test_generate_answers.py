"""Answers are the model's own, and a run can be stopped at any point and taken up again."""

import copy
import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checked_once import run_anew
from support.small_engines import lively_chat_base

from medusa_kit.base.fingerprint import Fingerprint
from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.data.answer_settings import compared_rows, settings_path
from medusa_kit.data.readers import AnswerRow, Conversation, read_rows
from medusa_kit.distill.generate import generate_answers
from medusa_kit.errors import (
    ConfigError,
    DataError,
    IncompatibleBaseError,
    MedusaKitError,
    NotFiniteError,
)
from medusa_kit.infer import self_check
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.settings.sampling import SamplingParams

TOKENS = 6
WORDS = ["tree", "a", "longer prompt than others", "bee", "what?", "of seven", "x y", "seven",
         "last but one", "the very last of all", "!"]  # fmt: skip
SAMPLED = SamplingParams(temperature=0.9, top_k=20, seed=5)


@pytest.fixture
def base() -> BaseModel:
    return lively_chat_base()


def prompt(text: str, row: int, identity: str | None = None) -> Conversation:
    return Conversation([{"role": "user", "content": text}], row, identity, "prompts.jsonl")


def prompts(count: int = len(WORDS)) -> list[Conversation]:
    return [prompt(text, row) for row, text in enumerate(WORDS[:count], start=1)]


def rows_of(path: Path) -> list[AnswerRow]:
    rows = list(read_rows(str(path)))
    assert all(isinstance(row, AnswerRow) for row in rows)
    return rows  # type: ignore[return-value]


def plain_answer(base: BaseModel, ids: list[int], tokens: int = TOKENS) -> list[int]:
    """By transformers' own generate on a second model with stock attention."""
    ids_1T = torch.tensor([ids])
    second = load_base_model("debug-tiny", device="cpu").model
    second.load_state_dict(base.model.state_dict())
    second.generation_config = base.model.generation_config
    out_1T = second.generate(
        ids_1T, attention_mask=torch.ones_like(ids_1T), max_new_tokens=tokens, do_sample=False
    )
    return out_1T[0, len(ids) :].tolist()


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_greedy_answers_are_the_models_own_one_by_one(
    base: BaseModel, tmp_path: Path, batch_size: int
) -> None:
    out = tmp_path / "answers.jsonl"
    report = generate_answers(base, prompts(), out, max_new_tokens=TOKENS, batch_size=batch_size)
    rows = rows_of(out)
    assert sorted(row.id or "" for row in rows) == sorted(f"prompts:{n}" for n in range(1, 12))
    texts = {f"prompts:{number}": text for number, text in enumerate(WORDS, start=1)}
    for row in rows:
        asked = base.tokenizer.apply_chat_template(
            [{"role": "user", "content": texts[row.id or ""]}], add_generation_prompt=True,
            return_dict=False,
        )  # fmt: skip
        assert row.prompt_ids == asked
        assert row.response_ids == plain_answer(base, asked)
        assert row.sampling == {"temperature": 0.0}
    assert len({tuple(row.response_ids) for row in rows}) > 5, "the test needs answers that vary"
    assert (report.written, report.already_there, report.skipped) == (11, 0, [])
    assert report.tokens == sum(len(row.response_ids) for row in rows)


def test_an_answer_ends_with_its_stop_token(base: BaseModel, tmp_path: Path) -> None:
    """Rows of a batch stop at different places; nothing of the padding is kept."""
    ids = base.tokenizer.apply_chat_template(
        [{"role": "user", "content": WORDS[0]}], add_generation_prompt=True, return_dict=False
    )
    stop = plain_answer(base, ids)[2]
    base.model.generation_config.eos_token_id = [stop, base.tokenizer.eos_token_id]
    out = tmp_path / "answers.jsonl"
    report = generate_answers(base, prompts(), out, max_new_tokens=TOKENS, batch_size=4)
    reasons = set()
    for row in rows_of(out):
        assert row.response_ids == plain_answer(base, row.prompt_ids)
        reasons.add(row.finish_reason)
        if row.finish_reason == "stop":
            assert row.response_ids[-1] in base.stop_token_ids
            assert not base.stop_token_ids & set(row.response_ids[:-1])
        else:
            assert len(row.response_ids) == TOKENS
            assert not base.stop_token_ids & set(row.response_ids)
    assert reasons == {"stop", "length"}
    assert report.stopped == sum(row.finish_reason == "stop" for row in rows_of(out))


def test_settings_of_a_call_come_before_those_of_the_base(base: BaseModel, tmp_path: Path) -> None:
    """A base with a low temperature of its own still draws at the temperature asked for."""
    sampling = SamplingParams(temperature=1.0, seed=1)
    generate_answers(base, prompts(), tmp_path / "plain.jsonl", max_new_tokens=TOKENS,
                     sampling=sampling)  # fmt: skip
    own = base.model.generation_config
    own.do_sample, own.temperature, own.top_k, own.top_p = True, 0.01, 1, 0.1
    generate_answers(base, prompts(), tmp_path / "own.jsonl", max_new_tokens=TOKENS,
                     sampling=sampling)  # fmt: skip
    assert rows_of(tmp_path / "own.jsonl") == rows_of(tmp_path / "plain.jsonl")


def test_sampled_answers_are_reproducible_by_seed(base: BaseModel, tmp_path: Path) -> None:
    def run(name: str, seed: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0.9, top_p=0.95, seed=seed)
        torch.manual_seed(len(name))  # what was drawn before must not matter
        generate_answers(base, prompts(), tmp_path / name, max_new_tokens=TOKENS, batch_size=4,
                         sampling=sampling)  # fmt: skip
        assert rows_of(tmp_path / name)[0].sampling == {
            "temperature": 0.9, "top_k": None, "top_p": 0.95, "seed": seed
        }  # fmt: skip
        return [row.response_ids for row in rows_of(tmp_path / name)]

    first = run("a.jsonl", seed=3)
    assert run("again.jsonl", seed=3) == first
    assert run("other.jsonl", seed=4) != first


def test_options_in_use_are_recorded_and_compared(base: BaseModel, tmp_path: Path) -> None:
    """A bias has JSON's keys in the file; taking the run up again is no change of settings."""
    out = tmp_path / "a.jsonl"
    biased = SamplingParams(presence_penalty=0.5, logit_bias={9: -1.0})
    for count in (2, 4):
        generate_answers(base, prompts(count), out, max_new_tokens=TOKENS, sampling=biased)
    assert len(rows_of(out)) == 4
    assert rows_of(out)[0].sampling == {
        "temperature": 0.0, "presence_penalty": 0.5, "logit_bias": {"9": -1.0}
    }  # fmt: skip
    with pytest.raises(ConfigError, match="other settings"):
        generate_answers(base, prompts(5), out, max_new_tokens=TOKENS)
    typical = SamplingParams(0.7, acceptance="typical")
    with pytest.raises(ConfigError, match="data holds the model's own answers"):
        generate_answers(base, prompts(1), out, max_new_tokens=TOKENS, sampling=typical)


def test_a_draw_is_the_same_in_every_batch_and_order(base: BaseModel, tmp_path: Path) -> None:
    answers = []
    for batch_size, rows in ((1, prompts()), (4, prompts()), (4, prompts()[::-1])):
        out = tmp_path / f"{len(answers)}.jsonl"
        generate_answers(base, rows, out, max_new_tokens=TOKENS, batch_size=batch_size,
                         sampling=SAMPLED)  # fmt: skip
        answers.append({row.id: row.response_ids for row in rows_of(out)})
    assert answers[0] == answers[1] == answers[2]


def test_the_same_prompt_twice_is_drawn_twice(base: BaseModel, tmp_path: Path) -> None:
    generate_answers(base, [prompt("tree", row) for row in (1, 2, 3)], tmp_path / "a.jsonl",
                     max_new_tokens=TOKENS, batch_size=1, sampling=SAMPLED)  # fmt: skip
    assert len({tuple(row.response_ids) for row in rows_of(tmp_path / "a.jsonl")}) == 3


class Stopped(Exception):
    pass


def stop_after(monkeypatch: pytest.MonkeyPatch, answers: int, error: type[BaseException]) -> None:
    """Let the model answer so many prompts, then raise."""
    original = Scheduler.run

    def run(scheduler: Scheduler, rows: Any, *options: Any) -> Any:
        for emitted in original(scheduler, rows, *options):
            yield emitted
            if sum(row.finish_reason is not None for row in rows) >= answers:
                raise error
        raise AssertionError("the run was to be stopped")

    monkeypatch.setattr(Scheduler, "run", run)


@pytest.mark.parametrize("error", [Stopped, KeyboardInterrupt])
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED])
@pytest.mark.parametrize("answers", [0, 1, 9])
def test_a_stopped_run_goes_on_to_the_same_file(
    base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: int,
    sampling: SamplingParams, error: type[BaseException],
) -> None:  # fmt: skip
    options = {"max_new_tokens": TOKENS, "batch_size": 1, "sampling": sampling}
    generate_answers(base, prompts(), tmp_path / "whole.jsonl", **options)
    out = tmp_path / "stopped.jsonl"
    with monkeypatch.context() as patch:
        stop_after(patch, answers, error)
        with pytest.raises(error):
            generate_answers(base, prompts(), out, **options)
    assert (len(rows_of(out)) if answers else out.exists()) == answers
    report = generate_answers(base, prompts(), out, **options)
    assert out.read_text() == (tmp_path / "whole.jsonl").read_text()
    assert (report.already_there, report.written) == (answers, 11 - answers)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("place", [0, 5, 11])
def test_of_a_run_that_fails_whole_answers_are_kept_alone(
    base: BaseModel, tmp_path: Path, place: int, batch_size: int
) -> None:
    """Those beside the answer that fails are cut short: they are made by the next run."""
    assert base.tokenizer is not None
    (bad,) = base.tokenizer("9").input_ids  # which the self-check does not read
    options, out = {"max_new_tokens": TOKENS, "batch_size": batch_size}, tmp_path / "answers.jsonl"
    generate_answers(base, prompts(), tmp_path / "whole.jsonl", **options)
    base.model.get_input_embeddings().weight.data[bad] = float("nan")
    rows = prompts()
    rows.insert(place, prompt("9", 12))
    with pytest.raises(NotFiniteError):
        generate_answers(base, rows, out, **options)
    whole = {tuple(row.prompt_ids): row.response_ids for row in rows_of(tmp_path / "whole.jsonl")}
    kept = rows_of(out) if out.is_file() else []
    assert [whole[tuple(row.prompt_ids)] for row in kept] == [row.response_ids for row in kept]
    assert len(kept) == (place if batch_size == 1 else min(place, len(kept)))
    report = generate_answers(base, prompts(), out, **options)
    assert (report.already_there, report.written) == (len(kept), 11 - len(kept))


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED])
def test_a_half_written_line_is_made_again(
    base: BaseModel, tmp_path: Path, sampling: SamplingParams,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    options = {"max_new_tokens": TOKENS, "batch_size": 4, "sampling": sampling}
    out = tmp_path / "answers.jsonl"
    generate_answers(base, prompts(), out, **options)
    whole = out.read_text()
    second_line = whole.index("\n") + 1
    os.truncate(out, second_line + 30)
    report = generate_answers(base, prompts(), out, **options)
    assert "the last line was cut off" in capsys.readouterr().err
    assert out.read_text() == whole
    assert (report.already_there, report.written) == (1, 10)


def test_a_finished_run_does_nothing_more(base: BaseModel, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    generate_answers(base, prompts(3), out, max_new_tokens=TOKENS)
    before = out.read_text()
    report = generate_answers(base, prompts(3), out, max_new_tokens=TOKENS)
    assert (report.written, report.already_there) == (0, 3)
    assert out.read_text() == before
    more = generate_answers(base, prompts(5), out, max_new_tokens=TOKENS)
    assert (more.written, more.already_there) == (2, 3)
    assert out.read_text().startswith(before)


def test_prompts_that_share_an_id_are_all_answered_once(
    base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [prompt("one", 1, "same"), prompt("two", 2, "same"), prompt("three", 3, "other")]
    out = tmp_path / "answers.jsonl"
    with monkeypatch.context() as patch:
        stop_after(patch, 1, Stopped)
        with pytest.raises(Stopped):
            generate_answers(base, rows, out, max_new_tokens=TOKENS, batch_size=1)
    generate_answers(base, rows, out, max_new_tokens=TOKENS, batch_size=1)
    answered = rows_of(out)
    assert len({tuple(row.prompt_ids) for row in answered}) == len(answered) == 3
    assert len({row.id for row in answered}) == 3
    assert {"same", "other"} < {row.id for row in answered}


CHANGED = {
    "max_new_tokens": {"max_new_tokens": 5},
    "turns": {"turns": "last"},
    "sampling": {"sampling": SAMPLED},
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_other_settings_are_refused(base: BaseModel, tmp_path: Path, name: str) -> None:
    out = tmp_path / "answers.jsonl"
    generate_answers(base, prompts(2), out, max_new_tokens=TOKENS)
    with pytest.raises(ConfigError, match=rf"other settings .*{name}: ") as caught:
        generate_answers(base, prompts(3), out, **{"max_new_tokens": TOKENS, **CHANGED[name]})
    assert ";" not in caught.value.message.split("then): ")[1], "only that setting differs"
    assert len(rows_of(out)) == 2


def test_another_dtype_of_the_base_is_refused(
    base: BaseModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Near-ties fall otherwise in it. A file of an earlier version does not say which it was."""
    out = tmp_path / "answers.jsonl"
    generate_answers(base, prompts(1), out, max_new_tokens=TOKENS)
    in_16_bits = base.view()
    in_16_bits.info = replace(base.info, dtype="bfloat16")
    with pytest.raises(ConfigError, match="base_dtype: 'bfloat16' ≠ 'float32'"):
        generate_answers(in_16_bits, prompts(2), out, max_new_tokens=TOKENS)
    said = json.loads(settings_path(out).read_text())
    settings_path(out).write_text(json.dumps({k: v for k, v in said.items() if k != "base_dtype"}))
    capsys.readouterr()
    generate_answers(base, prompts(2), out, max_new_tokens=TOKENS)
    err = " ".join(capsys.readouterr().err.split())
    assert err.count("does not say with which dtype of the base") == 1


def test_another_base_is_refused(base: BaseModel, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    generate_answers(base, prompts(1), out, max_new_tokens=TOKENS)
    other = load_base_model("debug-tiny", device="cpu")
    with pytest.raises(ConfigError, match="base_fingerprint: "):
        generate_answers(other, prompts(1), out, max_new_tokens=TOKENS)


def test_a_base_whose_weights_were_changed_is_another(base: BaseModel, tmp_path: Path) -> None:
    out, before = tmp_path / "answers.jsonl", base.info.fingerprint
    generate_answers(base, prompts(2), out, max_new_tokens=TOKENS)
    base.model.get_input_embeddings().weight.data.mul_(1.5)
    with pytest.raises(ConfigError, match="base_fingerprint"):
        generate_answers(base, prompts(2), out, max_new_tokens=TOKENS)
    assert base.info.fingerprint != before


def test_a_base_with_another_config_is_refused(
    base: BaseModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its weights are the same. Versions before wrote nothing of the config."""
    out, meta = tmp_path / "answers.jsonl", tmp_path / "answers.jsonl.meta.json"
    generate_answers(base, prompts(1), out, max_new_tokens=TOKENS)
    base.config.rms_norm_eps *= 2
    with pytest.raises(ConfigError, match=r"base_config: {'rms_norm_eps': ") as caught:
        generate_answers(base, prompts(1), out, max_new_tokens=TOKENS)
    assert ";" not in caught.value.message
    settings = json.loads(meta.read_text())
    del settings["base_config"]
    meta.write_text(json.dumps(settings))
    assert generate_answers(base, prompts(1), out, max_new_tokens=TOKENS).already_there == 1
    assert "which config of the base" in " ".join(capsys.readouterr().err.split())


def test_a_base_with_another_mlp_is_refused(
    base: BaseModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, meta = tmp_path / "answers.jsonl", tmp_path / "answers.jsonl.meta.json"
    generate_answers(base, prompts(1), out, max_new_tokens=TOKENS)
    tuned = copy.deepcopy(base.model)
    tuned.model.layers[0].mlp.down_proj.weight.data *= 1.5
    with pytest.raises(ConfigError, match="base_fingerprint: "):
        generate_answers(wrap_model(tuned, base.tokenizer), prompts(2), out, max_new_tokens=TOKENS)
    old = Fingerprint.parse(base.info.fingerprint).output  # all that version 1 was
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "base_fingerprint": old}))
    generate_answers(base, prompts(2), out, max_new_tokens=TOKENS)
    assert "its fingerprint is an old one" in capsys.readouterr().err
    assert len(rows_of(out)) == 2


def test_another_fingerprint_of_the_same_weights_is_no_other_base(
    base: BaseModel, tmp_path: Path
) -> None:
    """Version 2 knows nothing of norms and biases. Where only these are the same, it is another."""
    out, meta = tmp_path / "answers.jsonl", tmp_path / "answers.jsonl.meta.json"
    model = copy.deepcopy(base.model)
    model.model.norm.weight.data[::2] *= 1.25
    trained = wrap_model(model, base.tokenizer)
    now = Fingerprint.parse(trained.info.fingerprint)
    assert now.vectors is not None
    generate_answers(trained, prompts(1), out, max_new_tokens=TOKENS)
    meta.write_text(meta.read_text().replace(trained.info.fingerprint, now.of_weights))
    assert compared_rows(out, json.loads(meta.read_text()), "").doubtful == []
    assert generate_answers(trained, prompts(1), out, max_new_tokens=TOKENS).already_there == 1
    model.model.layers[0].mlp.down_proj.weight.data *= 1.5
    with pytest.raises(ConfigError, match="base_fingerprint: "):
        generate_answers(wrap_model(model, base.tokenizer), prompts(2), out, max_new_tokens=TOKENS)


def test_files_that_cannot_be_taken_up(base: BaseModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        generate_answers(base, prompts(1), tmp_path, max_new_tokens=TOKENS)
    out = tmp_path / "answers.jsonl"
    out.write_text('{"id": "a"}\n')
    with pytest.raises(ConfigError, match=r"answers\.jsonl\.meta\.json is missing"):
        generate_answers(base, prompts(1), out, max_new_tokens=TOKENS)
    assert out.read_text() == '{"id": "a"}\n'
    meta = tmp_path / "answers.jsonl.meta.json"
    for text in ("{half", "[]"):
        meta.write_text(text)
        with pytest.raises(DataError, match=r"meta\.json"):
            generate_answers(base, prompts(1), out, max_new_tokens=TOKENS)
    out.unlink()
    generate_answers(base, prompts(1), out, max_new_tokens=TOKENS)
    for damage in (b"no JSON\n", b"[1]\n", b'{"response_ids": []}\n', b"\xff\xfe\n"):
        whole = out.read_bytes()
        out.write_bytes(whole + damage)
        with pytest.raises(DataError, match=r"answers\.jsonl:2 is no answer row"):
            generate_answers(base, prompts(2), out, max_new_tokens=TOKENS)
        out.write_bytes(whole)


@pytest.mark.parametrize("place", ["fsync", "write"])
def test_a_full_disk_keeps_the_rows_before(
    base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    out, options = tmp_path / "answers.jsonl", {"max_new_tokens": TOKENS, "batch_size": 4}
    generate_answers(base, prompts(), tmp_path / "whole.jsonl", **options)
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        if place == "fsync":
            synced, original = [], os.fsync

            def fsync(descriptor: int) -> None:
                synced.append(1)
                if len(synced) == 2:
                    raise full
                original(descriptor)

            patch.setattr(os, "fsync", fsync)
        else:
            open_path = Path.open

            def half_write(self: Path, mode: str = "r", **arguments: Any) -> Any:
                if self == out and mode == "a" and out.is_file():
                    with open_path(self, mode, **arguments) as stream:
                        stream.write('{"id": "prompts:')
                    raise full
                return open_path(self, mode, **arguments)

            patch.setattr(Path, "open", half_write)
        with pytest.raises(MedusaKitError, match="No space left on device; 1 rows are safe"):
            generate_answers(base, prompts(), out, **options)
    whole = (tmp_path / "whole.jsonl").read_text().splitlines()
    assert out.read_text().splitlines() == whole[:1]
    generate_answers(base, prompts(), out, **options)
    assert out.read_text().splitlines() == whole


def test_a_base_that_fails_the_tree_check_writes_no_answer(
    base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "_run", run_anew)
    monkeypatch.setattr(TreeCache, "_move", lambda *_: None)  # commits keep the wrong nodes
    with pytest.raises(IncompatibleBaseError, match="off by"):
        generate_answers(base, prompts(2), tmp_path / "a.jsonl", max_new_tokens=TOKENS)
    assert not (tmp_path / "a.jsonl").exists()


# Prompts that are not answered.


def test_prompts_too_long_are_skipped_or_fatal(base: BaseModel, tmp_path: Path) -> None:
    around = len(base.tokenizer.apply_chat_template(
        [{"role": "user", "content": ""}], add_generation_prompt=True, return_dict=False
    ))  # fmt: skip
    room = base.info.context_length - TOKENS - around
    rows = [prompt("x" * (room + 1), 1), prompt("x" * room, 2)]
    report = generate_answers(base, rows, tmp_path / "a.jsonl", max_new_tokens=TOKENS)
    assert report.written == 1
    fits = base.info.context_length - TOKENS
    reason = f"the prompt has {fits + 1} tokens; there is room for {fits}"
    assert report.skipped == [(1, reason)]
    (answer,) = rows_of(tmp_path / "a.jsonl")
    assert len(answer.prompt_ids) + TOKENS == base.info.context_length
    with pytest.raises(DataError, match=":1: the prompt has"):
        generate_answers(base, rows, tmp_path / "b.jsonl", max_new_tokens=TOKENS, on_error="fail")
    with pytest.raises(DataError, match=r"no prompt is left to answer \(1 skipped, the first: "):
        generate_answers(base, rows[:1], tmp_path / "c.jsonl", max_new_tokens=TOKENS)


def test_a_prompt_without_a_token_is_skipped(
    base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base.tokenizer, "chat_template", None)
    report = generate_answers(base, [prompt("", 1), prompt("x", 2)], tmp_path / "a.jsonl",
                              max_new_tokens=2)  # fmt: skip
    assert (report.written, report.skipped) == (1, [(1, "the prompt has no token")])


def test_rows_that_are_no_prompts(base: BaseModel, tmp_path: Path) -> None:
    answer = AnswerRow([1], [2], "stop", "a", 1)
    nobody = Conversation([{"role": "system", "content": "s"}], 2, None, "p.jsonl")
    rows = [answer, nobody, *prompts(1)]
    report = generate_answers(base, rows, tmp_path / "a.jsonl", max_new_tokens=TOKENS)
    assert report.skipped == [(1, "it is an answer already, expected a prompt"),
                              (2, "the conversation has no user turn")]  # fmt: skip
    with pytest.raises(DataError, match="no prompt is left") as caught:
        generate_answers(base, [answer], tmp_path / "b.jsonl", max_new_tokens=TOKENS)
    assert "docs/data.md" in (caught.value.hint or "")
