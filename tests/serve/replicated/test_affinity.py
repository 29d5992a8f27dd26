"""Which replica a request is sent to."""

import json
from typing import Any

import pytest

from medusa_kit.serve.replicated import affinity
from medusa_kit.serve.replicated.affinity import Affinity, RoutingKey, routing_key

LONG = "the sea is salt and wide, " * 40


def key(**asked: Any) -> RoutingKey:
    return routing_key(json.dumps({"model": "base", **asked}).encode(), "base")


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def test_a_conversation_goes_on_where_it_was() -> None:
    chosen = Affinity(slack=2)
    chosen.sent(key(messages=said(LONG)), "a")
    chosen.sent(key(messages=said("another")), "b")
    idle = {"a": 0, "b": 0}
    assert chosen.rank(key(messages=said(LONG, "and then?")), idle) == [["a"], ["b"]]
    assert chosen.rank(key(messages=said("another", "and?")), idle) == [["b"], ["a"]]
    assert chosen.rank(key(messages=said("a third")), idle) == [["a", "b"]]
    assert chosen.rank(key(messages=said(LONG, "and then?"), tools=[{"type": "x"}]), idle) == [
        ["a", "b"]  # tools stand before messages in a prompt
    ]


def test_the_longer_prefix_counts() -> None:
    chosen = Affinity(slack=2)
    for replica, turns in (("a", 1), ("b", 3)):
        chosen.sent(key(messages=said(*"xyz"[:turns])), replica)
    assert chosen.rank(key(messages=said(*"xyzw")), {"a": 0, "b": 0}) == [["b"], ["a"]]


@pytest.mark.parametrize("prompt", [LONG, list(range(300)), [LONG, "other"], [list(range(300))]])
def test_prompts_of_completions(prompt: Any) -> None:
    chosen = Affinity(slack=2)
    chosen.sent(key(prompt=prompt), "b")
    longer = prompt + (" yes" if isinstance(prompt, str) else [7] if prompt[0] == 0 else [])
    assert chosen.rank(key(prompt=longer), {"a": 0, "b": 0})[0] == ["b"]


def test_a_replica_that_is_much_busier_is_not_preferred() -> None:
    chosen = Affinity(slack=2)
    chosen.sent(key(messages=said("x")), "a")
    asked = key(messages=said("x", "y"))
    assert chosen.rank(asked, {"a": 2, "b": 0})[0] == ["a"]
    assert chosen.rank(asked, {"a": 3, "b": 0}) == [["a", "b"]]


def test_heads_come_before_prefixes() -> None:
    chosen = Affinity(slack=2)
    chosen.sent(key(model="base:one", messages=said("x")), "a")
    chosen.sent(key(messages=said("y", "z")), "b")
    for named in ({"model": "base:one"}, {"adapter_id": "one"}):
        assert chosen.rank(key(messages=said("y", "z"), **named), {"a": 0, "b": 0})[0] == ["a"]
    assert chosen.rank(key(model="base:two"), {"a": 0, "b": 0}) == [["a", "b"]]


def test_what_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "MAX_BLOCKS", 3)
    chosen, idle = Affinity(slack=2), {"a": 0, "b": 0}
    for text in ("old", "x", "y", "z"):
        chosen.sent(key(messages=said(text)), "a")
    assert chosen.rank(key(messages=said("old")), idle) == [["a", "b"]]
    assert chosen.rank(key(messages=said("x")), idle)[0] == ["a"]
    chosen.keep({"b"})
    assert chosen.rank(key(messages=said("x")), idle) == [["a", "b"]]
    assert chosen.rank(key(messages=said("x")), {}) == []


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"[" * 100_000, b"\xff",
                                  b'{"model": 3, "messages": "x", "prompt": {}}'])  # fmt: skip
def test_what_is_no_request_has_no_key(body: bytes) -> None:
    assert routing_key(body, "base") == RoutingKey()


def test_odd_text_is_hashed() -> None:
    assert len(key(prompt="\ud800 \u2028").blocks) == 1
