"""A server as a method of the bench, against a stand-in that streams the way vLLM does."""

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.serving.streaming_server import StreamingServer

from medusa_kit.base.gguf import byte_tokenizer
from medusa_kit.bench import endpoint as endpoint_module
from medusa_kit.bench.bench import Method, bench
from medusa_kit.bench.endpoint import EndpointRun, Question
from medusa_kit.bench.report import Answers, BenchReport, Decoding
from medusa_kit.bench.served_acceptance import read_counts, steps_between
from medusa_kit.distill.openai_client import Endpoint
from medusa_kit.distill.openai_stream import probe, stream_answer
from medusa_kit.errors import DataError, MedusaKitError

ASK = [{"role": "user", "content": "Hi"}]
TEXT = "to you!"
THEIRS = [[83], [1, 2], [3, 256]]  # what the model chose, piece by piece


def endpoint(server: StreamingServer, **options: Any) -> Endpoint:
    return Endpoint(server.url, "served", first_wait_seconds=0.0, **options)


def served(server: StreamingServer, count: int, **options: Any) -> EndpointRun:
    """Questions q1, q2, …; here they are known by their numbers from 0."""
    questions = {
        (number,): Question(number + 1, [{"role": "user", "content": f"q{number + 1}"}])
        for number in range(count)
    }
    return EndpointRun(endpoint(server), questions, byte_tokenizer, **{"compare": False, **options})


def measured(run: EndpointRun, *others: Method, **options: Any) -> BenchReport:
    prompts = [list(ids) for ids in run.prompts]
    return bench([*others, run.method()], prompts, 9, **options)


def encoded(text: str) -> list[int]:
    return [*byte_tokenizer()(text).input_ids, byte_tokenizer().eos_token_id]


# One answer.


def test_a_streamed_answer(server: StreamingServer) -> None:
    got = stream_answer(endpoint(server, max_new_tokens=9), ASK)
    assert (got.text, got.finish_reason) == (TEXT, "stop")
    assert (got.prompt_tokens, got.completion_tokens) == (7, 5)
    assert got.first is not None
    assert got.started < got.first <= got.ended
    asked = server.requests[0]
    assert (asked["stream"], asked["stream_options"]) == (True, {"include_usage": True})
    assert (asked["model"], asked["max_tokens"], asked["messages"]) == ("served", 9, ASK)


def test_the_first_token_is_timed_when_it_comes(server: StreamingServer) -> None:
    """The server continues only after the client has its first piece, so no clock matters."""
    seen, waited = threading.Event(), list[bool]()

    def hold(question: str) -> None:
        if len(waited) == 1:
            seen.wait(5)
        waited.append(True)

    class Watched(Endpoint):
        def ask(self, body: dict[str, Any], read: Callable[[Any, float], Any]) -> Any:
            def watching(response: Any, started: float) -> Any:
                lines = iter(response)

                class Response:
                    headers = response.headers

                    def __iter__(self) -> Iterator[bytes]:
                        for line in lines:
                            yield line
                            if b'"to"' in line:
                                seen.set()

                return read(Response(), started)

            return super().ask(body, watching)

    server.hold = hold
    got = stream_answer(Watched(server.url, "served"), ASK)
    assert seen.is_set()
    assert got.text == TEXT


def test_a_server_that_sends_answers_whole(server: StreamingServer) -> None:
    server.streams = False
    got = stream_answer(endpoint(server), ASK)
    assert (got.text, got.first, got.completion_tokens) == (TEXT, None, 5)
    server.streams, server.pieces = True, [TEXT]
    server.counted = lambda: {"completion_tokens": 5}  # type: ignore[method-assign]
    assert stream_answer(endpoint(server), ASK).first is None, "held back till the end"


def test_an_answer_that_breaks_off_is_not_asked_for_again(server: StreamingServer) -> None:
    server.cut = {"Hi"}
    with pytest.raises(DataError, match="breaks off after 1 pieces"):
        stream_answer(endpoint(server), ASK)
    assert len(server.requests) == 1


ODD_EVENTS = {
    "an error": ('data: {"error": {"message": "out of memory"}}', "an error: .*out of memory"),
    "no JSON": ("data: {nothing", "no JSON"),
    "a list": ("data: [1]", "an error"),
}


@pytest.mark.parametrize("case", ODD_EVENTS)
def test_odd_events(server: StreamingServer, case: str) -> None:
    event, message = ODD_EVENTS[case]
    server.events = lambda body, question: iter([event])  # type: ignore[method-assign]
    with pytest.raises(DataError, match=message):
        stream_answer(endpoint(server), ASK)


