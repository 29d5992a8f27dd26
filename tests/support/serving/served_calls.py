"""A server whose model calls functions in the form of its template."""

import json
import re
from collections.abc import Sequence
from typing import Any

from support.serving.live_server import live_server
from support.serving.scripted import placed_base
from support.small_engines import build_engine

QUESTION = {"role": "user", "content": "ab?"}


def tokens_of(text: str, marks: Sequence[str]) -> list[str]:
    """Marks, words and what is between words."""
    pattern = "|".join([*map(re.escape, marks), r"\s", r"\w+", r"[^\w\s]"])
    return [part.replace("\n", "Ċ").replace(" ", "Ġ") for part in re.findall(pattern, text)]


def check_served(
    text: str, calls: Sequence[tuple[str, Any]], template: str, marks: Sequence[str],
    tools: Sequence[Any], shown: Any, shown_tools: Any,
) -> None:  # fmt: skip
    """The model's text is read as these calls, of its own accord and as asked for; calls and
    results go back. `shown`: what the template is given."""
    base = placed_base(tokens_of(text, marks), template, tuple(marks), shown, tools=shown_tools)
    with live_server(build_engine(base)) as live, live.http() as http:
        body = {"model": live.model, "temperature": 0, "max_tokens": 300, "tools": tools,
                "messages": [QUESTION]}  # fmt: skip
        for fields in ({}, {"tool_choice": "required"}):
            told = http.post("/v1/chat/completions", json={**body, **fields})
            assert told.status_code == 200, told.text
            (choice,) = told.json()["choices"]
            assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
            functions = [call["function"] for call in choice["message"]["tool_calls"]]
            assert [(one["name"], json.loads(one["arguments"])) for one in functions] == calls
        back = [choice["message"]] + [
            {"role": "tool", "tool_call_id": call["id"], "content": "Rain"}
            for call in choice["message"]["tool_calls"]
        ]
        again = {**body, "messages": [QUESTION, *back], "max_tokens": 1}
        assert http.post("/v1/chat/completions", json=again).status_code == 200
