"""The command line on the debug model: what it prints where, and what it exits with."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from support.debug_model import MODEL, PLAIN, ROOT, plain_text

from medusa_kit.base.loading import load_base_model
from medusa_kit.engine.engine import Engine
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.settings.grammar import Grammar
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.version import __version__

COMMANDS = ["train", "tree-search", "generate", "chat", "verify", "bench", "doctor", "convert",
            "cache", "data", "data generate", "data inspect"]  # fmt: skip

Run = Callable[..., tuple[int, str, str]]


# Help, version, exit codes.


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help(run: Run, command: str) -> None:
    code, out, err = run(*command.split(), "--help")
    assert code == 0
    assert re.search(rf"Usage: .*medusa-kit {command}\W*OPTIONS", out)
    assert err == ""


def test_help_of_generate_shows_defaults(run: Run) -> None:
    _, out, _ = run("generate", "--help")
    assert "--max-new-tokens" in out
    assert "[default: 1024]" in out


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"{__version__}\n", "")


@pytest.mark.parametrize("command", [[], ["data"]])
def test_nothing_said_shows_the_help(run: Run, command: list[str]) -> None:
    code, out, err = run(*command)
    assert code == 2
    assert "Usage: " in out + err


def test_exit_codes_of_the_program() -> None:
    """Once as a real process: 2 for a wrong call, and nothing but the error on stderr."""
    wrong = [sys.executable, "-m", "medusa_kit", "train", "nowhere.yaml"]
    done = subprocess.run(wrong, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: no recipe at nowhere.yaml\nhint: ")
    assert "Traceback" not in done.stderr


WRONG_CALLS: dict[str, tuple[list[str], str]] = {
    "no prompt": (["generate", *PLAIN], "give either a prompt or --prompts"),
    "two prompts": (["generate", "hi", "--prompts", "x.txt", *PLAIN], "give either a prompt or"),
    "batch size": (["generate", "hi", *PLAIN, "--batch-size", "0"], "batch size 0"),
    "no token": (["generate", "hi", *MODEL, "-n", "0"], "-n"),
    "temperature": (["generate", "hi", *PLAIN, "--temperature", "-1"], "temperature -1.0"),
    "greedy top-k": (["generate", "hi", *PLAIN, "--temperature", "0", "--top-k", "3"],
                     "no meaning when decoding greed"),
    "typical greedily": (["generate", "hi", *PLAIN, "--temperature", "0", "--acceptance",
                          "typical"], "at temperature 0"),
    "logit bias": (["generate", "hi", *PLAIN, "--logit-bias", "5:1"], "'5:1' is not understood"),
    "biased twice": (["generate", "hi", *PLAIN, "--logit-bias", "5=1", "--logit-bias", "05=2"],
                     "'05=2' contradicts 5=1"),
    "biased id": (["generate", "hi", *PLAIN, "--logit-bias", "99999=1"], "names token id 99999"),
    "penalty of chat": (["chat", *PLAIN, "--presence-penalty", "3"], "presence_penalty 3.0 is out"),
    "lossy data": (["data", "generate", "p.txt", "-o", "a", "--acceptance", "typical"],
                   "has no option --acceptance"),
    "biased data": (["data", "generate", "PROMPTS", "-o", "a", *MODEL, "--logit-bias", "99999=1"],
                    "names token id 99999"),
    "drafter": (["generate", "hi", *PLAIN, "--drafter", "hydra"], "drafter 'hydra' is unknown"),
    "no heads to draft": (["generate", "hi", *PLAIN, "--drafter", "medusa"],
                          "there are no heads for"),
    "a tree without heads": (["generate", "hi", *PLAIN, "--tree", "t.json"], "a tree needs heads"),
    "dtype": (["generate", "hi", *MODEL, "--dtype", "int3"], "dtype 'int3' is unknown"),
    "weights": (["generate", "hi", *MODEL, "--weights", "int9"], "did you mean int8?"),
    "int8 of bf16": (["chat", *MODEL, "--weights", "int8", "--dtype", "bfloat16"], "need dtype"),
    "int8 of blocks": (["generate", "hi", "--device", "cpu", "--weights", "int8"], "already"),
    "device": (["generate", "hi", "-m", "debug-tiny", "--device", "tpu"], "device 'tpu'"),
    "on-error": (["data", "generate", "p.txt", "-o", "a", *MODEL, "--on-error", "x"], "'x'"),
    "output a folder": (["data", "generate", "PROMPTS", "-o", ".", *MODEL], "is a folder"),
    "turns": (["data", "generate", "PROMPTS", "-o", "a", *MODEL, "--turns", "all"], "turns 'all'"),
    "no batch": (["data", "generate", "p.txt", "-o", "a", "--batch-size", "0"], "--batch-size"),
    "no request": (["data", "generate", "p.txt", "-o", "a", "--concurrency", "0"], "--concurr"),
    "no URL": (["data", "generate", "p.txt", "-o", "a", "--endpoint", "here"], "'here' is no URL"),
    "row 0": (["data", "inspect", "p.txt", "--row", "0"], "--row"),
    "limit 0": (["verify", *MODEL, "--limit", "0"], "--limit"),
    "unknown peer": (["bench", *MODEL, "--peers", "compile"], "did you mean compiled"),
    "no assistant": (["bench", *MODEL, "--peers", "assisted"], "--assistant MODEL"),
    "bench temperature": (["bench", *MODEL, "--temperature", "-1"], "temperature -1.0"),
    "limit below 0": (["bench", *MODEL, "--limit", "-1"], "--limit"),
    "verify temperature": (["verify", *MODEL, "--temperature", "-1"], "temperature -1.0"),
    "verify top-k": (["verify", *MODEL, "--temperature", "0", "--top-k", "3"], "no meaning"),
    "two sources": (["tree-search", *MODEL, "--prompts", "a", "--answers", "b"], "give only one"),
    "no heads to search": (["tree-search", *MODEL, "--heads", "none"], "none for 'debug-tiny'"),
    "no folder": (["tree-search", *MODEL, "--heads", "untrained"], "lie in no folder"),
    "no statistics": (["tree-search", *MODEL, "--heads", "untrained", "--output", "o"],
                      "no statistics at o"),
    "no node": (["tree-search", *MODEL, "--nodes", "0"], "--nodes"),
    "unknown kind": (["cache", "--clear", "pakced"], "did you mean packed?"),
    "unknown command": (["tain"], "No such command 'tain'"),
    "endless command": ([5000 * "x"], f"no command '{40 * 'x'}'…, a word of 5,000 characters"),
    "unknown option": (["generate", "hi", "--modle", "x"], "No such option"),
    "unknown recipe key": (["train", str(ROOT / "recipes/debug.yaml"), "train.epoch=1"], "epochs"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_wrong_calls_exit_with_2(
    run: Run, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    arguments, message = WRONG_CALLS[case]
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*(str(prompts) if a == "PROMPTS" else a for a in arguments))
    assert code == 2
    assert out == ""
    assert message in err


FAILED_RUNS: dict[str, tuple[list[str], str]] = {
    "no file": (["generate", "--prompts", "nowhere.txt", *PLAIN], "no data file at nowhere.txt"),
    "empty file": (["generate", "--prompts", "empty.txt", *PLAIN], "error: empty.txt holds no row"),
    "no heads": (["generate", "hi", *MODEL, "--heads", "./h"], "error: no heads at h"),
    "a model as heads": (["generate", "hi", *MODEL, "--heads", "smollm2-135m-instruct"],
                         "--heads auto, the default, finds the heads that come with the kit"),
    "a file as the model": (["generate", "hi", "-m", "empty.txt"],
                            "empty.txt is a file, but not a GGUF file"),
    "no model": (["generate", "hi", "-m", "./m"], "error: no model at m"),
    "prompt too long": (["generate", "x" * 2000, *PLAIN], "the model's context holds 1024"),
    "answers of text": (["tree-search", *MODEL, "--heads", "untrained", "--output", "o",
                         "--answers", "PROMPTS"], "row 1 holds no token ids"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILED_RUNS)
def test_failed_runs_exit_with_1(
    run: Run, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    arguments, message = FAILED_RUNS[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    code, out, err = run(*(str(prompts) if a == "PROMPTS" else a for a in arguments))
    assert code == 1
    assert out == ""
    assert message in err


def test_a_failed_run_gives_a_hint_on_stderr(run: Run) -> None:
    code, out, err = run("generate", "hi", *MODEL, "--heads", "./nowhere")
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith("hint: train some with `medusa-kit train`")


def test_long_errors_stay_on_one_line(run: Run, tmp_path: Path) -> None:
    """So that a script can read them, however narrow the terminal is."""
    place = tmp_path / ("a" * 200) / "nowhere.txt"
    code, _, err = run("generate", "--prompts", place, *PLAIN)
    assert code == 1
    assert err.splitlines()[0] == f"error: no data file at {place}"


def test_ctrl_c_exits_with_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "generate", interrupt)
    code, out, err = run("generate", "hi", *PLAIN)
    assert (code, out) == (130, "")
    assert "Traceback" not in err


# generate.


def test_generate_text(run: Run) -> None:
    code, out, err = run("generate", "Name a tree.", *PLAIN)
    assert code == 0
    assert out == plain_text("Name a tree.") + "\n"
    assert "8 tokens" in err
    assert "no heads for 'debug-tiny'" in err
    *_, err = run("generate", "Name a tree.", *PLAIN, "--drafter", "none")
    assert "acceptance length 1.00 (none)" in err


def test_generate_with_heads_says_the_same(run: Run) -> None:
    asked = ("generate", "Name a tree.", *MODEL, "--heads", "untrained", "-n", "8")
    code, out, err = run(*asked, "--drafter", "medusa", "--guesses", "all")
    assert code == 0
    assert out == plain_text("Name a tree.") + "\n" == run(*asked)[1]
    assert "(medusa)" in err
    assert "no tree.json" not in err, "nothing can lie next to heads that are made up"


def test_generate_json_from_a_file(run: Run, prompts: Path) -> None:
    asked = ["--prompts", prompts, "--system", "Be short.", "--json", "--batch-size", "2"]
    code, out, _ = run("generate", *asked, *PLAIN)
    assert code == 0
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["messages"][-1]["content"] for record in records] == [
        "Name a tree.", "Count to three.", "Say hello."
    ]  # fmt: skip
    for record in records:
        assert record["messages"][0] == {"role": "system", "content": "Be short."}
        assert len(record["token_ids"]) == record["stats"]["new_tokens"] <= 8
        assert record["stats"]["acceptance_length"] >= 1.0  # by auto, which goes by the clock
        assert record["finish_reason"] in ("stop", "length")
    assert run("generate", *asked[:-1], "1", *PLAIN)[1].count("\n") == 3


def test_generate_with_another_attention_says_the_same(run: Run) -> None:
    asked = ["generate", "Name a tree.", *PLAIN, "--json", "--attention"]
    _, out, _ = run(*asked, "flash")
    record = json.loads(out)
    assert record["text"] == plain_text("Name a tree.")
    assert record["stats"]["attention"] == "flash"
    code, out, err = run(*asked, "flesh")
    assert (code, out) == (2, "")
    assert "did you mean flash?" in err


def test_rounded_weights_are_marked_lossy(run: Run) -> None:
    code, out, err = run("generate", "Name a tree.", *PLAIN, "--json", "--weights", "int8")
    stats = json.loads(out)["stats"]
    assert (code, stats["weights"], stats["lossy"]) == (0, "int8", True)
    assert "; LOSSY: int8 weights" in err
    stats = json.loads(run("generate", "Name a tree.", *PLAIN, "--json")[1])["stats"]
    assert (stats["weights"], stats["lossy"]) == ("checkpoint", False)


def test_generate_leaves_out_an_answer_that_is_there(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "Name a tree."}, {"role": "assistant", "content": "oak"}]
    path.write_text(json.dumps({"messages": turns}) + "\n")
    code, out, _ = run("generate", "--prompts", path, *PLAIN)
    assert (code, out) == (0, plain_text("Name a tree.") + "\n")


def test_generate_refuses_answers_as_prompts(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    row = {"prompt_ids": [1], "response_ids": [2], "finish_reason": "stop"}
    path.write_text(json.dumps(row) + "\n")
    code, out, err = run("generate", "--prompts", path, *PLAIN)
    assert (code, out) == (1, "")
    assert "row 1 is an answer, expected a prompt" in err


def test_sampled_text_depends_on_the_seed_alone(run: Run) -> None:
    sampled = ["generate", "hi", *MODEL, "-n", "8", "--temperature", "1.0", "--heads"]
    plain = run(*sampled, "none", "--seed", "1")[1]
    assert run(*sampled, "untrained", "--seed", "1")[1] == plain
    assert run(*sampled, "none", "--seed", "2")[1] != plain


def test_every_sampling_option_reaches_the_engine(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All fields of SamplingParams, by their names; those of generate, chat and the API agree."""
    given = {
        "temperature": 0.7, "top_k": 50, "top_p": 0.9, "seed": 3, "min_p": 0.01,
        "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": -0.2,
        "logit_bias": {5: 1.5, 7: -2.0}, "acceptance": "typical", "epsilon": 0.2, "delta": 0.4,
        "grammar": Grammar.regex("a+"),
    }  # fmt: skip
    assert list(given) == [one.name for one in fields(SamplingParams)]
    words: list[object] = []
    for name, value in given.items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, Grammar):
            option, value = "--regex", value.text
        for item in value.items() if isinstance(value, dict) else [value]:
            words += [option, "{}={}".format(*item) if isinstance(item, tuple) else item]
    seen: list[SamplingParams] = []
    original = SamplingParams.of
    monkeypatch.setattr(
        SamplingParams, "of", lambda *given: seen.append(original(*given)) or seen[-1]
    )
    code, _, err = run("generate", "hi", *PLAIN, *words)
    assert code == 0, err
    assert seen
    assert all(params == SamplingParams(**given) for params in seen)
    assert "; LOSSY: typical acceptance" in err
    assert "LOSSY" not in run("generate", "hi", *PLAIN)[2]


