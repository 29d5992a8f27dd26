"""`medusa-kit train --quick` as it is typed."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.typed import typed_command

from medusa_kit import console
from medusa_kit.cli.quick import name_of
from medusa_kit.quick import judging, trial
from medusa_kit.settings.recipe import load_recipe

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """`train` with these arguments, in a folder of its own: (exit code, stdout, stderr)."""
    monkeypatch.setattr(console.out, "width", 160)
    monkeypatch.chdir(tmp_path)

    return typed_command(monkeypatch, capsys, "train")


def test_from_prompts_to_a_table(run: Run, prompt_file: Path, tmp_path: Path) -> None:
    """In real time, which so few prompts do not use up; again, it is only told."""
    asked = ["--quick", "-m", "debug-tiny", "--prompts", prompt_file.name, "--device", "cpu"]
    code, out, err = run(*asked)
    assert code == 0, err
    for shown in ("heads for debug-tiny", "training tokens", "acceptance length, static trees",
                  "predicted speed-up", "measured: auto", "answers identical", "disk",
                  "medusa-kit chat -m debug-tiny --heads heads-debug-tiny/run/heads",
                  "medusa-kit serve", "medusa-kit push"):  # fmt: skip
        assert shown in out
    for said in (
        "plan for 120.0 min: ",
        "measured: ",
        "1 of 6, held-out answers:",
        "6 of 6, bench:",
    ):
        assert said in err
    assert "the same is in heads-debug-tiny/report.json" in err
    record = json.loads((tmp_path / "heads-debug-tiny/report.json").read_text())
    assert record["phases"]["answers"]["answers"] == 23

    code, again, err = run(*asked)
    assert code == 0
    assert "resuming after" in err
    assert again == out
    code, _, err = run("heads-debug-tiny/recipe.yaml")
    assert (code, "holds this run, which is finished" in err) == (2, True)
    assert load_recipe(tmp_path / "heads-debug-tiny/recipe.yaml").output_dir == str(
        tmp_path / "heads-debug-tiny/run"
    )


def test_ctrl_c_says_how_to_go_on(
    run: Run, prompt_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trial, "measure", stop)
    code, out, err = run("--quick", "-m", "debug-tiny", "--prompts", prompt_file, "--device", "cpu")
    assert (code, out) == (130, "")
    assert re.search(r"stopped after \d+ s of 120\.0 min; run the same command to resume", err)


@pytest.mark.slow
def test_a_difference_that_is_no_rounding_fails(
    run: Run, prompt_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = judging.verify

    def wrong(engine: object, oracle: object, *arguments: object, **options: object) -> object:
        generate = oracle.generate  # type: ignore[attr-defined]
        oracle.generate = lambda ids, n: ([t + 1 for t in generate(ids, n)[0]], 0.0)  # type: ignore
        return original(engine, oracle, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(judging, "verify", wrong)
    code, out, err = run("--quick", "-m", "debug-tiny", "--prompts", prompt_file, "--device", "cpu")
    assert code == 1
    assert "answers differ by more than rounding" in out
    assert err.endswith("error: a difference is more than rounding\n")


@pytest.mark.parametrize(("arguments", "message"), [
    (["--quick"], "--quick needs prompts to answer"),
    (["--quick", "recipe.yaml", "--prompts", "p.txt"],
     "--quick does not go with the recipe 'recipe.yaml'"),
    (["--quick", "--prompts", "p.txt", "train.epochs=3"],
     "--quick does not go with the setting 'train.epochs=3'"),
    (["--quick", "--prompts", "p.txt", "--nproc", "1"], "--quick does not go with --nproc"),
    (["--quick", "--prompts", "p.txt", "--hours", "0"], "--hours 0 is out of range"),
    (["--quick", "--prompts", "p.txt", "--hours", "nan"], "--hours nan is out of range"),
    (["--quick", "--prompts", "p.txt", "--device", "tpu"], "device 'tpu' is unknown"),
    (["recipe.yaml", "-m", "debug-tiny"], "only --quick takes --model"),
    (["recipe.yaml", "--prompts", "p", "--hours", "1"],
     "only --quick takes --prompts, --hours"),
    ([], "no recipe was given"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")  # fmt: skip
def test_what_does_not_go_together(run: Run, arguments: list[str], message: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "hint: " in err or "out of range" in err


def test_what_is_missing_is_told_before_a_model_is_loaded(
    run: Run, prompt_file: Path, tmp_path: Path
) -> None:
    code, _, err = run("--quick", "-m", "debug-tiny", "--prompts", "nowhere.jsonl")
    assert (code, "no data file at nowhere.jsonl" in err) == (1, True)
    code, _, err = run("--quick", "-m", "./nowhere", "--prompts", prompt_file)
    assert (code, "no model at nowhere" in err) == (1, True)
    (tmp_path / "file").write_text("")
    code, _, err = run("--quick", "-m", "debug-tiny", "--prompts", prompt_file, "--output",
                       "file/heads")  # fmt: skip
    assert (code, "cannot write to file/heads: " in err) == (1, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", prompt_file.name]


def test_a_folder_is_named_after_its_model() -> None:
    names = {"smollm2-135m-instruct": "smollm2-135m-instruct", "Qwen/Qwen3-8B": "qwen3-8b",
             "./models/My Model/": "my-model", "a/gemma3.Q4.gguf": "gemma3.q4",
             "..": "model"}  # fmt: skip
    assert {model: name_of(model) for model in names} == names
