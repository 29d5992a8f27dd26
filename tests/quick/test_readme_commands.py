"""Every command of README is run: on a tiny model where MODEL stands, with the same options.

What nothing here knows how to run fails, so a new kind of command needs a runner.
"""

import io
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import pytest
from support.debug_model import ROOT

from medusa_kit import cli, console
from medusa_kit.settings.engine import FETCHED_NAMES

README = (ROOT / "README.md").read_text()
SHELL = re.findall(r"^```sh\n(.*?)^```", README, re.M | re.S)
PYTHON = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
PROMPTS = re.findall(r"^```json\n(.*?)^```", README, re.M | re.S)
COMMANDS = [
    command.strip()
    for line in "".join(SHELL).splitlines()
    for command in re.sub(r"\s+#.*", "", line).split("&&")
    if command.strip()
]
Runner = Callable[[Sequence[str]], None]


@pytest.fixture
def cli_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    monkeypatch.setattr(console.out, "width", 160)

    def call(arguments: Sequence[str]) -> None:
        monkeypatch.setattr(sys, "argv", ["medusa-kit", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        assert code == 0, capsys.readouterr().err

    return call


def serving(cli_run: Runner) -> Runner:
    """`serve` on a free port, until it answers and is told to end."""

    def call(arguments: Sequence[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pages: list[str] = []

        def ask() -> None:
            while not over.wait(0.05):
                try:
                    pages.append(httpx.get(f"http://127.0.0.1:{port}/").text)
                except httpx.TransportError:
                    continue
                os.kill(os.getpid(), signal.SIGTERM)
                return

        over, asking = threading.Event(), threading.Thread(target=ask)
        asking.start()
        try:
            cli_run([*arguments, "--port", str(port)])
        finally:
            over.set()
            asking.join()
        assert pages, "the page was not served"
        assert "<html" in pages[0]

    return call


def chatting(cli_run: Runner, monkeypatch: pytest.MonkeyPatch) -> Runner:
    def call(arguments: Sequence[str]) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hello!\n/quit\n"))
        cli_run(arguments)

    return call


def installing(arguments: Sequence[str]) -> None:
    """Not run, as that takes the network: the extras exist."""
    assert list(arguments[:2]) == ["install", "-e"]
    extras = re.fullmatch(r"\.\[(.+)\]", arguments[2])
    assert extras
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras[1].split(",")) <= set(known)


def making(arguments: Sequence[str]) -> None:
    """Not run, as each takes minutes (CI runs `install` and `test`): the target can be made."""
    asked = ["make", "--dry-run", *arguments]
    subprocess.run(asked, cwd=ROOT, check=True, capture_output=True)


def runner_of(command: str, cli_run: Runner, monkeypatch: pytest.MonkeyPatch) -> Runner | None:
    first, *rest = shlex.split(command)
    kinds: dict[str, Runner] = {"make": making, "pip": installing}
    if first != "medusa-kit":
        return kinds.get(first)
    if rest[0] == "doctor":  # the same without a GPU
        return lambda arguments: cli_run([*arguments, "--dry-run"])
    by_name = {"serve": serving(cli_run), "chat": chatting(cli_run, monkeypatch)}
    plain = ("train", "verify", "generate", "convert")
    return by_name.get(rest[0], cli_run if rest[0] in plain else None)


def on_a_tiny_model(command: str) -> list[str]:
    """The command's words after the first; `serve` and `chat` of the embedded model as they are. No
    test depends on a model that `make model` fetches."""
    others = ("MODEL", *FETCHED_NAMES)
    return ["debug-tiny" if word in others else word for word in shlex.split(command)[1:]]


SET_UP = {
    "git clone URL medusa-kit",
    "cd medusa-kit",
    ". .venv/bin/activate",
}  # what CI begins with


@pytest.mark.slow
@pytest.mark.embedded
def test_every_command_runs_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli_run: Runner
) -> None:
    assert len(COMMANDS) > 10
    monkeypatch.chdir(tmp_path)
    shown = "".join(PROMPTS)
    more = "".join(f'{{"prompt": "Count from {n} to {n * n}."}}\n' for n in range(30))
    Path("prompts.jsonl").write_text(shown + more)
    done = set(SET_UP)
    for command in COMMANDS:
        if command in done:
            continue
        run = runner_of(command, cli_run, monkeypatch)
        assert run is not None, f"README has a command that nothing runs: {command}"
        run(on_a_tiny_model(command))
        done.add(command)


def test_a_command_that_nothing_runs_is_found(
    monkeypatch: pytest.MonkeyPatch, cli_run: Runner
) -> None:
    for command in ("medusa-kit push heads ORG/NAME", "docker build .", "medusa-kit"):
        words = command if command != "medusa-kit" else "medusa-kit nothing"
        assert runner_of(words, cli_run, monkeypatch) is None
    with pytest.raises(AssertionError):
        installing(["install", "-e", ".[no-such-extra]"])
    with pytest.raises(subprocess.CalledProcessError):
        making(["no-such-target"])


def test_what_stands_in_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = PYTHON
    assert '"smollm2-135m-instruct"' in code
    exec(code.replace("smollm2-135m-instruct", "debug-tiny"), {})
    assert capsys.readouterr().out


def test_no_figure_stands_twice() -> None:
    """Of ratios; and the package's description, which is read where there is no date, has none."""
    ratios = re.findall(r"\d+\.\d+(?= ×)", README)
    assert len(ratios) > 4
    assert len(ratios) == len(set(ratios))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not re.search(r"\b\d", project["description"])
