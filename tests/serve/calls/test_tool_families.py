"""Calls of models of several kinds: templates that show tools in a form of their own or none, tags
that are special tokens, added ones or text."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.samples import ALL, pairs
from support.serving.live_server import LiveServer, live_server
from support.serving.tagged import tagged_tokenizer
from support.small_engines import build_engine
from support.text.calling_templates import FORMS
from support.tiny_models import tiny_model

from medusa_kit.base.model import wrap_model
from medusa_kit.serve.app import create_app
from medusa_kit.serve.calls.template_calls import form_of
from medusa_kit.serve.calls.tools import constraint_of
from medusa_kit.serve.operations import logs
from medusa_kit.serve.service import Service
from medusa_kit.settings.serve import ServeConfig

MESSAGES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
SHOWN = "{% if tools %}[TOOLS {{ tools | tojson }}] {% endif %}"
QWEN = FORMS["hermes"].template
MENTION = SHOWN + "Write <tool_call>." + MESSAGES + ASK
CODER = SHOWN + "Write <tool_call>\n<function=name>." + MESSAGES + ASK
CALLED = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}<tool_call>\nWRITTEN\n</tool_call>"
    "{% endfor %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
HERMES = SHOWN + CALLED.replace("WRITTEN", "{{ c.function | tojson }}") + ASK
INVOKED = '<invoke name="{{ c.function.name }}">{{ c.function.arguments.values() | join }}</invoke>'
MINIMAX = SHOWN + CALLED.replace("WRITTEN", INVOKED) + ASK
GRANITE = SHOWN + "Write <|tool_call|>[…]." + MESSAGES + ASK
HERMES_TAGS, OTHER_TAGS = ["<tool_call>", "</tool_call>"], ["<|python_tag|>", "[TOOL_CALLS]"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen": (QWEN, {"plain": HERMES_TAGS}),
    "Hermes": (QWEN, {"special": HERMES_TAGS}),
    "half special": (QWEN, {"special": HERMES_TAGS[:1], "plain": HERMES_TAGS[1:]}),
    "Qwen coder": (CODER, {"plain": HERMES_TAGS}),
    "Hermes, shown": (HERMES, {"special": HERMES_TAGS}),
    "MiniMax 3": (MINIMAX, {"plain": HERMES_TAGS}),
    "mention": (MENTION, {"plain": HERMES_TAGS}),
    "Llama 3": (FORMS["llama"].template, {"special": OTHER_TAGS[:1]}),
    "Mistral": (FORMS["mistral"].template, {"special": OTHER_TAGS[1:], "kind": "pieces"}),
    "DeepSeek": (FORMS["deepseek"].template, {"special": FORMS["deepseek"].marks}),
    "Kimi": (FORMS["kimi"].template, {"special": FORMS["kimi"].marks[:3]}),
    "Granite": (GRANITE, {"special": ["<|tool_call|>", *HERMES_TAGS]}),
}
SHOWN_TOOLS = ("Qwen", "Hermes", "half special", "Hermes, shown", "Llama 3", "Mistral", "Kimi")
TOLD = ("Qwen coder", "MiniMax 3", "Granite", "mention")  # Hermes' form, whatever their own
PARAMETERS = {"type": "object", "properties": {"x": {"enum": ["<tool_call>", "<|python_tag|>"]}},
              "required": ["x"], "additionalProperties": False,
              "x-guidance": {"whitespace_flexible": False}}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": n, "parameters": PARAMETERS}} for n in "fg"]
NAMED = {"type": "function", "function": {"name": "g"}}


@pytest.fixture(scope="module", params=FAMILIES)
def live(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    template, tokens = FAMILIES[request.param]
    tokenizer = tagged_tokenizer(template=template, **tokens)
    model = tiny_model("llama", 0, vocab_size=len(tokenizer) + 4, max_position_embeddings=4096)
    model.generation_config.eos_token_id = [1, 3]
    with live_server(build_engine(wrap_model(model, tokenizer, request.param))) as server:
        yield server


def ask(live: LiveServer, **asked: Any) -> dict[str, Any]:
    with live.http() as http:
        answer = http.post("/v1/chat/completions", json={
            "model": live.model, "messages": [{"role": "user", "content": "hi"}], "temperature": 0,
            "max_tokens": 300, "return_token_ids": True, "parallel_tool_calls": False,
            "tools": TOOLS, **asked})  # fmt: skip
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice


@pytest.mark.parametrize(("choice", "drafter"), pairs(["required", NAMED], ["auto", "suffix"]))
def test_a_call_that_is_asked_for_comes(live: LiveServer, choice: Any, drafter: str) -> None:
    told = ask(live, tool_choice=choice, medusa_kit={"drafter": drafter})
    assert (told["finish_reason"], told["message"]["content"]) == ("tool_calls", None)
    (call,) = told["message"]["tool_calls"]
    assert call["function"]["name"] in (("g",) if choice == NAMED else ("f", "g"))
    assert json.loads(call["function"]["arguments"])["x"] in PARAMETERS["properties"]["x"]["enum"]
    plain = ask(live, tool_choice=choice, medusa_kit={"drafter": "none"})
    assert told["token_ids"] == plain["token_ids"]


def test_any_token_may_come_first(live: LiveServer) -> None:
    """The model's own wish, which a bias stands for, is followed as without tools. Tags are the
    last tokens."""
    tokenizer = live.service.engine.base.tokenizer
    step = 7 if ALL else 41
    for token in {
        *range(0, len(tokenizer), step),
        1,
        2,
        3,
        *range(len(tokenizer) - 4, len(tokenizer)),
    }:
        told = ask(live, logit_bias={str(token): 100}, max_tokens=1)
        assert told["token_ids"] == ([] if token in (1, 3) else [token])


def test_tools_are_shown_in_the_form_that_is_asked_for(live: LiveServer) -> None:
    tokenizer = live.service.engine.base.tokenizer
    ids = constraint_of(tools=TOOLS).encode(tokenizer, [{"role": "user", "content": "hi"}])
    by_template = "[TOOLS" in (text := tokenizer.decode(ids))
    assert by_template == (live.model in SHOWN_TOOLS)
    assert by_template != ("You may call functions" in text)
    assert (form_of(tokenizer).taken is None) == (live.model in TOLD)


def test_what_is_not_enforced_is_in_the_log(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(logs, "stderr_writer", lambda: SimpleNamespace(write=lines.append))
    app = create_app(Service(live.service.engine, ServeConfig(log_format="json")))
    look_ahead = {"properties": {"to": {"type": "string", "pattern": "^(?=a)"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": look_ahead}}]
    asked = {"model": live.model, "messages": [{"role": "user", "content": "hi"}],
             "max_tokens": 1, "tools": tools}  # fmt: skip
    with TestClient(app, "http://localhost") as client:
        assert client.post("/v1/chat/completions", json=asked).status_code == 200
        tools[0]["function"]["strict"] = True  # type: ignore[index]
        refused = client.post("/v1/chat/completions", json=asked)
    at = "tools[0].function.parameters.properties.to"
    assert json.loads(lines[0])["notes"] == [f"{at}: pattern is not enforced"]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, at)
    assert "notes" not in json.loads(lines[1])


def test_notes_are_in_plain_lines_too() -> None:
    scope = {"method": "POST", "path": "/", "client": None, "state": {"notes": ["a is not so"]}}
    assert logs._line("text", scope, 200, 0.1, "id").endswith(" id (a is not so)")
