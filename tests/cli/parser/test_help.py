"""What help shows: every option in a panel, whole at 80 columns, each default once."""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer

from medusa_kit.cli import app
from medusa_kit.cli.parser import panels

Run = Callable[..., tuple[int, str, str]]
ROOT = typer.main.get_command(app)
BORDERS = re.compile("[─│╭╮╰╯]+")


def commands(group: Any = ROOT, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, one in group.commands.items():
        yield " ".join((*path, name)), one
        yield from commands(one, (*path, name)) if hasattr(one, "commands") else ()


ALL = dict(commands())
LEAVES = {path: one for path, one in ALL.items() if not hasattr(one, "commands")}


def context(path: str) -> Any:
    found = typer.Context(ROOT, info_name="medusa-kit", help_option_names=["-h", "--help"])
    for name in path.split():
        found = typer.Context(found.command.commands[name], info_name=name, parent=found)
    return found


def options_of(path: str) -> list[Any]:
    """As the help shows them."""
    params = (ALL[path] if path else ROOT).get_params(context(path))
    return [one for one in params if one.param_type_name == "option" and not one.hidden]


def words(text: str) -> Counter[str]:
    return Counter(BORDERS.sub(" ", text).split())


def help_at(run: Run, monkeypatch: pytest.MonkeyPatch, path: str, width: int, flag: str) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, err = run(*path.split(), flag)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= width
    return out


@pytest.mark.parametrize("path", ["", *ALL])
def test_h_is_help_and_nothing_is_cut_off_at_80_columns(
    run: Run, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    narrow = help_at(run, monkeypatch, path, 80, "-h")
    wide = help_at(run, monkeypatch, path, 1000, "--help")
    assert words(narrow) == words(wide)
    assert "<bool>" not in narrow


@pytest.mark.parametrize("path", ["", *ALL])
def test_no_name_is_cut_off_in_a_narrow_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    code, narrow, _ = run(*path.split(), "-help")
    assert code == 0
    assert max(map(len, narrow.splitlines()[1:])) <= 40, "below the program's own name"
    assert "…" not in re.sub(r"\S,\S…", "", narrow), "but in kinds of values, N[,N…]"
    names = {name for one in options_of(path) for name in one.opts}
    assert names <= set(re.findall(r"-[\w-]+", narrow))


@pytest.mark.parametrize("path", LEAVES)
def test_every_option_has_its_place_in_a_panel(path: str) -> None:
    known = {name for names in panels.PANELS.values() for name in names}
    shown = options_of(path)
    assert {one.name for one in shown} <= known
    assert {one.rich_help_panel for one in shown} <= panels.PANELS.keys()
    order = [one.rich_help_panel for one in shown]
    assert [panel for panel, _ in itertools.groupby(order)] == list(dict.fromkeys(order))
    assert not any(later.required and not one.required for one, later in itertools.pairwise(shown))


def test_panels_name_an_option_once() -> None:
    listed = [name for names in panels.PANELS.values() for name in names]
    assert len(listed) == len(set(listed))
    for command, name in panels.MOVED:
        assert name in {one.name for one in options_of(command)}


def test_serve_begins_with_its_address() -> None:
    assert [one.opts[0] for one in options_of("serve")[:2]] == ["--host", "--port"]


@pytest.mark.parametrize("path", LEAVES)
def test_a_default_is_shown_once(path: str) -> None:
    for one in options_of(path):
        shown = one.get_help_record(context(path))[1]
        assert shown.count("default:") + shown.count("unless given") <= 1, shown


OURS = re.compile(
    r"guess(?!es)|\b(beside|one-node|kept out|dear|goes on)\b|unless given", re.IGNORECASE
)


@pytest.mark.parametrize("path", LEAVES)
def test_help_is_in_the_words_of_the_glossary(path: str) -> None:
    texts = [ALL[path].help, *(one.help for one in options_of(path))]
    assert [text for text in texts if OURS.search(text or "")] == []


@pytest.mark.parametrize("path", LEAVES)
def test_names_and_letters_mean_the_same_everywhere(path: str) -> None:
    for one in options_of(path):
        letters = {name for name in one.opts if not name.startswith("--")}
        assert letters == LETTERS.get(max(one.opts, key=len), set())
    assert not {"--file", "--prompt-set", "--source"} & {name for one in options_of(path)
                                                         for name in one.opts}  # fmt: skip


LETTERS = {"--model": {"-m"}, "--output": {"-o"}, "--max-new-tokens": {"-n"}, "--help": {"-h"}}


@pytest.mark.parametrize(
    ("line", "shows"),
    [("help", "Commands"), ("help chat", "medusa-kit chat"), ("data help", "inspect"),
     ("help data generate", "medusa-kit data generate"), ("data help generate", "data generate")],
)  # fmt: skip
def test_help_is_a_word_too(run: Run, line: str, shows: str) -> None:
    code, out, _ = run(*line.split())
    assert (code, "Usage: " in out, shows in out) == (0, True, True)


@pytest.mark.parametrize(
    ("line", "found"),
    [("medusa-kit tree", "tree-search"), ("medusa-kit data gen", "generate"),
     ("medusa-kit chat --max-n", "--max-new-tokens"),
     ("medusa-kit chat --ctx-size 3 --max-n", "--max-new-tokens")],
)  # fmt: skip
def test_a_shell_completes_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, found: str
) -> None:
    monkeypatch.setenv("_MEDUSA_KIT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    with pytest.raises(SystemExit) as leaving:
        ROOT.main([], prog_name="medusa-kit")
    assert (leaving.value.code, capsys.readouterr().out.split()) == (0, [found])
