"""What users of other programs type: read as ours, or answered with what to do instead."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from support.debug_model import MODEL, PLAIN, ROOT, plain_text

from medusa_kit.cli import app
from medusa_kit.cli.parser.foreign import COMMANDS, HINTS, PROMPT, SAME, kit_options_in
from medusa_kit.cli.parser.translate import Names, commands_with, translated
from medusa_kit.errors import UsageError
from medusa_kit.settings.recipe import load_recipe

Run = Callable[..., tuple[int, str, str]]
CLI: Any = typer.main.get_command(app)
GENERATE = Names("generate", {"--max-new-tokens": True, "-n": True, "--stop": True, "--model": True,
                              "--fixed-shapes": True, "--compile": False, "--prompts": True},
                 frozenset({PROMPT}))  # fmt: skip


def read(*words: str) -> Sequence[str]:
    return translated(words, GENERATE, CLI)


# The table.


@pytest.mark.parametrize("name", sorted(SAME))
def test_a_name_is_read_as_an_option_that_there_is(name: str) -> None:
    ours, _, fixed = SAME[name].partition(" ")
    assert ours == PROMPT or commands_with(ours, CLI)
    assert not commands_with(name, CLI), "it is ours already"
    assert name not in HINTS
    assert "_" not in name
    if fixed:  # a value that ours may have
        command = commands_with(ours, CLI)[0]
        (option,) = [one for one in CLI.commands[command].params if ours in one.opts]
        assert fixed in re.findall(r"\w+", option.help)


@pytest.mark.parametrize("name", sorted(HINTS))
def test_a_hint_names_options_that_there_are(name: str) -> None:
    for ours in kit_options_in([HINTS[name]]):
        assert commands_with(ours, CLI), ours
    assert "_" not in name


@pytest.mark.parametrize("line", sorted({one for one in HINTS.values() if " RECIPE " in one}))
def test_a_hint_about_recipes_changes_one(line: str) -> None:
    load_recipe(ROOT / "recipes/debug.yaml", [line.rpartition(" RECIPE ")[2]])


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_command_of_other_programs_is_answered_with_ours(run: Run, command: str) -> None:
    assert command not in CLI.commands
    assert COMMANDS[command] in {*CLI.commands, "--version"}
    code, out, err = run(command, "model")
    assert (code, out) == (2, "")
    assert f"hint: ours is medusa-kit {COMMANDS[command]}" in err


ISSUE = """
--served-model-name --max-model-len -c --ctx-size --threads -t --tensor-parallel-size --medusa-path
--speculate --kv-cache-dtype -ctk --enforce-eager --max-num-seqs --quantization --chat-template
--trust-remote-code --gpu-memory-utilization --swap-space --model-path --n-predict -p --prompt
--temp -ngl --max-tokens --speculative-config --api-key
"""


@pytest.mark.parametrize("name", ISSUE.split())
def test_the_usual_names_are_known(name: str) -> None:
    assert name in SAME or name in HINTS or commands_with(name, CLI)


# How words are read.


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("--max-tokens 8 hi", "--max-new-tokens 8 hi"),
        ("hi --max-tokens=8", "hi --max-new-tokens=8"),
        ("--n_predict 8", "--max-new-tokens 8"),
        ("--max_new_tokens=8", "--max-new-tokens=8"),
        ("--model_name_or_path a=b", "--model a=b"),
        ("--stop --max-tokens --max-tokens 3", "--stop --max-tokens --max-new-tokens 3"),
        ("--stop=--max-tokens", "--stop=--max-tokens"),
        ("--stop -c", "--stop -c"),
        ("-n8 hi", "-n8 hi"),
        ("-n=8 hi=1", "-n 8 hi=1"),
        ("--Max_Tokens=8", "--max-new-tokens=8"),
        ("--enforce-eager hi", "--fixed-shapes never hi"),
        ("-p hi -n 3", "-n 3 -- hi"),
        ("--prompt=--hi -n 3", "-n 3 -- --hi"),
        ("--prompt hi -- there", "-- there hi"),
        ("-f file --compile", "--prompts file --compile"),
        ("-- --max-tokens 8", "-- --max-tokens 8"),
        ("--nonsense 3", "--nonsense 3"),
        ("--max-tokens", "--max-new-tokens"),
        ("-1", "-1"),
        ("-", "-"),
    ],
)
def test_words_in_other_names(words: str, meant: str) -> None:
    assert list(read(*words.split())) == meant.split()


@pytest.mark.parametrize(
    "line",
    ["--max-model-len 3", "--max-model-len=3", "--max_model_len 3", "hi -c 3", "-ngl 99",
     "-ctk f16", "-c4096", "-ngl99", "--Max_Model_Len=3", "--speculative-config.method medusa",
     "--no-trust-remote-code", "--hours 2",
     "--enforce-eager=true", "--enable-torch-compile=1", "--max-num-seqs 3"],
)  # fmt: skip
def test_a_name_that_nothing_here_means_is_refused(line: str) -> None:
    with pytest.raises(UsageError, match="generate has no option -") as caught:
        read(*line.split())
    assert caught.value.hint


# As a user.


def test_the_same_answer_in_the_names_of_others(run: Run, prompts: Path) -> None:
    expected = plain_text("Name a tree.") + "\n"
    plain = ["--heads", "none", "--device", "cpu", "--temp", "0"]
    asked = ["-p", "Name a tree.", "--model_path", "debug-tiny", *plain, "--n-predict=8"]
    assert run("generate", *asked)[:2] == (0, expected)
    for flag in ("--prompts", "--file", "-f"):
        code, out, _ = run("generate", flag, prompts, *PLAIN, "--temp", "0")
        assert (code, out.startswith(expected)) == (0, True)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("chat --max-num-seqs 3", "ours is --max-rows, an option of serve"),
        ("serve --api-key secret", "--api-key-file FILE"),
        ("bench --api-key=secret", "--api-key-env"),
        ("serve --API_KEY=secret", "--api-key-file FILE"),
        ("verify --served-model-name a", "it is an option of serve"),
        ("serve --temperature=0", "it is an option of chat, generate, "),
        ("serve m --served-model-name a b", "unexpected argument 'b'"),
        ("generate hi there", "quote a text with spaces"),
        ("serve m --enforce-eager true", "a flag none"),
        ("serve --port abc", "'abc'. Input should be a valid integer"),
        ("serve --max-num-seqs=3.5", "'3.5'. Input should be"),
        ("train --nproc 0", "'0'. Input should be"),
        ("chat --prompt hi", "the argument of medusa-kit generate"),
        ("data inspect p.txt --tp 2", "a model runs on one device"),
        ("--model m chat", "medusa-kit chat --model ..."),
        ("--model-path=m chat", "medusa-kit chat --model ..."),
        ("--max-model-len 3 serve", "the context is the model's own"),
        ("data --limit 3 generate p.txt", "medusa-kit data generate --limit ..."),
        ("train r.yaml --epochs 3", "medusa-kit train RECIPE train.epochs=3"),
        ("train --quick --lr=1e-3", "train.learning_rate=1e-3"),
        ("tain", "'train'"),
        ("help tain", "'train'"),
        ("data genrate", "'generate'"),
        ("--modle", "No such option"),
    ],
)
def test_what_is_said_instead(run: Run, line: str, says: str) -> None:
    code, out, err = run(*line.split())
    assert (code, out) == (2, "")
    assert says in err
    assert "secret" not in err


# One thing, two places.


@pytest.mark.parametrize("command", ["chat", "serve", "doctor", "bench", "verify"])
def test_the_model_is_an_argument_or_an_option(run: Run, command: str) -> None:
    free = ["--port", "0"] if command == "serve" else []
    for given in (["./gone"], ["-m", "./gone"], ["--model", "./gone"], ["./gone", "-m", "./gone"]):
        code, out, err = run(command, *given, *free)
        assert (code, out) == (1, "")
        assert "no model at gone" in err
    code, out, err = run(command, "./gone", *MODEL)
    assert (code, out) == (2, "")
    assert "MODEL './gone' and --model 'debug-tiny' are the same thing and differ" in err


def test_prompts_are_an_argument_or_an_option(run: Run, prompts: Path, tmp_path: Path) -> None:
    written = []
    for number, given in enumerate(([prompts], ["--prompts", prompts], ["--file", prompts])):
        output = tmp_path / f"{number}.jsonl"
        code, *_ = run("data", "generate", *given, "-o", output, *MODEL, "-n", "4", "--temp", "0")
        assert code == 0
        written.append(output.read_text())
    assert len(set(written)) == 1
    for given, says in (
        ([], "no prompts were given"),
        (["a.txt", "--prompts", "b.txt"], "PROMPTS 'a.txt' and --prompts 'b.txt'"),
    ):
        code, _, err = run("data", "generate", *given, "-o", tmp_path / "no", *MODEL)
        assert code == 2
        assert says in err
