"""The next turn of a chat goes on from the tokens of the turns before, whatever encoding their text
would give."""

import json
from typing import Any

import httpx
import pytest
from support.debug_model import NO_SYSTEM
from support.serving.live_server import LiveServer, live_server
from support.small_engines import engine_with_heads, lively_chat_base

from medusa_kit.data.chat import encode_prompt
from medusa_kit.engine.engine import Engine
from medusa_kit.engine.recent_turns import RecentTurns
from medusa_kit.engine.turns import Answered, Prompt
from medusa_kit.infer.cpu.verifier import NativeVerifier
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.serve.operations.keys import ApiKeys

CHAT = "/v1/chat/completions"
QUESTIONS = ("Tell me about rivers.", "And about hills?", "Why?")
TOKENS = 20


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Its answers are bytes of no text, so that encoding one again gives other tokens."""
    return engine_with_heads(lively_chat_base())


def ask(
    http: httpx.Client, live: LiveServer, messages: list[dict[str, Any]], **fields: Any
) -> tuple[str, list[int], dict[str, Any]]:
    """(text, tokens, usage)."""
    asked = {"model": live.model, "messages": messages, "max_tokens": TOKENS, "temperature": 0,
             "return_token_ids": True, **fields}  # fmt: skip
    headers = asked.pop("headers", {})
    if not asked.get("stream"):
        said = http.post(CHAT, json=asked, headers=headers).json()
        (choice,) = said["choices"]
        return choice["message"]["content"], choice["token_ids"], said["usage"]
    asked["stream_options"] = {"include_usage": True}
    text, ids, used = "", list[int](), dict[str, Any]()
    for line in http.post(CHAT, json=asked, headers=headers).text.splitlines():
        if line.startswith("data: {"):
            chunk = json.loads(line[6:])
            used = chunk.get("usage") or used
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
                ids += choice.get("token_ids", [])
    return text, ids, used


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_each_turn_is_that_of_a_conversation(
    engine: Engine, stream: bool, system: str | None
) -> None:
    # Of another engine: a server begins with what its own has read.
    conversation = engine_with_heads(lively_chat_base()).conversation(system)
    reads = isinstance(engine.verifier, NativeVerifier)
    messages = [] if system is None else [{"role": "system", "content": system}]
    read, rewritten = 0, 0
    with live_server(engine) as live, live.http() as http:
        for question in QUESTIONS:
            expected = conversation.send(question, max_new_tokens=TOKENS)
            messages.append(user(question))
            text, ids, used = ask(http, live, messages, stream=stream)
            assert (text, ids) == (expected.text, expected.token_ids)
            assert used["prompt_tokens"] == len(conversation.prompt_ids)
            cached = used["prompt_tokens_details"]["cached_tokens"]
            assert cached in [reads * (read - n) for n in (0, 1)] or not read
            rewritten += conversation.prompt_ids != encode_prompt(engine.base.tokenizer, messages)
            read = len(conversation.prompt_ids) + len(ids)
            messages.append(said(text))
    assert rewritten == 2


def test_other_keys_do_not_go_on_from_them(engine: Engine) -> None:
    keys = ApiKeys(["one-key", "other-key"])
    lengths = []
    with live_server(engine, app={"keys": keys}) as live, live.http() as http:
        mine, other = ({"Authorization": f"Bearer {key}"} for key in ("one-key", "other-key"))
        text, _, _ = ask(http, live, [user(QUESTIONS[0])], headers=mine)
        later = [user(QUESTIONS[0]), said(text), user(QUESTIONS[1])]
        for headers in (other, mine):
            _, _, used = ask(http, live, later, headers=headers)
            lengths.append(used["prompt_tokens"])
    encoded = len(encode_prompt(engine.base.tokenizer, later))
    assert lengths[0] == encoded != lengths[1]


def test_what_is_not_known_is_encoded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that was edited, another template, and an engine that reuses nothing."""
    tokenizer = engine.base.tokenizer
    with live_server(engine) as live, live.http() as http:
        text, _, _ = ask(http, live, [user(QUESTIONS[0])])
        edited = [user(QUESTIONS[0]), said(f"{text}!"), user(QUESTIONS[1])]
        assert ask(http, live, edited)[2]["prompt_tokens"] == len(encode_prompt(tokenizer, edited))
        later = [user(QUESTIONS[0]), said(text), user(QUESTIONS[1])]
        with monkeypatch.context() as patch:
            patch.setattr(tokenizer, "chat_template", NO_SYSTEM)
            used = ask(http, live, later)[2]
            assert used["prompt_tokens"] == len(encode_prompt(tokenizer, later))
        known = ask(http, live, later)[2]["prompt_tokens"]
    without = engine_with_heads(lively_chat_base())
    without.scheduler = Scheduler(without.verifier)
    with live_server(without) as live, live.http() as http:
        ask(http, live, [user(QUESTIONS[0])])
        used = ask(http, live, later)[2]
    assert used["prompt_tokens"] == len(encode_prompt(tokenizer, later)) != known


def turn(question: str, answer: str) -> Answered:
    return Answered(Prompt([user(question)], [1] * 100), said(answer), [2] * 100)


def test_the_store_is_bounded_and_the_turns_used_longest_ago_go() -> None:
    store = RecentTurns()
    store.keep("", turn("0", "a"))
    one = store.num_bytes
    store = RecentTurns(max_bytes=one * 7 // 2)
    for number in range(3):
        store.keep("", turn(str(number), "a"))
    assert (len(store), store.num_bytes) == (3, 3 * one)
    first = [user("0"), said("a"), user("and?")]
    assert store.before("", first) is not None
    store.keep("", turn("3", "a"))
    assert store.before("", first) is not None
    assert store.before("", [user("1"), said("a"), user("and?")]) is None
    store.keep("", turn("3", "a"))  # again
    assert (len(store), store.num_bytes) == (3, 3 * one)
    store.keep("", turn("4", "x" * one * 4))  # too large for it
    assert (len(store), store.num_bytes) == (3, 3 * one)


def test_the_latest_turn_is_found_of_the_same_context_alone() -> None:
    store = RecentTurns()
    first = turn("0", "a")
    both = Answered(Prompt([user("0"), said("a"), user("1")], [1]), said("b"), [2])
    store.keep("x", first)
    store.keep("x", both)
    messages = [user("0"), said("a"), user("1"), said("b"), user("2")]
    assert store.before("x", messages) is both
    assert store.before("x", [*messages[:3], said("c"), user("2")]) is first
    assert store.before("x", messages[:3]) is first
    assert store.before("y", messages) is None
    assert store.before("x", messages[:1]) is None