# data.


def test_data_generate_and_inspect(run: Run, prompts: Path, tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    made = ["data", "generate", prompts, "-o", answers, *MODEL, "--logit-bias", "5=0.5", "-n", "8"]
    code, out, err = run(*made, "--limit", "2")
    assert (code, out) == (0, "")
    assert f"2 answers written to {answers}, 0 were there already; 16 tokens" in err
    _, _, err = run(*made)
    assert "1 answers written" in err
    assert "2 were there already" in err
    code, out, err = run(*made[:-1], "9")
    assert (code, out) == (2, "")
    assert "max_new_tokens: 9 ≠ 8" in err

    code, out, _ = run("data", "inspect", answers, *MODEL[:2], "--row", "2")
    assert code == 0
    base = load_base_model("debug-tiny", device="cpu")
    record = json.loads(answers.read_text().splitlines()[1])
    shown = base.tokenizer.decode(record["prompt_ids"]), base.tokenizer.decode(
        record["response_ids"])  # fmt: skip
    assert f"{shown[0]}⟦{shown[1]}⟧" in out
    assert f"row 2: 8 of {len(record['prompt_ids']) + 8} tokens trained on" in out
    assert "3 rows: 24 of " in out
    code, out, err = run("data", "inspect", answers, *MODEL[:2], "--row", "4")
    assert (code, out) == (2, "")
    assert "row 4 cannot be shown: the source has no such row" in err


def test_data_inspect_shows_markup_as_it_is(run: Run, tmp_path: Path) -> None:
    """Square brackets are no colours, and special tokens are shown."""
    path = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "[red]q[/red]"}, {"role": "assistant", "content": "[b]a"}]
    rows = [{"messages": turns[:1]}, {"messages": turns}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = run("data", "inspect", path, *MODEL[:2], "--row", "2")
    assert code == 0
    assert (
        "<|im_start|>user\n[red]q[/red]<|im_end|>\n<|im_start|>assistant\n⟦[b]a<|im_end|>⟧" in out
    )
    assert "1 skipped, 0 truncated" in out
    code, _, err = run("data", "inspect", path, *MODEL[:2], "--row", "1")
    assert code == 2
    assert "row 1 cannot be shown: row 1 has no assistant turn" in err
    code, _, err = run("data", "inspect", path, *MODEL[:2], "--on-error", "fail")
    assert code == 1


def test_data_inspect_says_what_a_maximum_length_costs(run: Run, tmp_path: Path) -> None:
    """By source, before anything is trained: rows cut, rows lost, trained tokens lost."""
    sources = {"short.jsonl": [(3, 4), (3, 6)], "long.jsonl": [(5, 50), (80, 7), (5, 6)]}
    for name, lengths in sources.items():
        record = {"sampling": None, "finish_reason": "stop"}
        rows = [{**record, "prompt_ids": [65] * asked, "response_ids": [66] * answered}
                for asked, answered in lengths]  # fmt: skip
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = [tmp_path / name for name in sources]
    code, out, _ = run("data", "inspect", *paths, *MODEL[:2], "--max-length", "20", "--row", "2")
    assert code == 0
    assert "⟦cccccc⟧\nrow 2: 6 of 9 tokens" in out
    assert out.splitlines()[-2:] == [
        f"{paths[0]}: at 20 tokens 0 of 2 rows are cut (0 have nothing left) and 0 of 10 trained "
        "tokens lost (0.0%); the longest row has 9",
        f"{paths[1]}: at 20 tokens 2 of 3 rows are cut (1 have nothing left) and 42 of 63 trained "
        "tokens lost (66.7%); the longest row has 87",
    ]


def test_an_interrupted_data_generate_says_how_to_go_on(
    run: Run, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Scheduler, "run", interrupt)
    code, out, err = run("data", "generate", prompts, "-o", tmp_path / "a.jsonl", *MODEL)
    assert (code, out) == (130, "")
    assert "warning: stopped; " in err
    assert "the same command" in err


BAD_PROMPTS = [
    '{"messages": [{"role": "user", "content": null}]}',
    '{"messages": [{"role": "user", "content": [{"type": "image", "url": "a"}]}]}',
    "[]",
    "null",
    '{"goal": "of no format"}',
]


def test_data_generate_skips_rows_of_a_bad_shape(run: Run, tmp_path: Path) -> None:
    path, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    path.write_text("\n".join(['{"prompt": "a"}', *BAD_PROMPTS, '{"prompt": "b"}', ""]))
    arguments = ["data", "generate", str(path), "-o", str(out), "-m", "debug-tiny", "-n", "2"]
    code, _, err = run(*arguments)
    assert (code, len(out.read_text().splitlines())) == (0, 2), err
    assert "row 2 skipped: content is null, expected text" in err
    assert "row 5 skipped: it holds null" in err
    out.unlink()
    code, _, err = run(*arguments, "--on-error", "fail")
    assert (code, out.exists(), "prompts.jsonl:2: content is" in err) == (1, False, True), err


@pytest.mark.parametrize("option", ["--stop", "--choice", "--regex", "--system", "--heads", None])
def test_bytes_that_are_no_text_are_one_error(run: Run, option: str | None) -> None:
    """Python has halves of surrogate pairs for them."""
    words = ["hi", option, "a\udcff"] if option else ["a\udcff"]
    code, out, err = run("generate", *words, "-m", "debug-tiny")
    assert (code, out) == (2, "")
    assert err.splitlines()[0].startswith("error: the argument 'a\\udcff'")
    assert len(err.splitlines()) == 2


@pytest.mark.parametrize(
    "arguments",
    [["--seed", "{}"], ["--model", "{}"], ["--guesses", "{}"], ["--drafter-option", "max_match={}"],
     ["--tree", "{}"]],
    ids=lambda arguments: arguments[0],
)  # fmt: skip
def test_thousands_of_digits_are_not_printed(run: Run, arguments: list[str]) -> None:
    words = [word.format("9" * 5000) for word in arguments]
    code, out, err = run("generate", "--model", "debug-tiny", "--drafter", "suffix", *words, "hi")
    assert (code, out) == (2, "")
    assert "999" in err
    assert len(err) < 1000
