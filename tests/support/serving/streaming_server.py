"""A stand-in on the loopback interface for OpenAI-compatible servers that stream, vLLM's way."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


class StreamingServer:
    """Answers every question alike, unless `refuse` says otherwise; remembers what it was asked.

    `usage`, `streams`, `metrics`: whether it has these. `cut`: questions whose answer breaks off.
    `token_ids`: those of each piece, the stop token with the last, where it sends them if asked;
    their number is what it counts then. `hold`: waits before each piece. Steps have two drafts, of
    which the first is always accepted.
    """

    def __init__(self) -> None:
        self.pieces, self.reason = ["to", " you", "!"], "stop"
        self.usage = self.streams = True
        self.metrics = False
        self.cut: set[str] = set()
        self.refuse: Callable[[int, str], int | None] = lambda number, question: None
        self.hold: Callable[[str], None] = lambda question: None
        self.prompt_tokens = 7
        self.token_ids: list[list[int]] | None = None
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.drafts = 100  # before anything was asked
        self.running = self.most_running = 0
        self._lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    @property
    def questions(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self.requests]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if not (stand_in.metrics and self.path == "/metrics"):
                    return self.send_error(404)
                self._send(stand_in.metrics_page().encode(), "text/plain; version=0.0.4")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                question = body["messages"][-1]["content"]
                with stand_in._lock:
                    number = len(stand_in.requests)
                    stand_in.requests.append({"path": self.path, **body})
                    stand_in.headers.append(dict(self.headers))
                    stand_in.running += 1
                    stand_in.most_running = max(stand_in.most_running, stand_in.running)
                    stand_in.drafts += len(stand_in.pieces) - 1
                status = stand_in.refuse(number, question)
                if status is None and stand_in.streams and body.get("stream"):
                    return self._stream(body, question)
                stand_in.leave()
                if status is not None:
                    self._send(b'{"error": "no such luck"}', "application/json", status)
                else:
                    self._send(json.dumps(stand_in.whole(body)).encode(), "application/json")

            def _send(self, raw: bytes, kind: str, status: int = 200) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def _stream(self, body: dict[str, Any], question: str) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream; charset=utf-8")
                self.end_headers()  # HTTP/1.0: it ends where the connection does
                for event in stand_in.events(body, question):
                    self.wfile.write(event.encode() + b"\n\n")

            def log_message(self, *args: Any) -> None:
                pass

        return Handler

    def events(self, body: dict[str, Any], question: str) -> Any:
        yield ": a comment"
        yield self._event({"role": "assistant", "content": ""})
        sent = self.token_ids if body.get("return_token_ids") else None
        for piece, ids in zip(self.pieces, sent or [None] * len(self.pieces), strict=True):
            self.hold(question)
            yield self._event({"content": piece}, token_ids=ids)
            if question in self.cut:
                self.leave()
                return
        yield self._event({}, self.reason)
        if self.usage and body.get("stream_options", {}).get("include_usage"):
            yield "data: " + json.dumps({"choices": [], "usage": self.counted()})
        self.leave()
        yield "data: [DONE]"

    def leave(self) -> None:
        """Before the client can know, who may ask the next at once."""
        with self._lock:
            self.running -= 1

    def _event(
        self, delta: dict[str, Any], reason: str | None = None, token_ids: list[int] | None = None
    ) -> str:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": reason}
        choice |= {} if token_ids is None else {"token_ids": token_ids}
        return "data: " + json.dumps({"choices": [choice], "usage": None})

    def counted(self) -> dict[str, int]:
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.num_tokens}

    @property
    def num_tokens(self) -> int:
        """As vLLM's counters have it: the first token, then two a step."""
        if self.token_ids is not None:
            return sum(map(len, self.token_ids))
        return 1 + 2 * (len(self.pieces) - 1)

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(self.pieces)}
        choice: dict[str, Any] = {"message": message, "finish_reason": self.reason}
        reply: dict[str, Any] = {"choices": [choice]}
        if body.get("return_token_ids"):
            choice["token_ids"] = [*"".join(self.pieces).encode(), 256]
            reply["prompt_token_ids"] = [1, 2, 3]
        return {**reply, "usage": self.counted()} if self.usage else reply

    def metrics_page(self) -> str:
        """Two engines share what was drafted; `_created` times and gauges stand in between."""
        lines = ["# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.",
                 "# TYPE vllm:spec_decode_num_drafts_total counter",
                 'vllm:num_requests_running{engine="0"} 1.0']  # fmt: skip
        for engine, drafts in enumerate((self.drafts - 40, 40)):
            labels = f'engine="{engine}",model_name="served"'
            for name, value in zip(COUNTERS, (drafts, 2 * drafts, drafts), strict=True):
                lines.append(f"vllm:spec_decode_{name}_total{{{labels}}} {float(value)}")
                lines.append(f"vllm:spec_decode_{name}_created{{{labels}}} 1.7e+09")
            for position, value in enumerate((drafts, 0)):
                lines.append(
                    "vllm:spec_decode_num_accepted_tokens_per_pos_total"
                    f'{{{labels},position="{position}"}} {float(value)}'
                )
        return "\n".join(lines) + "\n"