def test_an_error_among_events_is_quoted_without_the_key(
    server: StreamingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    server.events = lambda body, question: iter(['data: {"error": "key s3cret"}'])  # type: ignore[method-assign]
    with pytest.raises(DataError, match=r"key \*\*\*"):
        stream_answer(endpoint(server), ASK)


def test_a_busy_server_is_asked_again(server: StreamingServer) -> None:
    server.refuse = lambda number, question: 429 if number < 2 else None
    assert stream_answer(endpoint(server), ASK).text == TEXT
    assert len(server.requests) == 3


@pytest.mark.parametrize(("status", "hint"), [(401, "OPENAI_API_KEY"), (404, "'served'")])
def test_who_serves_us_not_is_told_before_anything(
    server: StreamingServer, status: int, hint: str
) -> None:
    server.refuse = lambda number, question: status
    with pytest.raises(MedusaKitError, match=f"answers {status}") as caught:
        probe(endpoint(server))
    assert hint in (caught.value.hint or "")
    assert len(server.requests) == 1


def test_a_server_that_knows_no_stream_options(server: StreamingServer) -> None:
    assert probe(endpoint(server)) == (endpoint(server), True)
    assert server.requests[0]["max_tokens"] == 4
    server.refuse = lambda number, question: (
        400 if "stream_options" in server.requests[number] else None
    )
    for ids in (False, True):
        assert probe(endpoint(server, return_token_ids=ids)) == (endpoint(server), False)
    got = measured(served(server, 1, include_usage=False)).results[0]
    assert got.total.tokens == len(encoded(TEXT))


def test_token_ids_are_asked_for_where_the_server_sends_them(server: StreamingServer) -> None:
    asking = endpoint(server, return_token_ids=True)
    assert probe(asking) == (endpoint(server), True), "it knows nothing of them"
    server.token_ids = THEIRS
    assert probe(asking) == (asking, True)
    assert probe(endpoint(server)) == (endpoint(server), True), "nobody asked"
    server.refuse = lambda number, question: (
        400 if "return_token_ids" in server.requests[number] else None
    )
    assert probe(asking) == (endpoint(server), True)


# What it accepted.


def test_counters_are_summed_over_engines() -> None:
    server = StreamingServer()
    server.close()
    before = read_counts(server.metrics_page())
    server.drafts += 10
    after = read_counts(server.metrics_page())
    assert before is not None
    assert after is not None
    assert (before["drafts"], before["draft_tokens"]) == (100, 200)
    steps = steps_between(before, after)
    assert steps is not None
    assert (steps.num_steps, steps.draft_tokens, steps.accepted_tokens) == (10, 20, 10)
    assert (steps.acceptance_by_depth, steps.tokens) == ([1.0, 0.0], 20)
    assert steps_between(after, before) is None, "a server begun anew"
    assert steps_between(after, after) is None, "nothing was drafted"
    plain = read_counts("vllm:spec_decode_num_drafts 3\nvllm:spec_decode_num_drafts_created 1e9")
    assert plain == {"drafts": 3}
    assert read_counts("vllm:num_requests_running 1.0\n") is None


def test_served_acceptance_beside_ours(server: StreamingServer) -> None:
    server.metrics = True
    run = served(server, 3)
    total = measured(run).results[0].total
    assert (total.answers, total.tokens, total.num_steps) == (3, 15, 6)
    assert total.acceptance_length == 2.0
    assert total.acceptance_by_depth == [1.0, 0.0]
    assert any("6 of 12 drafted tokens accepted (50%)" in said for said in run.notes())
    assert len(server.requests) == 3, "one round each, none to warm up"


def test_no_counters_no_acceptance(server: StreamingServer) -> None:
    run = served(server, 2)
    total = measured(run).results[0].total
    assert (total.num_steps, total.acceptance_length) == (0, None)
    assert any("no vLLM counters" in said for said in run.notes())


def test_rounds_without_counters_are_reported(server: StreamingServer) -> None:
    """The second round ends without /metrics, the third begins without, the fourth has it again."""
    server.metrics = True

    def hold(question: str) -> None:
        server.metrics = question != "q2"

    server.hold = hold
    run = served(server, 4)
    total = measured(run).results[0].total
    assert (total.num_steps, total.acceptance_length) == (4, 2.0), "of two rounds"
    assert run.record()["rounds_without_metrics"] == 2
    assert any("2 of 4 rounds are not included" in said for said in run.notes())


def test_a_restarted_server_is_reported(server: StreamingServer) -> None:
    server.metrics = True

    def hold(question: str) -> None:
        server.drafts = 50 if question == "q2" else server.drafts

    server.hold = hold
    run = served(server, 3)
    assert measured(run).results[0].total.num_steps == 4
    assert any("1 of 3 rounds are not included" in said for said in run.notes())


# A whole run.


def test_tokens_are_counted_by_usage_or_by_encoding(server: StreamingServer) -> None:
    run = served(server, 2)
    assert measured(run).results[0].total.tokens == 10
    assert run.record()["tokens_counted_by"] == "usage"
    server.usage = False
    run = served(server, 2)
    assert measured(run).results[0].total.tokens == 2 * len(encoded(TEXT))
    assert run.record()["tokens_counted_by"] == "encoding again"
    assert any("counted by encoding again" in said for said in run.notes())


def test_beside_others(server: StreamingServer) -> None:
    """Equal answers are reported as the same, and prompts other than ours as different."""
    other = Method(
        "here",
        lambda batch: Answers([encoded(TEXT) for _ in batch], 1.0, decoding=Decoding(4, 0.5)),
    )
    run = served(server, 3, compare=True)
    report = measured(run, other, categories=["a", "b", "a"])
    theirs = report.results[1]
    assert theirs.name == "endpoint, served"
    assert (theirs.total.identical, theirs.total.answers) == (3, 3)
    assert theirs.total.decoding_tokens_per_second is not None
    assert set(theirs.categories) == {"a", "b"}
    assert theirs.total.ratio(report.results[0].total) > 0
    assert run.record()["prompts_read_otherwise"] == [1, 3, 2]
    assert any("prompt 1: 7 tokens there, 1 here" in said for said in theirs.drafter_notes)
    server.prompt_tokens = 1
    sampled = measured(served(server, 1, compare=True), other, sampled=True).results[1]
    assert sampled.total.identical is None
    assert not any("template" in said for said in sampled.drafter_notes)


def test_the_same_is_judged_by_token_ids(server: StreamingServer) -> None:
    """The answer's text, encoded again, gives other tokens than the model chose."""
    other = Method("here", lambda batch: Answers([[83, 1, 2, 3, 256] for _ in batch], 1.0))
    run = served(server, 2, compare=True)
    assert measured(run, other).results[1].total.identical == 0
    assert any("text was encoded again" in said for said in run.notes())
    server.token_ids = THEIRS
    run = served(server, 2, compare=True)
    run.endpoint = endpoint(server, return_token_ids=True)
    assert measured(run, other).results[1].total.identical == 2
    assert run.record()["compared_by"] == "token ids"
    assert not any("encoded again" in said for said in run.notes())
    server.counted = lambda: {"completion_tokens": 9}  # type: ignore[method-assign]
    assert stream_answer(run.endpoint, ASK).token_ids is None, "some are missing"


def test_a_stop_token_that_is_counted_but_not_sent(server: StreamingServer) -> None:
    """As `medusa-kit serve` does."""
    other = Method("here", lambda batch: Answers([[83, 1, 2, 3, 256] for _ in batch], 1.0))
    server.token_ids = [[83], [1, 2], [3]]
    server.counted = lambda: {"completion_tokens": 5}  # type: ignore[method-assign]
    asking = endpoint(server, return_token_ids=True)
    assert probe(asking) == (asking, True)
    run = served(server, 2, compare=True)
    run.endpoint = asking
    assert measured(run, other).results[1].total.identical == 2
    assert run.record()["compared_by"] == "token ids"
    server.reason = "length"
    assert stream_answer(asking, ASK).token_ids is None, "one is missing"


def test_a_prompt_that_fails_is_named_and_the_run_goes_on(server: StreamingServer) -> None:
    server.cut = {"q2"}
    server.refuse = lambda number, question: 400 if question == "q3" else None
    run = served(server, 4)
    report = measured(run)
    total = report.results[0].total
    assert (total.answers, total.tokens, total.identical) == (2, 10, None)
    assert total.rates[1:3] == [None, None]
    assert total.median_ratio(total) == 1.0
    assert sorted(run.failed) == [2, 3]
    said = report.results[0].drafter_notes
    assert any(line.startswith("prompt 2 failed: the answer breaks off") for line in said)
    assert any("prompt 3 failed: the server answers 400" in line for line in said)
    assert server.url not in json.dumps([report.to_json(), run.record()])


def test_failures_of_a_batch_leave_the_others_comparable(server: StreamingServer) -> None:
    other = Method("here", lambda batch: Answers([encoded(TEXT) for _ in batch], 1.0))
    server.cut = {"q1"}
    run = served(server, 2, compare=True, concurrency=2)
    theirs = measured(run, other, batch_size=2).results[1].total
    assert (theirs.answers, theirs.identical, theirs.tokens) == (1, 1, 5)


def test_a_server_that_fails_throughout(server: StreamingServer) -> None:
    other = Method("here", lambda batch: Answers([[1] for _ in batch], 1.0))
    server.refuse = lambda number, question: 400
    with pytest.raises(MedusaKitError, match="prompt 1 failed: the server answers 400"):
        measured(served(server, 2))
    report = measured(served(server, 2), other)
    assert "prompt 2 failed" in (report.results[1].not_run or "")
    server.requests.clear()
    report = measured(served(server, 9), other)
    assert "answers 400" in (report.results[1].not_run or "")
    assert len(server.requests) == endpoint_module.HOPELESS_FAILURES


@pytest.mark.parametrize("concurrency", [1, 3])
def test_requests_at_once(server: StreamingServer, concurrency: int) -> None:
    together = threading.Barrier(concurrency)
    server.hold = lambda question: (together.wait(5), None)[1]
    run = served(server, 6, concurrency=concurrency)
    report = measured(run, batch_size=6)
    assert server.most_running == concurrency
    assert sorted(server.questions) == [f"q{row}" for row in range(1, 7)]
    assert (report.results[0].total.answers, run.failed) == (6, {})


def test_only_seconds_of_requests_count() -> None:
    covered = endpoint_module._covered
    assert covered([]) == 0.0
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.5)]) == 4.0
