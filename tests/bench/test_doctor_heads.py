"""The doctor must find each known fault of heads, and none in a healthy case."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.counting import (
    STOP,
    VOCAB,
    K,
    counting_base,
    counting_rows,
    random_rows,
    said,
    save_counting_heads,
)
from support.text.other_encodings import with_pairs

from medusa_kit.base.model import BaseModel
from medusa_kit.base.tokenizer.encoding_digest import encoding_digest
from medusa_kit.bench import doctor_heads
from medusa_kit.bench.doctor import Case, Finding, diagnose, examine
from medusa_kit.data.readers import AnswerRow
from medusa_kit.heads import MedusaHeads
from medusa_kit.train import data as training
from medusa_kit.tuning import calibrate as calibration


def test_heads_of_another_base(base: BaseModel, heads: Path) -> None:
    said(doctor_heads.heads_fit(examine(base, heads=heads)), "ok", "3 medusa heads for counting")
    other = counting_base(step=2)
    of = {f.name: f for f in diagnose(other, counting_rows(), heads)}
    said(of["heads and base"], "problem", "fingerprint")
    for name in ("projection", "head offset", "replay and decoding", "trained accuracy"):
        said(of[name], "skipped", "the heads do not load")
    assert of["the base's own words"].status == "warning"


def test_heads_that_are_not_there(base: BaseModel, tmp_path: Path) -> None:
    said(doctor_heads.heads_fit(examine(base, heads=tmp_path)), "problem", "config.json is missing")
    said(doctor_heads.heads_fit(examine(base, heads="auto")), "problem", "no heads for 'counting'")


def test_heads_of_a_quantised_copy(case: Case) -> None:
    assert case.heads is not None
    case.heads.config = replace(case.heads.config, base_quantized=True)
    said(doctor_heads.heads_fit(case), "warning", "a quantised copy, used on a full-precision")


def test_heads_that_learned_another_encoding(case: Case) -> None:
    assert case.heads is not None
    case.base.tokenizer = with_pairs(single_digits=True)
    other = encoding_digest(with_pairs(single_digits=False))
    case.heads.config = replace(case.heads.config, encoding=other)
    said(doctor_heads.heads_fit(case), "warning", "text that was tokenized differently")
    case.heads.config = replace(case.heads.config, encoding=case.base.encoding)
    said(doctor_heads.heads_fit(case), "ok", "3 medusa heads for counting")


@pytest.mark.parametrize(
    ("ids", "status", "words"),
    [
        (range(VOCAB), "ok", "100.0%"),
        ([0, 1, STOP, 9, 10, 11], "warning", "6 of 32 tokens, which are"),
        ([0, 1, *range(3, VOCAB)], "problem", "without the stop token 2"),
    ],
)
def test_reduced_projection(base: BaseModel, ids: Any, status: str, words: str) -> None:
    case = examine(base, counting_rows())
    kind = {"projection": "reduced", "reduced_ids": torch.tensor(list(ids))}
    case.heads = MedusaHeads.for_base(base, K, **kind)
    said(doctor_heads.projection(case), status, words)
    case.heads = MedusaHeads.for_base(base, K)
    said(doctor_heads.projection(case), "ok", "every token has a column")


@pytest.mark.parametrize("kind", ["medusa", "hydra", "recurrent"])
def test_heads_of_every_kind(base: BaseModel, kind: Any) -> None:
    case = examine(base, counting_rows())
    case.heads = MedusaHeads.for_base(base, K, kind=kind)
    said(doctor_heads.head_offset(case), "ok", "4.00 a step (3 heads + 1), shifted by one 1.00")
    said(doctor_heads.replay_equals_decoding(case), "ok")


def test_head_offset(case: Case) -> None:
    said(doctor_heads.head_offset(case), "ok", "4.00 a step (3 heads + 1), shifted by one 1.00")


@pytest.mark.parametrize(("module", "name"), [(calibration, "tokens_ahead"),
                                              (training, "head_targets")])  # fmt: skip
def test_targets_that_are_off(
    case: Case, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    right = getattr(module, name)

    def late(what: Any, num_heads: int) -> Any:
        if name == "tokens_ahead":
            return right([*what[1:], 0], num_heads)
        found = right(what, num_heads + 1)
        return replace(found, ahead_PJ=found.ahead_PJ[:, [0, *range(2, num_heads + 2)]])

    monkeypatch.setattr(module, name, late)
    who = "calibration" if name == "tokens_ahead" else "training"
    said(doctor_heads.head_offset(case), "problem", f"{who} takes")
    # Decoding shows it too, not the list of targets alone.
    monkeypatch.setattr(doctor_heads, "_wrong_targets", lambda num_heads: None)
    status = "problem" if who == "training" else "ok"
    said(doctor_heads.head_offset(case), status)
    if who == "calibration":
        said(doctor_heads.replay_equals_decoding(case), "problem")


def test_answers_that_repeat_themselves_tell_no_offset(heads: Path) -> None:
    base = counting_base(step=0)
    save_counting_heads(base, heads)
    said(doctor_heads.head_offset(examine(base, None, heads)), "warning", "repeat themselves")


def test_answers_that_rounding_changes_tell_no_offset(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_heads, "_oracle_trial", lambda *_: None)
    said(doctor_heads.head_offset(case), "warning", "number of nodes")


def test_replay_equals_decoding(case: Case, base: BaseModel, tmp_path: Path) -> None:
    said(doctor_heads.replay_equals_decoding(case), "ok", "by depth")
    useless = examine(base, counting_rows(), save_counting_heads(base, tmp_path / "off", off=1))
    said(doctor_heads.replay_equals_decoding(useless), "ok", "1.00 tokens a step", "0.00 0.00 0.00")


def test_replay_differs_from_decoding(case: Case) -> None:
    row = case.served[0]
    deepest = max(row.depth_counts)
    row.depth_counts[deepest] -= 1
    row.depth_counts[0] = row.depth_counts.get(0, 0) + 1
    said(doctor_heads.replay_equals_decoding(case), "warning", "replay of the same text")
    for row in case.served:
        row.depth_counts = {0: sum(row.depth_counts.values())}
    said(doctor_heads.replay_equals_decoding(case), "problem", "replay of the same text")


def test_answers_of_one_token_draft_nothing(case: Case) -> None:
    rows = [AnswerRow([29, 30, 31, 0, 1], [STOP], "stop", None, 1)]
    short = examine(case.base, rows, case.heads_folder)
    said(doctor_heads.replay_equals_decoding(short), "skipped", "one token")
    said(doctor_heads.data_is_like_decoded_text(short), "skipped", "fewer than 20")


def test_data_unlike_the_decoded_text(case: Case) -> None:
    said(doctor_heads.data_is_like_decoded_text(case), "ok", "data 1.00 1.00 1.00, decoded 1.00")
    other = examine(case.base, random_rows(), case.heads_folder)
    said(doctor_heads.data_is_like_decoded_text(other), "warning", "not what the model writes")
    other.tolerance = 1.0
    said(doctor_heads.data_is_like_decoded_text(other), "ok")


def test_chain_shares_count_heads_that_are_right_together(case: Case) -> None:
    shares, counts = doctor_heads.chain_shares(case.statistics)
    tokens, answers = case.statistics.num_positions, case.statistics.num_answers
    assert counts == [tokens - answers * (k + 1) for k in range(K)]
    assert shares == [1.0] * K
    case.statistics.ranks_PK[0, 0] = 1  # head 0 wrong: deeper ones are of no use there
    shares, _ = doctor_heads.chain_shares(case.statistics)
    assert shares == [(n - 1) / n for n in counts]


def test_data_of_another_kind_than_the_tree_was_searched_on(case: Case, heads: Path) -> None:
    def found(case: Case) -> Finding:
        return doctor_heads.data_is_like_calibration(case)

    said(found(case), "skipped", "no statistics.npz")
    assert case.heads is not None
    statistics = calibration.calibrate(case.base, case.heads, case.answers)
    statistics.save(heads / "statistics.npz")
    said(found(case), "ok", "data 1.00 1.00 1.00, tree search 1.00")
    said(found(examine(case.base, random_rows(), heads)), "warning", "of another kind")
    drawn = [replace(row, sampling={"temperature": 0.8}) for row in random_rows()]
    said(found(examine(case.base, drawn, heads)), "warning", "of another kind", "were drawn")
    replace(statistics, meta={**statistics.meta, "heads": "others"}).save(heads / "statistics.npz")
    said(found(case), "skipped", "about other heads")


def test_trained_accuracy(case: Case, heads: Path) -> None:
    def trained(text: str) -> Finding:
        (heads.parent / "run.json").write_text(text)
        return doctor_heads.trained_accuracy(case)

    def scores(*top1: float | None) -> str:
        return json.dumps({"held_out": {"top1": top1}})

    said(doctor_heads.trained_accuracy(case), "skipped", "no run.json")
    said(trained(scores(0.95, 1.0, 1.0)), "ok", "here 1.00 1.00 1.00, trained 0.95")
    said(trained(scores(0.5, 1.0, None)), "warning", "better than held out")
    for broken in ("{", "[]", "{}", scores(), scores(None, None), '{"held_out": {"top1": ["x"]}}'):
        said(trained(broken), "skipped")
    case = examine(case.base, random_rows(), heads)
    said(trained(scores(0.9, 0.8, 0.7)), "problem", "worse than held out")
