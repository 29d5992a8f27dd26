"""Commands that ask a running server: `bench --endpoint` and `data generate --endpoint`."""

import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.debug_model import MODEL
from support.serving.streaming_server import StreamingServer

from medusa_kit.base import loading as base_loading
from medusa_kit.base.gguf import byte_tokenizer
from medusa_kit.data.readers import AnswerRow, read_rows
from medusa_kit.distill import openai_client
from medusa_kit.engine import load as loading
from medusa_kit.infer.cpu import packed_base as packed_base

Run = Callable[..., tuple[int, str, str]]
SHORT = [
    *MODEL,
    "--heads",
    "none",
    "--drafter",
    "prompt-lookup",
    "--peers",
    "transformers",
    "-n",
    "6",
]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StreamingServer]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    monkeypatch.setattr(openai_client, "FIRST_WAIT_SECONDS", 0.0)
    stand_in = StreamingServer()
    stand_in.metrics = True
    yield stand_in
    stand_in.close()


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: object, **options: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(loading, "load", load)
    monkeypatch.setattr(base_loading, "load_base_model", load)
    monkeypatch.setattr(packed_base, "light_base", load)


def test_bench_beside_a_server(
    run: Run, server: StreamingServer, prompts: Path, tmp_path: Path
) -> None:
    code, out, err = run("bench", *SHORT, "--prompts", prompts, "--endpoint", server.url,
                         "--endpoint-model", "served", "--batch-size", "2", "--concurrency", "2",
                         "--output", tmp_path)  # fmt: skip
    assert code == 0, err
    record = json.loads((tmp_path / "bench.json").read_text())
    assert record["methods"][0]["name"] == "transformers generate"
    theirs = record["methods"][-1]
    assert (theirs["name"], theirs["answers"], theirs["tokens"]) == ("endpoint, served", 3, 15)
    assert (theirs["acceptance_length"], theirs["acceptance_by_depth"]) == (2.0, [1.0, 0.0])
    assert theirs["identical"] == 0
    assert record["endpoint"]["concurrency"] == 2
    assert record["endpoint"]["drafted_tokens"] == 12
    assert record["endpoint"]["compared_by"] == "encoding again"
    assert "endpoint, served: requests at once: 2; tokens counted by usage" in out
    assert "first token after" in out
    probe, *asked = server.requests
    assert probe["max_tokens"] == 4
    assert {body["max_tokens"] for body in asked} == {6}
    assert sorted(server.questions[1:]) == ["Count to three.", "Name a tree.", "Say hello."]
    assert server.url not in (tmp_path / "bench.json").read_text()


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize("more", [[], ["--concurrency", "2"]])
def test_a_server_alone(
    run: Run, server: StreamingServer, prompts: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, more: list[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("THEIR_KEY", "s3cret")
    server.cut = {"Count to three."}
    code, out, err = run("bench", "--endpoint", server.url, "--endpoint-only", "--endpoint-model",
                         "served", "--prompts", prompts, "-n", "6", "--api-key-env", "THEIR_KEY",
                         "--output", tmp_path, *more)  # fmt: skip
    assert code == 0, err
    assert "prompt 2 failed: the answer breaks off" in out
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer s3cret"}
    record = json.loads((tmp_path / "bench.json").read_text())
    (theirs,) = record["methods"]
    assert (theirs["answers"], theirs["tokens"], theirs["identical"]) == (2, 10, None)
    assert list(record["endpoint"]["failed"]) == ["2"]
    assert "base" not in record
    assert "s3cret" not in json.dumps(record) + out + err
    assert "same:" not in out


@pytest.mark.usefixtures("nothing_loads")
def test_requests_at_once_are_of_all_categories(
    run: Run, server: StreamingServer, tmp_path: Path
) -> None:
    together = threading.Barrier(4)
    server.hold = lambda question: None if question == "Hello" else (together.wait(5), None)[1]
    rows = [{"question_id": n, "category": f"c{n}", "turns": [f"q{n}"]} for n in range(4)]
    (tmp_path / "set.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = ["bench", "--endpoint", server.url, "--endpoint-only", "--prompts"]
    code, out, err = run(*asked, tmp_path / "set.jsonl", "--concurrency", "4")
    assert code == 0, err
    assert "failed" not in out
    assert server.most_running == 4
    server.hold = lambda question: None
    twice = [json.dumps({**row, "question_id": n}) for n, row in enumerate(2 * rows)]
    (tmp_path / "set.jsonl").write_text("\n".join(twice))
    code, out, _ = run(*asked, tmp_path / "set.jsonl")
    assert code == 0
    assert "c3" in out
    assert "(2.00)" in out, "acceptance by category"


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize(
    ("options", "what", "values"),
    [(["--concurrency", "1,2"], "concurrency", [1, 2]),
     (["--arrivals", "closed", "--concurrency", "2"], "concurrency", [2]),
     (["--arrivals", "poisson", "--rate", "900,500.5", "--seed", "3"], "rate", [900.0, 500.5])],
)  # fmt: skip
def test_a_server_under_load(
    run: Run, server: StreamingServer, prompts: Path, tmp_path: Path, options: list[str],
    what: str, values: list[float],
) -> None:  # fmt: skip
    server.cut = {"Count to three."}
    code, out, err = run(
        "bench",
        "--endpoint",
        server.url,
        "--endpoint-only",
        "--endpoint-model",
        "served",
        "--prompts",
        prompts,
        "--output",
        tmp_path,
        *options,
    )
    assert code == 0, err
    assert "first token" in out
    assert "prompt 2 failed: the answer breaks off" in out
    record = json.loads((tmp_path / "load.json").read_text())
    kind = {"kind": "poisson", "seed": 3} if what == "rate" else {"kind": "closed"}
    assert (record["arrivals"], record["compared_by"]) == (kind, None)
    assert [point[what] for point in record["points"]] == values
    for point in record["points"]:
        assert (point["answered"], point["failed"], point["tokens"]) == (2, 1, 10)
        assert [one["number"] for one in point["requests_made"]] == [1, 2, 3]
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
    assert server.url not in json.dumps(record)


def test_answers_under_load_are_compared_with_those_decoded_here(
    run: Run, server: StreamingServer, prompts: Path, tmp_path: Path
) -> None:
    asked = ["bench", *MODEL, "--prompts", prompts, "-n", "6", "--endpoint", server.url,
             "--concurrency", "1,3", "--output", tmp_path]  # fmt: skip
    code, out, err = run(*asked)
    assert code == 0, err
    record = json.loads((tmp_path / "load.json").read_text())
    assert [(point["same"], point["compared"]) for point in record["points"]] == [(0, 3), (0, 3)]
    assert record["compared_by"] == "text"
    assert "another answer than plain decoding's: prompts 1, 2, 3" in out
    code, out, err = run(*asked, "--temperature", "1")
    assert code == 0, err
    assert json.loads((tmp_path / "load.json").read_text())["compared_by"] is None


def test_bench_compares_the_token_ids_of_a_server(
    run: Run, server: StreamingServer, prompts: Path, tmp_path: Path
) -> None:
    server.token_ids = [[83], [1, 2], [3, 256]]
    code, _, err = run("bench", *SHORT, "--prompts", prompts, "--endpoint", server.url,
                       "--output", tmp_path)  # fmt: skip
    assert code == 0, err
    record = json.loads((tmp_path / "bench.json").read_text())["endpoint"]
    assert record["compared_by"] == "token ids"
    assert all(body["return_token_ids"] for body in server.requests)


def test_a_server_alone_says_nothing_about_heads(run: Run, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text('{"methods": [], "num_prompts": 1, "endpoint": {}}')
    code, _, err = run("push", trained, "me/heads", "--bench", tmp_path / "bench.json", "--dry-run")
    assert code == 1
    assert "is about a server alone" in err


@pytest.mark.usefixtures("nothing_loads")
def test_without_usage_the_models_tokenizer_counts(
    run: Run, server: StreamingServer, prompts: Path
) -> None:
    server.usage = False
    code, out, err = run("bench", "--endpoint", server.url, "--endpoint-only", "--model",
                         "debug-tiny", "--prompts", prompts)  # fmt: skip
    assert code == 0, err
    assert "tokens counted by encoding again" in out
    assert server.requests[0]["model"] == "debug-tiny"


@pytest.mark.usefixtures("nothing_loads")
def test_who_serves_us_not_is_told_before_anything_loads(run: Run, server: StreamingServer) -> None:
    server.refuse = lambda number, question: 404
    code, out, err = run("bench", *SHORT, "--endpoint", server.url)
    assert (code, out) == (1, "")
    assert "answers 404" in err
    assert "does the server serve the model 'debug-tiny'" in err


HERE = ["--endpoint", "http://127.0.0.1:9/v1"]
WRONG_CALLS: dict[str, tuple[list[str], str]] = {
    "no server": (["--concurrency", "2", "--endpoint-only"],
                  "without a server --endpoint-only, --concurrency would not be used"),
    "no URL": (["--endpoint", "here:8000"], "'here:8000' is no URL"),
    "rounds too small": ([*HERE, "--concurrency", "4"], "--batch-size 4"),
    "nothing to decode": ([*HERE, "--endpoint-only", "--heads", "x", "--dtype", "float16"],
                          "--dtype, --heads would not be used"),
    "no requests": ([*HERE, "--concurrency", "0"], "--concurrency '0': expected whole numbers"),
    "no numbers": ([*HERE, "--concurrency", "1,,2"], "--concurrency '1,,2': expected whole"),
    "no such arrivals": ([*HERE, "--arrivals", "even"], "'even': expected closed or poisson"),
    "no rate": ([*HERE, "--arrivals", "poisson"], "--rate 2"),
    "a rate of nothing": ([*HERE, "--arrivals", "poisson", "--rate", "1,0"], "above 0, by commas"),
    "no number": ([*HERE, "--arrivals", "poisson", "--rate", "nan"], "above 0, by commas"),
    "clients who arrive": ([*HERE, "--arrivals", "poisson", "--rate", "1", "--concurrency", "2"],
                           "--concurrency would not be used"),
    "a rate of clients": ([*HERE, "--rate", "1"], "it goes with --arrivals poisson"),
    "heads under load": ([*HERE, "--concurrency", "1,2", "--heads", "x", "--peers", "compiled"],
                         "--heads, --peers would not be used"),
    "load without a server": (["--rate", "1"], "without a server --rate would not be used"),
}  # fmt: skip


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize("case", WRONG_CALLS)
def test_wrong_calls(run: Run, case: str) -> None:
    arguments, message = WRONG_CALLS[case]
    code, _, err = run("bench", *arguments)
    assert code == 2
    assert message in " ".join(err.split())


@pytest.mark.parametrize(
    "option",
    [["--endpoint-model", "x"], ["--return-token-ids"], ["--concurrency", "2"],
     ["--api-key-env", "KEY"]],
)  # fmt: skip
def test_generating_here_asks_no_server(run: Run, prompts: Path, option: list[str]) -> None:
    code, _, err = run("data", "generate", prompts, "-o", "x", "--model", "debug-tiny", *option)
    assert code == 2
    assert f"without a server {option[0]} would not be used" in " ".join(err.split())


@pytest.mark.parametrize(
    "option", [["--dtype", "bfloat16"], ["--device", "cpu"], ["--batch-size", "2"]]
)
def test_asking_a_server_loads_no_model(run: Run, prompts: Path, option: list[str]) -> None:
    code, _, err = run("data", "generate", prompts, "-o", "x", "--model", "debug-tiny",
                       "--endpoint", "http://localhost:9/v1", *option)  # fmt: skip
    assert code == 2
    assert f"with a server no model is loaded here, and {option[0]} would not be used" in (
        " ".join(err.split())
    )


def test_a_run_that_fails_leaves_nothing(
    run: Run, server: StreamingServer, prompts: Path, tmp_path: Path
) -> None:
    server.refuse = lambda number, question: 404
    out = tmp_path / "new" / "answers.jsonl"
    code, _, err = run("data", "generate", prompts, "-o", out, "--model", "debug-tiny",
                       "--endpoint", server.url)  # fmt: skip
    assert (code, "answers 404" in err) == (1, True)
    assert list(out.parent.iterdir()) == []


def test_answers_of_a_vllm_server(
    run: Run, server: StreamingServer, prompts: Path, tmp_path: Path
) -> None:
    """Its own token ids are kept as they are, the stop token included."""
    out = tmp_path / "answers.jsonl"
    arguments = ["data", "generate", prompts, "-o", out, "--model", "debug-tiny", "-n", "9",
                 "--endpoint", server.url, "--endpoint-model", "served"]  # fmt: skip
    code, _, err = run(*arguments, "--return-token-ids")
    assert code == 0, err
    assert "3 answers written" in err
    rows = list(read_rows(str(out)))
    for row in rows:
        assert isinstance(row, AnswerRow)
        assert row.response_ids == [*b"to you!", 256]
    assert len(rows) == 3
    assert all("retokenized" not in line for line in out.read_text().splitlines())
    assert all(body["return_token_ids"] for body in server.requests)
    assert {body["model"] for body in server.requests} == {"served"}
    assert byte_tokenizer().decode(rows[0].prompt_ids).count("Name a tree.") == 1
    code, _, err = run(*arguments, "--return-token-ids")
    assert code == 0, err
    assert len(server.requests) == 3, "what is there is not asked for again"
