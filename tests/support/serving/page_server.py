"""The page and a stand-in for the server's API behind it, with canned answers.

What the last message says decides: "busy", "key", "large", "broken" and "cut" go wrong in their
ways, "once" is cut the first time and then waits to be `released`, "wait" never begins, "long" goes
on until it is stopped; everything else is answered in four steps, "at length" in four times as
many, "loop" by the same ones over and over, "code" by CODE, and so on. Plain answers to
"differ" have other words. With `locked` everything needs the key.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from medusa_kit.serve.page import router

KEY = "open sesame"
TREE = {
    "parents": [-1, 0, 0, 1, 1, 3, 2],
    "tokens": [5, 6, 7, 8, 9, 10, 11],
    "texts": [" sea", " is", " was", " blue", " <b>wet</b>", "\n", " calm"],
    "accepted": [1, 3, 5],
}
STEPS = [  # what each step says: text, depth, who guessed it
    [("The", 0, None)],
    [(" sea", 0, None)],
    [(" is", 1, "medusa"), (" blue", 2, "medusa"), ("\n", 3, "suffix"), ("<i>", 0, None)],
    [(" and", 1, "medusa"), (" deep", 2, "medusa"), (" and", 3, "suffix"), (" wide", 4, "suffix"),
     (".", 0, None)],
]  # fmt: skip
# Fences fall into several tokens, and a token may hold several lines.
CODE = [
    [("So:", 0, None)],
    [("\n``", 1, "medusa"), ("`py", 2, "medusa"), ("thon\n", 0, None)],
    [("a = `b`", 1, "suffix"), ("\n\n", 0, None)],
    [("print(a)\n```\nDone", 0, None)],
    [(".\n", 1, "medusa"), ("~~~\n<b>\n", 0, None)],
    [("```\n~~", 0, None)],
    [("~", 0, None)],
]  # fmt: skip
FENCES = [
    [("```The answer", 0, None), (" is 5.\nNot ** bold **", 1, "suffix")],
    [("\n```\nSo ** 5 **, **6**.\n", 0, None), ("~~~ c++\nx", 0, None)],
]  # what stands behind a fence
MARKS = [  # a mark may lie in several tokens, and a token across the end of a mark
    [("#", 0, None)],
    [("# Head", 1, "medusa"), ("ing\n", 0, None)],
    [("* an *", 1, "medusa"), ("*ite", 2, "medusa"), ("m** of `", 0, None)],
    [("a*", 1, "medusa"), ("*b` <b>x</b>\n", 0, None)],
    [("| a | **b** |\n", 0, None)],
    [("2 ** 3 ** `4", 0, None)],
]
WORDS = "".join(text for step in STEPS for text, _, _ in step)


class StandIn:
    """`requests`: what was asked for; `hung_up`: how many streams were left before their end."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.hung_up = 0
        self.batches = 0
        self.usual: float | None = 0.0  # the temperature of a request that gives none
        self.locked = False
        self.released = threading.Event()
        self.app = FastAPI()
        self.app.include_router(router)
        self.app.get("/v1/models")(self.models)
        self.app.get("/v1/batch")(self.batch)
        self.app.post("/v1/chat/completions")(self.chat)

    def refuses(self, request: Request) -> bool:
        return request.headers.get("authorization") != f"Bearer {KEY}"

    async def models(self, request: Request) -> Any:
        if self.locked and self.refuses(request):
            return refusal(401, "no API key was given; send the header Authorization")
        return {"object": "list", "data": [
            {"id": "tiny", "medusa_kit": {"temperature": self.usual}}, {"id": "tiny:heads"},
        ]}  # fmt: skip

    async def batch(self) -> dict[str, Any]:
        self.batches += 1
        return {"rows": 2, "reading": 1, "waiting": 3, "nodes": 24, "max_rows": 8,
                "tokens_per_second": 312.4}  # fmt: skip

    async def chat(self, request: Request) -> Any:
        body = await request.json()
        self.requests.append(body)
        said = body["messages"][-1]["content"]
        if said == "busy":
            return refusal(429, "the queue is full", {"Retry-After": "7"})
        if (self.locked or said == "key") and self.refuses(request):
            return refusal(401, "no API key was given; send the header Authorization")
        if said == "large":
            return refusal(400, "the prompt is too long: 9 tokens.\nhint: shorten the prompt")
        return StreamingResponse(self.events(body, said), media_type="text/event-stream")

    async def events(self, body: dict[str, Any], said: str) -> AsyncIterator[str]:
        plain = body["medusa_kit"].get("drafter") == "none"
        steps = [[(text, 0, None)] for step in STEPS for text, _, _ in step] if plain else STEPS
        steps = {"code": CODE, "marks": MARKS, "fences": FENCES}.get(said, steps)
        if plain and said == "differ":
            steps = [*steps[:-1], [("!", 0, None)]]
        if said == "long":
            steps = steps * 10_000
        if said == "loop":
            steps = steps * 4
        if said == "at length":
            steps = [one for n in range(4) for one in (*steps, [(f" {n}", 0, None)])]
        yield ": a comment\n\n"
        yield chunk({"role": "assistant", "content": ""})
        ended = False
        try:
            if said == "wait":
                await asyncio.Event().wait()
            again = sum(one["messages"] == body["messages"] for one in self.requests) > 1
            while said == "once" and again and not self.released.is_set():
                await asyncio.sleep(0.01)
            for step in steps:
                await asyncio.sleep(0.02 if plain else 0.01)
                yield chunk({"content": "".join(text for text, _, _ in step)}, step)
                if said == "broken":
                    yield 'data: {"error": {"message": "the device is out of memory"}}\n\n'
                    return
                if said == "cut" or (said == "once" and not again):
                    return
            ended = True
        finally:
            self.hung_up += not ended
        yield chunk({}, reason="stop")
        tokens = sum(map(len, steps))
        told = {
            "acceptance_length": (tokens - 1) / (len(steps) - 1),
            "steps": len(steps) - 1,
            "cached_tokens": 0,
            "drafter": "none" if plain else "auto (medusa 90%, none 10%)",
        }
        used = {"prompt_tokens": 9, "completion_tokens": tokens, "medusa_kit": told}
        yield f"data: {json.dumps({'choices': [], 'usage': used})}\n\n"
        yield "data: [DONE]\n\n"


def chunk(delta: dict[str, Any], step: Any = (), reason: str | None = None) -> str:
    spans = [{"text": text, "depth": depth, "by": by} for text, depth, by in step]
    told = {"spans": spans, "tree": TREE if len(step) > 1 else None}
    choice = {"index": 0, "delta": delta, "finish_reason": reason, "medusa_kit": told}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


def refusal(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status, headers)
