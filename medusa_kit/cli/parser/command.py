"""The classes of our commands and groups: `-h`, panels, `help`, and names from other programs."""

import functools
import inspect
import shutil
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from medusa_kit.cli.parser import panels
from medusa_kit.cli.parser.foreign import COMMANDS
from medusa_kit.cli.parser.translate import Names, before_command, translated
from medusa_kit.errors import UsageError, half_pair, without_digits
from medusa_kit.paths import expanded

HELP = {"help_option_names": ["-h", "--help"]}
NARROW = 80  # columns; with fewer, panels would cut the names of options
NAMES = 10  # columns for names in a narrow terminal; what is said of a longer one stands below it
LONGEST_SHOWN = 40  # characters of a word that is no command
ONE_VALUE = (
    "quote a text with spaces; an option takes one value, a flag none, and an option that may be "
    "repeated stands before each of its values: --stop A --stop B"
)


class _PlainWhereNarrow:
    """Help without panels in a narrow terminal."""

    rich_markup_mode: Any

    def format_help(self, ctx: Any, formatter: Any) -> None:
        mode, columns = self.rich_markup_mode, shutil.get_terminal_size().columns
        if columns < NARROW:
            self.rich_markup_mode = None
            formatter.width = columns
            formatter.write_dl = functools.partial(formatter.write_dl, col_max=NAMES)
        try:
            super().format_help(ctx, formatter)  # type: ignore[misc]
        finally:
            self.rich_markup_mode = mode


class Command(_PlainWhereNarrow, TyperCommand):
    """A command whose options stand in panels, and which knows what other programs call them."""

    allow_extra_args = True  # for `parse_args` to say what is wrong with them

    def __init__(self, *args: Any, help: str | None = None, **settings: Any) -> None:
        super().__init__(*args, help=_unwrapped(help or ""), **settings)

    def get_params(self, ctx: Any) -> list[Any]:
        return panels.arranged(self.name or "", super().get_params(ctx), ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # which is how a shell completes a half-written line
            args = ["--help"] if args == ["-help"] else args
            args = translated(args, names_of(self, ctx), ctx.find_root().command)
        try:
            remaining = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = without_digits(_with_value(error))
            raise
        if ctx.args and not ctx.resilient_parsing:
            path = ctx.command_path.removeprefix(ctx.find_root().command_path).strip()
            raise UsageError(f"{path}: unexpected argument {ctx.args[0]!r}", hint=ONE_VALUE)
        ctx.params.update({name: _with_home(value) for name, value in ctx.params.items()})
        return remaining


def _with_home(value: Any) -> Any:
    """A path with `~` written out, which a shell leaves alone in `--output=~/there`."""
    if isinstance(value, Path):
        return expanded(value)
    return [_with_home(one) for one in value] if isinstance(value, list) else value


def _refuse_bytes(args: list[str]) -> None:
    """Raises UsageError for an argument that is no text: no model reads such, and a path with it
    could not be written down in any of our files."""
    for before, word in zip(["", *args], args, strict=False):
        if half_pair(word):
            option = f" of {before}" if before.startswith("-") and not word.startswith("-") else ""
            raise UsageError(
                f"the argument {word!r}{option} has bytes that are no UTF-8; expected text",
                hint="write it in UTF-8; rename a file of such a name",
            )


def _with_value(error: typer.BadParameter) -> str:
    """The message with the value, which Typer leaves out where pydantic found it wrong."""
    problems: list[Any] = getattr(error.__cause__, "errors", list)()
    if not problems:
        return error.message
    return f"{problems[0]['input']!r}. {error.message.partition(', unable to parse')[0]}"


class Group(_PlainWhereNarrow, TyperGroup):
    """A group with `help [COMMAND]`, whose options must stand behind the command."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        for param in params:
            param.metavar = panels.shown_kind(param, ctx)
        return params

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            _refuse_bytes(args)
            args = self._read(ctx, args)
        return super().parse_args(ctx, args)

    def _read(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises UsageError for an option before the command, and a command of other programs."""
        if args[:1] == ["help"]:
            return [*args[1:], "--help"]
        if args == ["-help"]:
            return ["--help"]
        first = args[0] if args else ""
        if first in COMMANDS and first not in self.commands and ctx.parent is None:
            raise UsageError(
                f"there is no command {first!r}", hint=f"ours is medusa-kit {COMMANDS[first]}"
            )
        if len(first) > LONGEST_SHOWN and first not in self.commands and not first.startswith("-"):
            raise UsageError(
                f"there is no command {first[:LONGEST_SHOWN]!r}…, a word of {len(first):,} "
                "characters",
                hint="medusa-kit -h lists the commands",
            )
        command = next((word for word in args if word in self.commands), None)
        if command is not None:
            before_command(args, command, names_of(self, ctx))
        return args


def _unwrapped(text: str) -> str:
    """A docstring with each paragraph on one line, for a terminal of any width to break."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def names_of(command: Any, ctx: Any) -> Names:
    """A command's options as they are written, and which of them take a value."""
    params = [one for one in command.get_params(ctx) if one.param_type_name == "option"]
    takes = {name: not (one.is_flag or one.count)
             for one in params for name in (*one.opts, *one.secondary_opts)}  # fmt: skip
    arguments = [one.metavar for one in command.params if one.param_type_name == "argument"]
    root = ctx.find_root().command_path
    return Names(
        ctx.command_path.removeprefix(root).strip(),
        takes,
        frozenset(one for one in arguments if one),
    )


def app(**settings: Any) -> typer.Typer:
    """A group of commands."""
    return typer.Typer(cls=Group, context_settings=HELP, no_args_is_help=True, **settings)
