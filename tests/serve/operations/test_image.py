"""The Dockerfile, as far as it can be checked without Docker."""

import ast
import json
import re
from pathlib import Path

from medusa_kit.settings.option import options_of
from medusa_kit.settings.serve import ServeConfig

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "Dockerfile").read_text()
LINES = re.sub(r"\\\n\s*", " ", TEXT).splitlines()


def given(instruction: str) -> list[str]:
    return [line.removeprefix(f"{instruction} ") for line in LINES if line.startswith(instruction)]


def test_what_is_copied_is_there_and_not_ignored() -> None:
    sent = {one.removeprefix("!") for one in (ROOT / ".dockerignore").read_text().splitlines()}
    copied = {one for line in given("COPY") if "--from" not in line for one in line.split()[:-1]}
    assert copied
    for name in copied:
        assert (ROOT / name).exists()
        assert name in sent


def test_it_runs_as_an_ordinary_user() -> None:
    last_stage = LINES[max(n for n, line in enumerate(LINES) if line.startswith("FROM")) :]
    (user,) = [line.split()[1] for line in last_stage if line.startswith("USER")]
    assert int(user) > 0


def test_no_secret_is_baked_in() -> None:
    settings = " ".join(given("ARG") + given("ENV")).lower()
    assert not re.search("key|token|secret|password", settings)


def test_what_it_starts_are_options_of_the_server() -> None:
    (line,) = given("ENTRYPOINT")
    command = json.loads(line)
    assert command[:2] == ["medusa-kit", "serve"]
    names = {"--" + name.replace("_", "-") for name in options_of(ServeConfig)}
    assert {word for word in command if word.startswith("--")} <= names


def test_the_health_check_is_a_program() -> None:
    (line,) = given("HEALTHCHECK")
    command = json.loads(line.partition(" CMD ")[2])
    ast.parse(command[-1])
    assert command[-1].count("/health") == 1
