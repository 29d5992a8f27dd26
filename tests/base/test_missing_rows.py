"""Tokens that the model has no row for are refused, wherever they come from, before anything is
decoded; what is asked beside them is answered."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.serving.live_server import live_server
from support.small_engines import build_engine
from support.tiny_models import tiny_model

import medusa_kit
from medusa_kit.base.gguf import CHATML_TEMPLATE, byte_tokenizer
from medusa_kit.base.model import wrap_model
from medusa_kit.data.readers import Conversation
from medusa_kit.distill.generate import generate_answers
from medusa_kit.drafters.draft_model.retokenized import Retokenized
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import ConfigError, DataError
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.quick.session import encoded

ROWS, EXTRA = 259, "<|extra|>"
SAID = r"token id 259( \('<\|extra\|>'\))? is out of range; expected 0\.\.258"
USER = [{"role": "user", "content": f"a{EXTRA}"}]


def tokenizer_with_more() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([EXTRA])
    assert len(tokenizer) == ROWS + 1
    return tokenizer


def engine_with_less(**names: Any) -> Engine:
    tokenizer = tokenizer_with_more()
    for name, value in names.items():
        setattr(tokenizer, name, value)
    return build_engine(wrap_model(tiny_model("llama", vocab_size=ROWS), tokenizer, "few-rows"))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_with_less()


CALLS: dict[str, Callable[[Engine], Any]] = {
    "text": lambda e: e.generate(f"a{EXTRA}"),
    "messages": lambda e: e.generate(USER),
    "ids": lambda e: e.generate([5, 259]),
    "below 0": lambda e: e.generate([5, -1]),
    "a tensor": lambda e: e.generate(torch.tensor([5, 259])),
    "one of several": lambda e: e.generate(["a", USER, [5]]),
    "a stream": lambda e: e.stream(f"a{EXTRA}"),
    "a conversation": lambda e: e.conversation().send(f"a{EXTRA}"),
    "a conversation's stream": lambda e: e.conversation().stream(f"a{EXTRA}"),
    "a system message": lambda e: e.conversation(system=EXTRA).send("a"),
    "encoding alone": lambda e: e.encode(USER),
    "a bias": lambda e: e.generate("a", logit_bias={259: 1.0}),
    "transformers' generate": lambda e: e.base.model.generate(
        torch.tensor([[5, 259]]), max_new_tokens=2, custom_generate=medusa_kit.custom_generate
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_is_refused_before_it_decodes(
    call: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scheduler, "run", lambda *_: pytest.fail("decoded"))
    expected = {"below 0": "token id -1 is out of range", "a bias": "token id 259; expected 0..258"}
    with pytest.raises(ConfigError, match=expected.get(call, SAID)):
        CALLS[call](engine)


def test_a_conversation_goes_on_without_the_message(engine: Engine) -> None:
    talk = engine.conversation()
    with pytest.raises(ConfigError, match=SAID):
        talk.send(EXTRA)
    talk.send("a", max_new_tokens=2)
    assert [message["content"] for message in talk.messages][:1] == ["a"]


def test_a_template_that_writes_such_a_token() -> None:
    engine = engine_with_less(chat_template=EXTRA + CHATML_TEMPLATE)
    with pytest.raises(ConfigError, match=SAID):
        engine.generate("a")
    assert engine.generate([5, 6], max_new_tokens=2).token_ids


def test_a_stop_token_without_a_row(llama: Any) -> None:
    llama.generation_config.eos_token_id = [2, 96]
    with pytest.raises(ConfigError, match=r"stop token id 96 is out of range; expected 0\.\.95"):
        build_engine(llama).generate([5, 6])


def test_prompts_of_a_shared_batch_are_answered_beside_it(engine: Engine) -> None:
    alone = engine.generate("b", max_new_tokens=4)
    with engine.shared_batch() as batch:
        first = batch.submit("b", max_new_tokens=4)
        with pytest.raises(ConfigError, match=SAID):
            batch.submit(f"a{EXTRA}")
        last = batch.submit("b", max_new_tokens=4)
        assert [first.result().token_ids, last.result().token_ids] == [alone.token_ids] * 2


def test_rows_of_data_are_skipped_and_named(engine: Engine, tmp_path: Path) -> None:
    asked = [[{"role": "user", "content": text}] for text in ("b", f"a{EXTRA}", "c")]
    rows = [Conversation(said, i, None, "prompts.jsonl") for i, said in enumerate(asked, 1)]
    report = generate_answers(engine.base, rows, tmp_path / "out.jsonl", max_new_tokens=2)
    ((row, reason),) = report.skipped
    assert (report.written, row, reason) == (
        2, 2, "token id 259 ('<|extra|>') is out of range; expected 0..258",
    )  # fmt: skip
    with pytest.raises(DataError, match=f"prompts.jsonl:2: {SAID}"):
        generate_answers(engine.base, rows, tmp_path / "other", max_new_tokens=2, on_error="fail")
    assert len(encoded(engine, rows, 2)) == 2


def test_a_server_names_the_prompt_and_answers_others(engine: Engine) -> None:
    with live_server(engine) as live, live.http() as http:

        def post(path: str, **body: Any) -> Any:
            return http.post(path, json={"model": live.model, "max_tokens": 2, **body})

        for prompt, which in (
            (["b", f"a{EXTRA}", "c"], "prompt 2 of 3: "),
            ([[5], [6, 259]], "prompt 2 of 2: "),
            (EXTRA, "prompt: "),
        ):
            answer = post("/v1/completions", prompt=prompt)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "prompt")
            assert error["message"].startswith(f"{which}token id 259 ('<|extra|>') is out of range")
        answer = post("/v1/chat/completions", messages=USER)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
        answer = post("/v1/completions", prompt=["b", "c"], temperature=0)
        ids = [engine.base.tokenizer(prompt).input_ids for prompt in ("b", "c")]
        alone = [engine.generate(prompt, max_new_tokens=2).text for prompt in ids]
        assert [choice["text"] for choice in answer.json()["choices"]] == alone


def test_a_draft_model_is_given_and_proposes_no_such_token() -> None:
    tokenizer = tokenizer_with_more()
    reader = Retokenized(tokenizer, tokenizer, ROWS, ROWS)
    a, extra = tokenizer.encode(f"a{EXTRA}")
    assert reader.read([a, extra]) == [a, 0]
    assert reader.back([a], [a, extra, a], [a]) == [a]
