"""The doctor must find each fault it knows, and none in a healthy case.

The base here counts: token t is followed by t + 1, modulo VOCAB, and its heads know that. So what
every check should say is known without running anything.
"""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import STOP, tiny_model

from medusa_kit.base_model import BaseModel, load_base_model, wrap_model
from medusa_kit.bench import doctor_case, doctor_data, doctor_heads
from medusa_kit.bench.doctor import CHECKS, Case, Finding, diagnose, examine, tree_attention
from medusa_kit.data.readers import AnswerRow, Conversation
from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.heads import MedusaHeads, save_heads
from medusa_kit.infer import calibrate as calibration
from medusa_kit.train import data as training

VOCAB, K = 32, 3
TURN = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def shifted_eye(by: int) -> torch.Tensor:
    """Row v is 1 at v - by: the token `by` places on."""
    return torch.eye(VOCAB).roll(by, dims=0)


def counting_base(step: int = 1) -> BaseModel:
    model = tiny_model("llama", vocab_size=VOCAB, hidden_size=VOCAB)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.zero_()
    model.model.embed_tokens.weight.data.copy_(torch.eye(VOCAB))
    model.lm_head.weight.data.copy_(shifted_eye(step))
    return wrap_model(model, None, "counting")


def save_counting_heads(base: BaseModel, folder: Path, off: int = 0) -> Path:
    heads = MedusaHeads.for_base(base, K, projection="own")
    for k, projection in enumerate(heads.projections):
        projection.weight.data.copy_(shifted_eye(k + 2 + off))
    save_heads(heads, folder)
    return folder


def answer(ids: list[int], number: int, prompt: int = 3, reason: str = "length") -> AnswerRow:
    return AnswerRow(ids[:prompt], ids[prompt:], reason, str(number), number)


def counting_rows() -> list[AnswerRow]:
    """Some end at the stop token, as counting past 31 does, some by length."""
    whole = [answer([(s + i) % VOCAB for i in range(VOCAB + STOP + 1 - s)], s, reason="stop")
             for s in range(4, 9)]  # fmt: skip
    return [*whole, answer(list(range(6, 24)), 20), answer(list(range(5, 30)), 21)]


def random_rows() -> list[AnswerRow]:
    draw = random.Random(0)
    return [answer([draw.randrange(3, VOCAB) for _ in range(20)], n) for n in range(1, 8)]


@pytest.fixture
def base() -> BaseModel:
    return counting_base()


@pytest.fixture
def heads(base: BaseModel, tmp_path: Path) -> Path:
    return save_counting_heads(base, tmp_path / "heads")


@pytest.fixture
def case(base: BaseModel, heads: Path) -> Case:
    return examine(base, counting_rows(), heads)


def talk(*contents: str, row: int = 1) -> Conversation:
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return Conversation(messages, row, None, "here")


TALKS = [talk("Name a tree.", "An oak."), talk("And a bird?", "A wren.", "More?", "An owl.", row=2)]


def chat_case(template: str | None = "as it is", rows: Any = TALKS) -> Case:
    base = load_base_model("debug-tiny", device="cpu")
    if template != "as it is":
        base.tokenizer.chat_template = template
    return examine(base, rows)


def said(finding: Finding, status: str, *words: str) -> None:
    assert finding.status == status, finding
    for word in words:
        assert word in finding.what
    if status in ("warning", "problem") and finding.name != "loss mask":
        assert finding.hint


# All of it.


def test_a_healthy_case_has_no_problem(base: BaseModel, heads: Path) -> None:
    findings = diagnose(base, counting_rows(), heads)
    assert [f.name for f in findings if f.status not in ("ok", "skipped")] == []
    skipped = {f.name for f in findings if f.status == "skipped"}
    assert skipped == {"chat template", "trained accuracy"}, "no tokenizer, no run.json"
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
    said(doctor_data.chat_template(chat_case(marked)), "warning", "11 tokens behind")


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
    said(doctor_data.loss_mask(chat_case(everything)), "problem", "100.0%", "user's words")
    said(doctor_data.chat_template(chat_case(everything)), "warning", "before the end")
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
    said(doctor_data.hidden_states(case), "problem", "serving's layers against training's: nan")


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


# Heads.


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
    said(doctor_heads.heads_fit(case), "warning", "a quantised copy, served on a full-precision")


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
