"""The doctor must find each known fault, and none in a healthy case: the whole, data, base."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.counting import (
    ASK,
    TURN,
    VOCAB,
    answer,
    chat_case,
    counting_rows,
    random_rows,
    said,
    talk,
)
from support.tiny_models import tiny_model

from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.bench import doctor_case, doctor_data, doctor_heads
from medusa_kit.bench.doctor import CHECKS, Case, Finding, diagnose, examine, tree_attention
from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.heads import MedusaHeads

# All of it.


def test_a_healthy_case_has_no_problem(base: BaseModel, heads: Path) -> None:
    findings = diagnose(base, counting_rows(), heads)
    assert [f.name for f in findings if f.status not in ("ok", "skipped")] == []
    skipped = {f.name for f in findings if f.status == "skipped"}
    # Without a tokenizer, a tree search and run.json.
    assert skipped == {"chat template", "data and calibration", "trained accuracy"}
    assert len({f.name for f in findings}) == len(CHECKS)


def test_without_heads_and_data_their_checks_are_skipped(base: BaseModel) -> None:
    of = {f.name: f for f in diagnose(base)}
    for name in ("vocabulary", "tied embeddings", "hidden states", "tree attention"):
        assert of[name].status == "ok"
    for name in ("loss mask", "stop token", "the base's own words"):
        said(of[name], "skipped", "no data given")
    for name in ("heads and base", "head offset", "replay and decoding"):
        said(of[name], "skipped", "no heads given")


def test_without_data_the_heads_are_still_decoded_with(base: BaseModel, heads: Path) -> None:
    of = {f.name: f for f in diagnose(base, heads=heads)}
    said(of["head offset"], "ok", "4.00 a step")
    said(of["replay and decoding"], "ok", "by depth 1.00 1.00 1.00")
    said(of["data and decoded text"], "skipped", "no data given")


def test_an_error_inside_a_check_is_a_problem(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise IncompatibleBaseError("it broke", hint="mend it")

    monkeypatch.setattr(doctor_heads, "_wrong_targets", refuse)
    finding = doctor_heads.head_offset(case)
    assert finding == Finding("head offset", "problem", "it broke", "mend it")


# Chat template, mask, stop token.


def test_chat_template() -> None:
    said(doctor_data.chat_template(chat_case()), "ok", "without {% generation %}")
    marked = f"{{% for m in messages %}}{{% if m['role'] == 'user' %}}{TURN}<|im_end|>\n" \
        "{% else %}<|im_start|>assistant\n{% generation %}{{ m['content'] }}<|im_end|>" \
        "{% endgeneration %}\n{% endif %}{% endfor %}"  # fmt: skip
    said(doctor_data.chat_template(chat_case(marked + ASK)), "ok", "with {% generation %}")
    other = ASK.replace("assistant", "model")
    said(doctor_data.chat_template(chat_case(marked + other)), "problem", "does not begin with")
    thinking = ASK.replace("assistant\n", "assistant\nso: ")
    said(doctor_data.chat_template(chat_case(marked + thinking)), "problem")
    said(doctor_data.chat_template(chat_case(marked)), "warning", "11 tokens after")


def test_chat_template_that_is_absent_or_refuses() -> None:
    said(doctor_data.chat_template(chat_case(None)), "problem", "the data holds conversations")
    said(doctor_data.chat_template(chat_case(None, counting_rows())), "warning", "plain text")
    refusing = "{{ raise_exception('never') }}"
    said(doctor_data.chat_template(chat_case(refusing)), "problem", "refuses", "never")
    said(doctor_data.chat_template(chat_case(refusing, None)), "problem", "refuses")


def test_chat_template_that_edits_earlier_turns() -> None:
    forgetful = f"{{% for m in messages %}}{{% if loop.last or m['role'] == 'user' %}}{TURN}" \
        f"<|im_end|>\n{{% endif %}}{{% endfor %}}{ASK}"  # fmt: skip
    case = chat_case(forgetful)
    said(doctor_data.chat_template(case), "warning", "only single turns")
    said(doctor_data.loss_mask(case), "warning", "1 skipped", "row 2")


def test_loss_mask(case: Case) -> None:
    said(doctor_data.loss_mask(case), "ok", "in 7 rows")
    trained = sum(sum(e.loss_mask) for e in chat_case().examples)
    tokens = sum(len(e.input_ids) for e in chat_case().examples)
    said(doctor_data.loss_mask(chat_case()), "ok", f"{trained / tokens:.1%} of {tokens}")
    everything = f"{{% generation %}}{{% for m in messages %}}{TURN}<|im_end|>{{% endfor %}}" \
        "{% endgeneration %}"  # fmt: skip
    said(doctor_data.loss_mask(chat_case(everything)), "problem", "of the user")
    said(doctor_data.chat_template(chat_case(everything)), "problem", "of the user")
    nothing = chat_case(None)
    said(doctor_data.loss_mask(nothing), "problem", "no row is left")
    said(doctor_data.own_words(nothing), "skipped", "no row of the data can be used")
    short = chat_case(rows=[talk("why? " * 200, "so")])
    said(doctor_data.loss_mask(short), "warning", "0.3%")


def test_stop_token(case: Case) -> None:
    said(doctor_data.stop_token(case), "ok", "5 of 5")
    said(doctor_data.stop_token(chat_case()), "ok", "2 of 2")
    endless = f"{{% for m in messages %}}{TURN}\n{{% endfor %}}{ASK}"
    said(doctor_data.stop_token(chat_case(endless)), "problem", "0 of 2", "never trained on")
    rows = counting_rows()
    case = examine(case.base, [replace(rows[0], response_ids=[9, 10]), *rows[1:]])
    said(doctor_data.stop_token(case), "warning", "4 of 5")
    case = examine(case.base, rows[5:])
    said(doctor_data.stop_token(case), "warning", "none of 2", "cut off by length")
    case.base.model.generation_config.eos_token_id = None
    said(doctor_data.stop_token(case), "warning", "names no stop token")


def test_a_row_that_was_cut_need_not_end(monkeypatch: pytest.MonkeyPatch, base: BaseModel) -> None:
    monkeypatch.setattr(doctor_case, "MAX_LENGTH", 20)
    said(doctor_data.stop_token(examine(base, counting_rows()[:2])), "warning", "none of 2")


# The base: vocabulary, words, embeddings, hidden states, trees.


def test_vocabulary(case: Case) -> None:
    said(doctor_data.vocabulary(case), "ok", "32 embedding rows", "highest id in the data 31")
    assert case.heads is not None
    case.heads.config = replace(case.heads.config, vocab_size=33)
    said(doctor_data.vocabulary(case), "problem", "the heads have a vocabulary of 33")
    chat = chat_case()
    said(doctor_data.vocabulary(chat), "ok", "259 tokens in the tokenizer")
    chat.base.tokenizer.add_tokens(["one more"])
    said(doctor_data.vocabulary(chat), "problem", "260 tokens for 259 embedding rows")


def test_ids_beyond_the_vocabulary(base: BaseModel, heads: Path) -> None:
    """Such rows are reported once, and the model is not run on them."""
    findings = diagnose(base, [answer([3, 4, 5, VOCAB, 7], 1), *counting_rows()], heads)
    assert [f.name for f in findings if f.status == "problem"] == ["vocabulary"]
    case = examine(base, [answer([3, 4, 5, VOCAB, 7], 1)])
    said(doctor_data.vocabulary(case), "problem", "id 32, expected 0..31")
    said(doctor_data.own_words(case), "skipped", "no row of the data can be used")


def test_own_words(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_data, "CHUNK", 7)
    said(doctor_data.own_words(case), "ok", "100%")
    said(doctor_data.own_words(examine(case.base, random_rows())), "warning", "not its own text")
    half = [answer([3, 4, 5, 6, 20, 21, 9], 1)]  # right: 6, 21
    said(doctor_data.own_words(examine(case.base, half)), "ok", "50% of 4")


def test_drawn_answers_are_not_held_to_be_the_likeliest(case: Case) -> None:
    """Which a server records: other tokens than the likeliest, and no fault of theirs."""
    rows = [replace(row, sampling={"temperature": 0.8}) for row in random_rows()]
    drawn = examine(case.base, rows)
    said(doctor_data.own_words(drawn), "skipped", "were drawn")
    greedy = [replace(row, sampling={"temperature": 0.0}) for row in random_rows()]
    said(doctor_data.own_words(examine(case.base, greedy)), "warning", "not its own text")


def test_tied_embeddings(case: Case) -> None:
    said(doctor_data.tied_embeddings(case), "ok", "not tied", "3 own projections of 3,072")
    tied = wrap_model(tiny_model("llama-tied"))
    shared = Case(tied, heads=MedusaHeads.for_base(tied, 2))
    said(doctor_data.tied_embeddings(shared), "ok")
    own = Case(tied, heads=MedusaHeads.for_base(tied, 2, projection="own"))
    said(doctor_data.tied_embeddings(own), "warning", "tied; 2 own projections of 6,144")


def test_hidden_states(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    said(doctor_data.hidden_states(case), "ok", "31 tokens")
    with monkeypatch.context() as patch:
        patch.setattr(case.base, "scale_logits", lambda logits: 2 * logits)
        said(doctor_data.hidden_states(case), "problem", "head_logits")
    with monkeypatch.context() as patch:
        right = case.base.hidden_states
        patch.setattr(case.base, "hidden_states", lambda ids_1T: right(ids_1T).roll(1, 1))
        said(doctor_data.hidden_states(case), "problem", "the hook", "training's")
    assert case.hidden_before_TD is not None
    case.hidden_before_TD = torch.full_like(case.hidden_before_TD, torch.nan)
    said(doctor_data.hidden_states(case), "problem", "decoding's layers against training's: nan")


def test_trees_that_cannot_be_verified(
    base: BaseModel, heads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said(tree_attention(examine(base)), "ok", "error")

    def refuse(_: BaseModel) -> None:
        raise IncompatibleBaseError("trees cannot be verified", hint="use generate")

    monkeypatch.setattr(doctor_case, "build_engine", refuse)
    of = {f.name: f for f in diagnose(base, counting_rows(), heads)}
    said(of["tree attention"], "problem", "trees cannot be verified")
    said(of["head offset"], "skipped", "trees cannot be verified on this base model")
    assert of["projection"].status == "ok"
