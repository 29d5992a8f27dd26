"""Prompts as people give them: by name, by pipe, or a name in place of a prompt."""

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.debug_model import MODEL, PLAIN

from medusa_kit.bench import time_needed
from medusa_kit.data import text_files

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Puts a text into standard input, which a process reads once."""

    def put(text: str) -> None:
        text_files._piped.cache_clear()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    yield put
    text_files._piped.cache_clear()


def test_a_file_given_as_the_prompt_is_taken_for_a_mistake(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my q.txt").write_text("Hello\n")
    code, out, err = run("generate", "my q.txt", *PLAIN, "-n", "4")
    assert (code, out) == (2, "")
    assert "the prompt 'my q.txt' is the name of a file" in err
    assert "hint: --prompts 'my q.txt' answers the prompts in it" in err
    for name in ("nope.jsonl", "data/q.TXT", "rows.parquet"):
        code, out, err = run("generate", name, *PLAIN, "-n", "4")
        assert (code, out) == (2, "")
        assert f"the prompt {name!r} is the name of a file that is not there" in err
        assert f"hint: --prompts {name} answers" in err
    assert run("generate", "What is in nope.jsonl", *PLAIN, "-n", "2")[0] == 0
    assert run("generate", "x" * 500, *PLAIN, "-n", "2")[0] == 0
    code, out, err = run("generate", "-", *PLAIN, "-n", "4")
    assert (code, out) == (2, "")
    assert "the prompt '-' is the name of standard input" in err
    assert "hint: --prompts - answers the prompts in it" in err


@pytest.mark.parametrize(
    "text",
    [
        "One\n\nTwo\n",
        '{"prompt": "One"}\n{"prompt": "Two"}\n',
        '[{"prompt": "One"},\n {"prompt": "Two"}]',
        "[INST] One\nTwo",
    ],
)
def test_prompts_come_from_a_pipe(run: Run, pipe: Callable[[str], None], text: str) -> None:
    pipe(text)
    code, out, err = run("generate", "--prompts", "-", *PLAIN, "-n", "2", "--json")
    assert code == 0, err
    asked = [json.loads(line)["messages"][-1]["content"] for line in out.splitlines()]
    assert asked == (["[INST] One", "Two"] if "INST" in text else ["One", "Two"])


def test_what_is_wrong_with_a_pipe_is_told_by_its_name(
    run: Run, pipe: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for text, said in (
        ("", "standard input holds no row"),
        ('{"prompt": 1', "standard input:1 is"),
    ):
        pipe(text)
        code, _, err = run("generate", "--prompts", "-", *PLAIN)
        assert (code, said in err) == (1, True), err
    pipe("")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert "nothing is piped into it" in run("generate", "--prompts", "-", *PLAIN)[2]


def test_prompts_are_shown_as_the_model_is_asked(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "[b]One"}\n{"prompt": "Two"}\n{"other": 1}\n')
    code, out, err = run("data", "inspect", path, *MODEL[:2], "--row", "1")
    assert code == 0, err
    assert "<|im_start|>user\n[b]One<|im_end|>\n<|im_start|>assistant\n" in out
    assert "row 1: a prompt of" in out
    assert "2 prompts of" in out
    assert "the first skipped is row 3" in err
    assert "`medusa-kit train --quick` or `medusa-kit data generate` makes them" in err
    code, _, err = run("data", "inspect", path, *MODEL[:2], "--row", "9")
    assert (code, "row 9 cannot be shown: the source has no such row" in err) == (2, True)
    assert run("data", "inspect", path, *MODEL[:2], "--on-error", "fail")[0] == 1


def test_prompts_of_a_pipe_are_shown_by_its_name(run: Run, pipe: Callable[[str], None]) -> None:
    pipe("One\nTwo\n")
    code, out, err = run("data", "inspect", "-", *MODEL[:2])
    assert (code, "standard input: 2 prompts of" in out) == (0, True), err


def test_verify_says_how_long_it_takes(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_needed, "WAIT", 0.0)
    path = tmp_path / "prompts.txt"
    path.write_text("One\nTwo\n")
    code, out, err = run("verify", *PLAIN, "--prompts", path, "-n", "4")
    assert code == 0, err
    assert "2 prompts of at most 4 new tokens, greedy, then sampled" in err
    assert "the model is loaded twice" in err
    assert err.count("this takes about 0.") == 2
    assert "verifying sampled answers: 2 of 2" in err
    assert "no tree.json" not in err
    said = " ".join(out.split())
    assert "passed: all 4 answers are identical to those of transformers generate" in said
    assert said.endswith("; heads can be trained for this model")
    assert "steps by" not in said


def test_bench_says_what_it_does_before_it_is_done(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_needed, "WAIT", 0.0)
    path = tmp_path / "prompts.txt"
    path.write_text("One\nTwo\n")
    code, out, err = run("bench", *PLAIN, "--prompts", path, "-n", "4", "--peers", "transformers")
    assert code == 0, err
    said = ["2 prompts of at most 4 new tokens, answered by each method in turn",
            "a first round, which is not measured: transformers generate, ",
            "this takes about 0.", "benchmarking: 2 of 2"]  # fmt: skip
    places = [err.index(line) for line in said]
    assert places == sorted(places)
    assert "median" not in out


def test_each_answer_stands_below_its_prompt(run: Run, tmp_path: Path) -> None:
    """On stderr, so that stdout has the answers alone."""
    (tmp_path / "prompts.txt").write_text(f"Name a tree.\n{'word ' * 40}\n")
    asked = ["generate", *MODEL, "--heads", "none", "-n", "2", "--batch-size", "2"]
    code, out, err = run(*asked, "--prompts", tmp_path / "prompts.txt")
    assert code == 0
    lines = err.splitlines()
    first, second = lines.index("prompt 1: Name a tree."), lines.index(f"prompt 2: {'word ' * 11}…")
    assert "tokens/s" in "".join(lines[first:second])
    assert "prompt 1" not in out
    _, _, err = run(*asked, "Name a tree.")
    assert "prompt 1" not in err


def test_a_limit_is_a_matter_of_the_pipe(run: Run) -> None:
    for name in ("--limit", "--num-prompts"):
        code, _, err = run("generate", "--prompts", "p.txt", name, "4")
        assert code == 2
        assert "hint: for the first prompts of a file: head -n 4 FILE |" in err
