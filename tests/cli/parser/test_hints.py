"""What errors tell people to type: options and commands that there are, written as they are typed.

Hints are read in the source, each with the constants that it names, since no test meets them all.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

import medusa_kit
from medusa_kit.cli import app
from medusa_kit.cli.parser.translate import commands_with
from medusa_kit.settings.engine import all_options
from medusa_kit.settings.option import options_of
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.settings.serve import ServeConfig

PACKAGE = Path(medusa_kit.__file__).parent
CLI = typer.main.get_command(app)
OF_OTHERS = {"--no-deps", "--head", "--algorithm"}  # pip's, ray's, speculators'
OPTIONS = {**all_options(), **options_of(SamplingParams), **options_of(ServeConfig)}
WORDS = {name: one.values for name, one in OPTIONS.items() if one.values} | {
    "device": ("auto", "cpu", "cuda")
}
SOURCES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def constants(tree: ast.Module) -> dict[str, ast.expr]:
    named = (one for one in tree.body if isinstance(one, ast.Assign))
    return {one.targets[0].id: one.value for one in named if isinstance(one.targets[0], ast.Name)}


CONSTANTS = {path: constants(tree) for path, tree in SOURCES.items()}
EVERYWHERE = {name: value for known in CONSTANTS.values() for name, value in known.items()}


def texts(hint: ast.AST, known: Mapping[str, ast.expr]) -> Iterator[str]:
    """The texts of a hint, and of the constants that it names."""
    for one in ast.walk(hint):
        if isinstance(one, ast.JoinedStr):
            yield "".join(
                part.value if isinstance(part, ast.Constant) else "…" for part in one.values
            )
        elif isinstance(one, ast.Constant) and isinstance(one.value, str):
            yield one.value
        elif isinstance(one, ast.Name) and one.id.isupper():
            named = known.get(one.id, EVERYWHERE.get(one.id))
            yield from texts(named, {}) if named is not None else ()


def hints() -> Iterator[tuple[str, str]]:
    """(where, text) of each."""
    for path, tree in SOURCES.items():
        for one in ast.walk(tree):
            given: list[ast.AST] = []
            if isinstance(one, ast.Call):
                given = [key.value for key in one.keywords if key.arg == "hint"]
            elif isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
                given = [one.value] if "hint" in one.targets[0].id.lower() else []
            for hint in given:
                where = f"{path.relative_to(PACKAGE)}:{hint.lineno}"
                yield from ((where, text) for text in texts(hint, CONSTANTS[path]))


HINTS = sorted(set(hints()))


def untyped(text: str) -> list[str]:
    """Options that a text names in other words than those that are typed."""
    found = list[str]()
    for name, words in WORDS.items():
        values = "|".join(map(re.escape, words))
        found += re.findall(rf"(?<![-\w.]){name}(?: |: )['\"]?(?:{values})\b", text)
    names = "|".join({*OPTIONS, "compile"})
    left_out = re.findall(rf"\bleave out (?:the option )?(?:{names})\b(?![='])", text)
    return [*found, *left_out, *re.findall(r"\bwith force\b", text)]


def test_hints_are_found() -> None:
    assert len(HINTS) > 400
    assert any("--heads-memory" in text for _, text in HINTS)


def test_options_in_hints_are_there() -> None:
    for where, text in HINTS:
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text):
            assert option in OF_OTHERS or commands_with(option, CLI), f"{where}: {option}"


def test_commands_in_hints_are_there() -> None:
    assert isinstance(CLI, TyperGroup)
    for where, text in HINTS:
        for command in re.findall(r"(?:^|`|: )medusa-kit ([a-z][a-z-]+)", text):
            assert command in CLI.commands, f"{where}: medusa-kit {command}"


def test_options_in_hints_are_written_as_they_are_typed() -> None:
    wrong = [(where, text) for where, text in HINTS if untyped(text)]
    assert not wrong


@pytest.mark.parametrize(
    "text",
    ["use weights int8", "load them with force", "leave out weights", "or use device cpu",
     "leave out the option acceptance", "use attention auto, which", "drafter mtp"],
)  # fmt: skip
def test_what_cannot_be_typed_is_found(text: str) -> None:
    assert untyped(text)
    assert not untyped("use --weights int8, --force, --device cpu, or load(base, weights='int8')")
