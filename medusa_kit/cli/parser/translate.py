"""Arguments in the names of other programs, read as ours or answered with what to do instead."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from medusa_kit.cli.parser.foreign import HINTS, INSTEAD, PROMPT, SAME
from medusa_kit.errors import UsageError


@dataclass(frozen=True)
class Names:
    """What a command knows: `takes` says of each option whether it takes a value."""

    command: str
    takes: Mapping[str, bool]
    arguments: frozenset[str] = frozenset()


def translated(args: Sequence[str], names: Names, root: Any) -> list[str]:
    """`args` in our names. Values of our options are left alone, whatever they look like.

    Raises UsageError for a name of other programs that nothing here means. `root`: the group whose
    commands are searched for an option that this one lacks.
    """
    result: list[str] = []
    arguments: list[str] = []
    words = iter(args)
    for word in words:
        if word == "--":
            return [*result, word, *words, *arguments]
        name, equals, value = word.partition("=")
        name = _dashed(name) if name.startswith("--") else name
        if name in names.takes:
            result += _written(name, equals, value)
            if names.takes[name] and not equals:
                result += _next(words)
        elif not name.startswith("-") or (name := _foreign(name)) not in SAME.keys() | HINTS.keys():
            _check_not_elsewhere(name, names, root)
            result.append(word)
        elif _is_argument(name, names):
            arguments += [value] if equals else _next(words)
        else:
            result += _translated_option(name, equals + value, names, root)
    return [*result, "--", *arguments] if arguments else result


def before_command(args: Sequence[str], command: str, names: Names) -> None:
    """Raises UsageError for an option before the command that it belongs to."""
    for word in args[: args.index(command)]:
        name = word.partition("=")[0]
        name = _dashed(name) if name.startswith("--") else name
        if word.startswith("-") and name not in names.takes:
            kit_name = SAME.get(name, name)
            path = " ".join(["medusa-kit", *names.command.split(), command])
            hint = HINTS.get(name) or f"options stand behind it: {path} {kit_name} ..."
            raise UsageError(f"{name} stands before the command", hint=hint)


def commands_with(option: str, root: Any) -> list[str]:
    """The commands below `root` that have this option, `data generate` among them."""
    commands = []
    for name, command in getattr(root, "commands", {}).items():
        commands += [f"{name} {inner}" for inner in commands_with(option, command)]
        if any(option in (*param.opts, *param.secondary_opts) for param in command.params):
            commands.append(name)
    return commands


def _check_not_elsewhere(name: str, names: Names, root: Any) -> None:
    """Raises UsageError for an option that only other commands have."""
    if name.startswith("--") and (others := commands_with(name, root)):
        raise UsageError(
            f"{names.command} has no option {name}",
            hint=INSTEAD.get((names.command, name)) or f"it is an option of {', '.join(others)}",
        )


def _written(name: str, equals: str, value: str) -> list[str]:
    """An option as it is parsed: in `-n=3` the sign would be part of the value."""
    is_short = equals and not name.startswith("--")
    return [name, value] if is_short else [name + equals + value]


def _foreign(name: str) -> str:
    """The name in the tables: `--no-X` for X, `--X.key` for X, and `-c4096` for `-c`."""
    if name in SAME or name in HINTS:
        return name
    for known in (
        name.partition(".")[0],
        name.replace("--no-", "--", 1),
        name if name.startswith("--") else name.rstrip("0123456789."),
    ):
        if known in HINTS:
            return known
    return name


def _is_argument(name: str, names: Names) -> bool:
    return SAME.get(name) == PROMPT and PROMPT in names.arguments


def _translated_option(name: str, value: str, names: Names, root: Any) -> list[str]:
    """The words to put in place of `name`; `value` begins with "=" where there is one."""
    kit_name, _, fixed = SAME.get(name, "").partition(" ")
    known = kit_name in names.takes
    if known and not fixed and (names.takes[kit_name] or not value):
        return [kit_name + value]
    if known and not value:
        return [kit_name, fixed]
    raise UsageError(
        f"{names.command} has no option {name}",
        hint=INSTEAD.get((names.command, kit_name)) or _hint(name, kit_name, known, root),
    )


def _hint(name: str, kit_name: str, known: bool, root: Any) -> str:
    if name in HINTS:
        return HINTS[name]
    if kit_name == PROMPT:
        return "a prompt is the argument of medusa-kit generate"
    if known:
        return f"ours is {SAME[name]}"
    return f"ours is {SAME[name]}, an option of {', '.join(commands_with(kit_name, root))}"


def _next(words: Iterator[str]) -> list[str]:
    """The next word, if there is one."""
    return [word for word in [next(words, None)] if word is not None]


def _dashed(name: str) -> str:
    """A long name as all of ours are written."""
    return name.replace("_", "-").lower()
