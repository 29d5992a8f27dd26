"""Answers fetched from a stand-in server on the loopback interface."""

import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.clocks import own_time

from medusa_kit.base.gguf import byte_tokenizer
from medusa_kit.data.readers import AnswerRow, Conversation, Message, read_rows
from medusa_kit.distill import openai_client
from medusa_kit.distill.generate import GenerateReport, fetch_answers
from medusa_kit.distill.openai_client import RETRIES, Endpoint
from medusa_kit.errors import ConfigError, DataError, MedusaKitError, UsageError
from medusa_kit.settings.sampling import SamplingParams

ASK = [{"role": "user", "content": "Hi"}]
Reply = tuple[int, Any]  # (status, JSON value or raw bytes)


class StandIn:
    """Answers what `reply(number of the request, body)` returns; remembers what it was sent."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.reply_headers: dict[str, str] = {}
        self.reply: Callable[[int, dict[str, Any]], Reply] = lambda *_: (200, spoken("ok"))
        self._lock = threading.Lock()
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(length) or "{}")
                with stand_in._lock:
                    number = len(stand_in.requests)
                    stand_in.requests.append({"path": self.path, **body})
                    stand_in.headers.append(dict(self.headers))
                status, value = stand_in.reply(number, body)
                raw = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                for name, text in stand_in.reply_headers.items():
                    self.send_header(name, text)
                self.end_headers()
                self.wfile.write(raw)

            do_GET = do_POST

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def spoken(text: str | None, reason: str = "stop", **extra: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"content": text}, "finish_reason": reason, **extra}]}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    stand_in = StandIn()
    yield stand_in
    stand_in.close()


def endpoint(server: StandIn, **options: Any) -> Endpoint:
    return Endpoint(server.url, "served", first_wait_seconds=0.0, **options)


def encoded(text: str) -> list[int]:
    return byte_tokenizer()(text).input_ids


def test_an_answer_and_what_was_asked(server: StandIn) -> None:
    tokenizer = byte_tokenizer()
    ids, reason, again = endpoint(server, max_new_tokens=9).answer(ASK, tokenizer)
    assert (ids, reason, again) == ([*encoded("ok"), tokenizer.eos_token_id], "stop", True)
    assert server.requests == [
        {"path": "/v1/chat/completions", "model": "served", "messages": ASK, "max_tokens": 9,
         "temperature": 0.0, "seed": 0}
    ]  # fmt: skip
    assert "Authorization" not in server.headers[0]


def test_an_unfinished_answer_gets_no_stop_token(server: StandIn) -> None:
    server.reply = lambda number, body: (200, spoken("ok", "length"))
    assert endpoint(server).answer(ASK, byte_tokenizer()) == (encoded("ok"), "length", True)
    server.reply = lambda number, body: (200, spoken(None, "length"))
    assert endpoint(server).answer(ASK, byte_tokenizer()) == ([], "length", True)


def test_a_base_without_a_template_continues_the_prompt(server: StandIn) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    continued = {"choices": [{"text": " there", "finish_reason": "length", "token_ids": [7, 8]}]}
    server.reply = lambda number, body: (200, continued)
    assert endpoint(server).answer(ASK, tokenizer) == (encoded(" there"), "length", True)
    assert endpoint(server, return_token_ids=True).answer(ASK, tokenizer)[0] == [7, 8]
    wanted = {"path": "/v1/completions", "prompt": encoded("Hi")}
    assert server.requests[0].items() >= wanted.items()


def test_white_space_is_kept(server: StandIn) -> None:
    server.reply = lambda number, body: (200, spoken("  a\n", "length"))
    ids, _, _ = endpoint(server).answer(ASK, byte_tokenizer())
    assert byte_tokenizer().decode(ids) == "  a\n"


def test_sampling_and_the_key(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret")
    sampling = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, seed=3)
    endpoint(server, sampling=sampling, api_key_env="MY_KEY").answer(ASK, byte_tokenizer())
    sent = server.requests[0]
    assert (sent["temperature"], sent["top_k"], sent["top_p"], sent["seed"]) == (0.7, 5, 0.9, 3)
    assert "min_p" not in sent
    assert server.headers[0]["Authorization"] == "Bearer s3cret"
    sampling = SamplingParams(0.7, min_p=0.1, repetition_penalty=1.2, presence_penalty=-1.0,
                              frequency_penalty=0.5, logit_bias={7: 2.0})  # fmt: skip
    endpoint(server, sampling=sampling).answer(ASK, byte_tokenizer())
    wanted = {"min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": -1.0,
              "frequency_penalty": 0.5, "logit_bias": {"7": 2.0}}  # fmt: skip
    assert server.requests[1].items() >= wanted.items()
    assert "top_k" not in server.requests[1]


def test_the_servers_own_token_ids(server: StandIn) -> None:
    server.reply = lambda number, body: (200, spoken("ok", token_ids=[7, 8, 256]))
    vllm = endpoint(server, return_token_ids=True)
    assert vllm.answer(ASK, byte_tokenizer()) == ([7, 8, 256], "stop", False)
    assert server.requests[0]["return_token_ids"] is True
    server.reply = lambda number, body: (200, spoken("ok"))
    with pytest.raises(UsageError, match="sends no token_ids"):
        vllm.answer(ASK, byte_tokenizer())


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_busy_server_is_asked_again(server: StandIn, status: int) -> None:
    server.reply = lambda number, body: (status, b"busy") if number < 2 else (200, spoken("ok"))
    assert endpoint(server).answer(ASK, byte_tokenizer())[1] == "stop"
    assert len(server.requests) == 3
    assert server.requests[0] == server.requests[2]


def test_waits_double(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    own_time(monkeypatch, openai_client, sleep=waits.append)
    server.reply = lambda number, body: (429, b"busy")
    with pytest.raises(MedusaKitError, match="answers 429: busy"):
        Endpoint(server.url, "served", first_wait_seconds=0.5).answer(ASK, byte_tokenizer())
    assert waits == [0.5 * 2**attempt for attempt in range(RETRIES)]
    assert len(server.requests) == RETRIES + 1


@pytest.mark.parametrize(("asked", "wait"), [("7", 7.0), ("soon", 0.5)])
def test_a_server_says_how_long_to_wait(
    server: StandIn, monkeypatch: pytest.MonkeyPatch, asked: str, wait: float
) -> None:
    waits: list[float] = []
    own_time(monkeypatch, openai_client, sleep=waits.append)
    server.reply_headers = {"Retry-After": asked}
    server.reply = lambda number, body: (429, b"busy") if number < 1 else (200, spoken("ok"))
    Endpoint(server.url, "served", first_wait_seconds=0.5).answer(ASK, byte_tokenizer())
    assert waits == [wait]


def test_nobody_waits_an_hour(server: StandIn) -> None:
    server.reply_headers = {"Retry-After": "3600"}
    server.reply = lambda number, body: (429, b"quota")
    with pytest.raises(MedusaKitError, match="answers 429: quota") as caught:
        endpoint(server).answer(ASK, byte_tokenizer())
    assert "run the same command again" in (caught.value.hint or "")
    assert len(server.requests) == 1


def test_a_redirect_does_not_show_the_key_to_another_server(
    server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    other = StandIn()
    try:
        server.reply_headers = {"Location": other.url + "/chat/completions"}
        server.reply = lambda number, body: (302, b"moved")
        with pytest.raises(MedusaKitError, match="answers 302: moved") as caught:
            endpoint(server).answer(ASK, byte_tokenizer())
        assert other.headers == []
        assert other.url in (caught.value.hint or "")
    finally:
        other.close()


@pytest.mark.parametrize("status", [401, 200])
def test_a_reply_that_repeats_the_key_is_quoted_without_it(
    server: StandIn, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    server.reply = lambda number, body: (status, b"bad header: Bearer s3cret")
    with pytest.raises(MedusaKitError, match=r"bad header: Bearer \*\*\*") as caught:
        endpoint(server).answer(ASK, byte_tokenizer())
    assert "s3cret" not in str(caught.value)


def test_a_key_copied_carelessly(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", " s3cret\n")
    endpoint(server).answer(ASK, byte_tokenizer())
    assert server.headers[0]["Authorization"] == "Bearer s3cret"
    for odd in ("s3\ncret", "s3–cret"):
        monkeypatch.setenv("OPENAI_API_KEY", odd)
        with pytest.raises(ConfigError, match="environment variable OPENAI_API_KEY") as caught:
            endpoint(server).answer(ASK, byte_tokenizer())
        assert odd not in str(caught.value)


@pytest.mark.parametrize(("status", "hint"), [(401, "OPENAI_API_KEY"), (404, "served"), (400, "")])
def test_refusals_are_final_and_say_what_to_do(server: StandIn, status: int, hint: str) -> None:
    server.reply = lambda number, body: (status, {"error": "no such luck"})
    with pytest.raises(MedusaKitError, match=rf"answers {status}: .*no such luck") as caught:
        endpoint(server).answer(ASK, byte_tokenizer())
    assert hint in (caught.value.hint or "")
    assert len(server.requests) == 1
    assert caught.value.exit_code == 1


NO_ANSWERS: dict[str, Any] = {
    "no JSON": b"<html>hello</html>",
    "cut off": b'{"choices": [{"message"',
    "a list": [1],
    "no choices": {"object": "error"},
    "no choice": {"choices": []},
    "no message": {"choices": [{"finish_reason": "stop"}]},
}


@pytest.mark.parametrize("case", NO_ANSWERS)
def test_replies_that_are_no_answers(server: StandIn, case: str) -> None:
    server.reply = lambda number, body: (200, NO_ANSWERS[case])
    with pytest.raises(MedusaKitError, match="no completion"):
        endpoint(server).answer(ASK, byte_tokenizer())


def test_a_connection_that_breaks_is_tried_again(server: StandIn) -> None:
    class Cut(bytes):
        """Promises more than it sends."""

        def __len__(self) -> int:
            return super().__len__() + 5

    whole = json.dumps(spoken("ok")).encode()
    server.reply = lambda number, body: (200, whole if number else Cut(whole))
    assert endpoint(server).answer(ASK, byte_tokenizer())[1] == "stop"
    assert len(server.requests) == 2


def test_a_server_that_is_away(server: StandIn) -> None:
    gone = StandIn()
    gone.close()
    with pytest.raises(MedusaKitError, match="cannot be reached") as caught:
        endpoint(gone).answer(ASK, byte_tokenizer())
    assert caught.value.hint == "is the server running?"


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000/v1",
        "example/v1",
        "file:///etc",
        "",
        "http://",
        "http://[/v1",
        "http://a:b/v1",
    ],
)
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="http"):
        Endpoint(url, "served")


def test_a_url_with_a_password_is_not_repeated() -> None:
    with pytest.raises(ConfigError, match="user name or password") as caught:
        Endpoint("https://me:s3cret@example.com/v1", "served")
    assert "s3cret" not in str(caught.value)
    assert "OPENAI_API_KEY" in (caught.value.hint or "")


# A whole run.


def prompts(count: int) -> list[Conversation]:
    return [
        Conversation([{"role": "user", "content": f"q{row}"}], row, None, "prompts.jsonl")
        for row in range(1, count + 1)
    ]


def run(server: StandIn, out: Path, count: int = 5, **options: Any) -> GenerateReport:
    tokenizer, asked = byte_tokenizer(), endpoint(server)

    def fetch(messages: list[Message]) -> tuple[list[int], str, bool]:
        return asked.answer(messages, tokenizer)

    return fetch_answers(tokenizer, prompts(count), out, fetch, {"endpoint_model": "served"},
                         sampling=SamplingParams(), concurrency=2, **options)  # fmt: skip


def echo(number: int, body: dict[str, Any]) -> Reply:
    return 200, spoken("to " + body["messages"][-1]["content"])


def test_a_fetched_file(server: StandIn, tmp_path: Path) -> None:
    server.reply = echo
    out, tokenizer = tmp_path / "answers.jsonl", byte_tokenizer()
    report = run(server, out)
    rows = list(read_rows(str(out)))
    assert len(rows) == report.written == report.stopped == 5
    for number, row in enumerate(rows, start=1):
        assert isinstance(row, AnswerRow)
        assert row.id == f"prompts:{number}"
        assert row.response_ids == [*encoded(f"to q{number}"), tokenizer.eos_token_id]
        end = f"q{number}<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(row.prompt_ids).endswith(end)
    assert [json.loads(line)["retokenized"] for line in out.read_text().splitlines()] == [True] * 5


def test_a_stopped_fetch_goes_on(server: StandIn, tmp_path: Path) -> None:
    server.reply = echo
    run(server, tmp_path / "whole.jsonl")
    out, before = tmp_path / "answers.jsonl", len(server.requests)
    server.reply = lambda number, body: (
        (401, b"odd") if body["messages"][-1]["content"] == "q4" else echo(number, body)
    )
    with pytest.raises(MedusaKitError, match="answers 401"):
        run(server, out)
    assert len(out.read_text().splitlines()) == 3, "what came before is there"
    server.reply = echo
    before = len(server.requests)
    report = run(server, out)
    assert (report.written, report.already_there) == (2, 3)
    assert len(server.requests) - before == 2, "what is there is not asked for again"
    assert out.read_text() == (tmp_path / "whole.jsonl").read_text()


def test_a_fetch_with_other_settings_is_refused(server: StandIn, tmp_path: Path) -> None:
    run(server, tmp_path / "answers.jsonl", count=1)
    with pytest.raises(ConfigError, match="turns: 'last' ≠ 'first'"):
        run(server, tmp_path / "answers.jsonl", count=1, turns="last")


def refuse(question: str) -> Callable[[int, dict[str, Any]], Reply]:
    return lambda number, body: (
        (400, b"too long") if body["messages"][-1]["content"] == question else echo(number, body)
    )


def test_a_row_the_server_refuses_is_skipped_or_fatal(server: StandIn, tmp_path: Path) -> None:
    server.reply = refuse("q3")
    report = run(server, tmp_path / "skip.jsonl")
    assert (report.written, [row for row, _ in report.skipped]) == (4, [3])
    assert "answers 400: too long" in report.skipped[0][1]
    assert [row.id for row in read_rows(str(tmp_path / "skip.jsonl"))] == [
        f"prompts:{row}" for row in (1, 2, 4, 5)
    ]
    with pytest.raises(DataError, match=r"row 3: .* answers 400"):
        run(server, tmp_path / "fail.jsonl", on_error="fail")


def test_a_first_row_may_be_refused(server: StandIn, tmp_path: Path) -> None:
    server.reply = refuse("q1")
    report = run(server, tmp_path / "answers.jsonl")
    assert (report.written, [row for row, _ in report.skipped]) == (4, [1])


def test_a_server_that_refuses_every_row_ends_the_run(server: StandIn, tmp_path: Path) -> None:
    """A request that no row would get through must not be repeated for every row."""

    def slow(number: int, body: dict[str, Any]) -> Reply:
        time.sleep(0.02)
        return 400, b"unknown field"

    server.reply = slow
    with pytest.raises(DataError, match=r"row 8: .*unknown field"):
        run(server, tmp_path / "many.jsonl", count=50)
    assert len(server.requests) < 50
    with pytest.raises(DataError, match=r"row 2: .*unknown field"):
        run(server, tmp_path / "few.jsonl", count=2)
