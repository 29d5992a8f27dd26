"""benchmarks/llama_cpp.py: what llama.cpp's programs say, rounds, ratios, tables, charts."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.serving.streaming_server import StreamingServer
from support.small_engines import build_engine

from medusa_kit.base.loading import load_base_model
from medusa_kit.errors import MedusaKitError

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
# A test of llama-bench, as it prints it; fields that are not read are left out.
TEST = {
    "build_commit": "0c1e570", "build_number": 1, "cpu_info": "AMD EPYC", "backends": "CPU",
    "model_type": "llama 256M Q4_1", "model_size": 96576768, "n_batch": 2048, "n_threads": 2,
    "type_k": "f16", "n_prompt": 0, "n_gen": 16, "n_depth": 256, "avg_ns": 104758939,
    "samples_ns": [106463349, 103054529], "samples_ts": [150.286, 155.258],
}  # fmt: skip
SAYS = "print('banner', end=chr(10) + '> '); print('Hi'); print('Hello')"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


def test_a_test_of_llama_bench(script: Any) -> None:
    run = script("llama_tools").read_bench(json.dumps([TEST]))
    assert run.tokens == 16
    assert run.seconds == pytest.approx([0.106463349, 0.103054529])
    assert run.about["build_commit"] == "0c1e570"
    assert run.about["type_k"] == "f16"
    assert "n_gen" not in run.about  # that is of this test, not of the program


@pytest.mark.parametrize(
    "text",
    ["", "[]", json.dumps([TEST, TEST]), json.dumps([{"n_prompt": 1}]), '{"error": "no"}',
     json.dumps([{**TEST, "samples_ns": []}]), json.dumps([{**TEST, "n_gen": 0}]),
     json.dumps([{**TEST, "samples_ns": [0]}])],
)  # fmt: skip
def test_output_that_is_no_test(script: Any, text: str) -> None:
    with pytest.raises(ValueError, match="llama-bench"):
        script("llama_tools").read_bench(text)


def test_what_llama_bench_is_asked(script: Any) -> None:
    command = script("llama_tools").bench_command(Path("a.gguf"), 2, prompt=8, depth=256, repeats=3)
    asked = dict(zip(command[1::2], command[2::2], strict=True))
    assert asked == {"-m": "a.gguf", "-o": "json", "-t": "2", "-p": "8", "-n": "0", "-d": "256",
                     "-r": "3"}  # fmt: skip


def test_output_counts_from_behind_the_echo_on(script: Any) -> None:
    cost_of = script("process_cost").cost_of
    answered = cost_of(python(SAYS), after="\n> Hi\n")
    assert 0 < answered.first_output_seconds <= answered.seconds
    assert answered.output.endswith("> Hi\nHello\n")
    assert cost_of(python(SAYS), after="> Hi\nHello").first_output_seconds is None
    assert cost_of(python("print(input())"), input="you\n").output == "you\n"
    assert cost_of(python("print()")).first_output_seconds is None


def test_a_command_that_fails(script: Any) -> None:
    with pytest.raises(RuntimeError, match=r"status 3: .*no such model"):
        script("process_cost").cost_of(
            python("import sys; print('no such model', file=sys.stderr); sys.exit(3)")
        )


def test_the_peak_is_the_commands_own(script: Any, tmp_path: Path) -> None:
    """Not that of the process that measures; pages of a mapped file count."""
    cost_of, ours = script("process_cost").cost_of, bytearray(b"x" * 200_000_000)
    small = cost_of(python("pass")).peak_bytes
    assert small < len(ours) / 2
    (tmp_path / "file").write_bytes(bytes(ours[:64_000_000]))
    mapped = (
        "import mmap; file = open({path!r}, 'rb');"
        "view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ);"
        "sum(view[at] for at in range(0, len(view), 4096))"
    ).format(path=str(tmp_path / "file"))
    assert cost_of(python(mapped)).peak_bytes > 64_000_000 > small


def made(script: Any, ours: list[float], theirs: list[float], **more: Any) -> Any:
    side = script("side_by_side")
    figures = {side.OURS: ours, side.THEIRS: theirs}
    return side.Measured("decode", "depth 0", "tokens/s", figures, **more)


def test_ratios_are_within_a_round(script: Any) -> None:
    """A slow minute, here the second round, affects both."""
    one = made(script, [200.0, 20.0, 110.0], [100.0, 10.0, 100.0])
    assert one.ratios == pytest.approx([1.1, 2.0, 2.0])
    assert one.record()["ratio"] == pytest.approx({"median": 2.0, "least": 1.1, "greatest": 2.0})
    side = script("side_by_side")
    (row,) = side.rows([side.Measured.of(json.loads(json.dumps(one.record())))])
    assert row == ["decode: depth 0", "tokens/s", "110", "100", "2.00 (1.10 to 2.00)"]


def test_turns_rotate_and_a_failure_is_left_out(script: Any) -> None:
    side, told = script("side_by_side"), list[tuple[str, str]]()

    def case(name: str, fails: bool) -> Any:
        def measure(who: str) -> float:
            told.append((name, who))
            if fails and who == side.THEIRS:
                raise MedusaKitError("out of context")
            return 1.0 + len(told)

        return side.Case("decode", name, "ms", {
            who: lambda who=who: measure(who) for who in (side.OURS, side.THEIRS)
        })  # fmt: skip

    kept = list[int]()
    keep = lambda found: kept.append(len(found[0].ratios))  # noqa: E731
    good, bad = side.run_rounds([case("a", False), case("b", True)], 2, keep)
    ours, theirs = side.OURS, side.THEIRS
    assert told == [("a", ours), ("a", theirs), ("b", theirs), ("b", ours),
                    ("a", theirs), ("a", ours), ("b", ours)]  # fmt: skip
    assert kept == [1, 2]
    assert len(good.ratios) == 2
    assert bad.not_run == {theirs: "out of context"}
    (row,) = side.rows([bad])
    assert row[3:] == ["–", "–"]
    assert len(bad.figures[ours]) == 2


def test_what_is_measured(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = script("llama_cpp").arguments
    full, quick = arguments([]), arguments(["--quick", "--rounds", "2"])
    some = arguments(["--model", "a.gguf", "--parts", "memory,decode", "--depths", "0"])
    is_complete = script("llama_cpp").is_complete
    assert [is_complete(one) for one in (full, quick, some)] == [True, False, False]
    assert (quick.rounds, quick.limit) == (2, 2)
    assert max(quick.prompt_sizes) < min(full.depths[1:])
    assert (some.parts, some.depths) == (["decode", "memory"], [0])
    assert some.output != full.output  # the documentation's figures are not overwritten
    with pytest.raises(SystemExit):
        arguments(["--parts", "decode,speed"])
    assert "unknown: ['speed']" in capsys.readouterr().err


def test_our_own_speed_does_not_end_at_a_stop_token(script: Any) -> None:
    engine = build_engine(load_base_model("debug-tiny", device="cpu"))
    own = script("own_speed").OwnSpeed(engine)
    first = engine.generate(own.ids(3), max_new_tokens=1, drafter="none").token_ids
    engine.base.model.generation_config.eos_token_id = first
    assert engine.generate(own.ids(3), max_new_tokens=5).finish_reason == "stop"
    assert own.decode(4, 3) > 0
    assert len(own.prompt(5, repeats=2)) == 2
    assert len(own.steps(4, 6, repeats=3)) == 3
    with pytest.raises(RuntimeError, match="fit into the context"):
        own.decode(8, engine.base.info.context_length - 4)


def test_guessing_is_compared_with_plain_decoding_of_the_same_program(
    script: Any, server: StreamingServer, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "To be"}\n{"prompt": "or not"}\n')
    engine = build_engine(load_base_model("debug-tiny", device="cpu"))
    urls = {"llama.cpp": server.url, "llama.cpp, ngram-simple": server.url}
    answers = script("whole_answers").Answers(engine, str(prompts), None, 4)
    report = answers.by_guessing(["prompt-lookup"], urls)
    names = [one.name for one in report.results]
    assert names == ["medusa-kit, plain decoding", "medusa-kit, prompt-lookup",
                     "endpoint, llama.cpp", "endpoint, llama.cpp, ngram-simple"]  # fmt: skip
    assert set(server.questions) == {"To be", "or not"} | {server.questions[0]}
    cells = {row[0]: row for row in script("llama_report").method_rows(report)}
    assert cells["medusa-kit, plain decoding"][4:6] == ["1.00", "1.00"]
    assert cells["medusa-kit, prompt-lookup"][-1] == "2/2"
    ratio = report.results[3].total.ratio(report.results[2].total)
    assert cells[names[3]][4] == f"{ratio:.2f}"


def test_tables_and_charts(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    method = {"tokens": 100, "seconds": 2.0, "identical": None, "answers": 3}
    record = {
        "model": "tiny", "date": "today", "setup": {"processor": "a processor", "threads": 2},
        "cases": [made(script, [200.0], [100.0]).record(),
                  made(script, [], [9.0], not_run={"medusa-kit": "why"}).record()],
        "complete": False,
        "answers": {"num_prompts": 3, "max_new_tokens": 8, "methods": [
            {"name": "transformers generate", **method},
            {"name": "endpoint, llama.cpp", "not_run": "it ended"}]},
    }  # fmt: skip
    report = script("llama_report")
    report.show(record, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"beside.md", "llama_cpp.svg", "speed.svg"}
    text = (tmp_path / "beside.md").read_text()
    assert "| decode: depth 0 | tokens/s | 200 | 100 | 2.00 (2.00 to 2.00) |" in text
    assert "| endpoint, llama.cpp | not run: it ended |" in text
    assert "2.00 (2.00 to 2.00)" in capsys.readouterr().out
    report.show({**record, "complete": True}, tmp_path)
    assert (tmp_path / report.IMAGES / "speed.svg").is_file()
    assert (tmp_path / report.IMAGES / "llama_cpp.svg").is_file()
