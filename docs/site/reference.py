"""Pages of the reference that are made from the code: commands, keys of recipes, options of
drafters, names of the package."""

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import medusa_kit
from medusa_kit.settings import drafters, recipe
from medusa_kit.settings.schema import Section

COMMANDS = [
    sys.executable,
    "-m",
    "typer",
    "medusa_kit.cli",
    "utils",
    "docs",
    "--name",
    "medusa-kit",
]
# A field of a section, with the comment behind it; a comment may stand above it as well.
FIELD = re.compile(r"    (\w+): (.+?)(?: = (.+?))?(?:  # (.+))?")
COMMENT = re.compile(r"    # (.+)")
BOUNDS = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to",
          "exclusiveMaximum": "below"}  # fmt: skip
TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "`true`, `false`",
}
HEADER = ["| key | values | default | what |", "|---|---|---|---|"]


def write(folder: Path) -> None:
    pages = {"commands": commands(), "recipes": recipes(), "drafters": of_drafters(), "api": api()}
    folder.mkdir(exist_ok=True)
    for name, text in pages.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text() != text:  # Sphinx reads again what is newer
            path.write_text(text)


def commands() -> str:
    made = subprocess.run(COMMANDS, capture_output=True, text=True, check=True).stdout
    return made.replace("# `medusa-kit`", "# Commands", 1)


def recipes() -> str:
    whole = recipe.TrainRecipe
    lines = [
        "# Keys of a recipe",
        "",
        "What `medusa-kit train RECIPE section.key=value` takes.",
        "",
    ]
    lines += ["## At the top", "", *table(whole)]
    for name, field in whole.model_fields.items():
        for one in sections(field.annotation):
            lines += chapter(name, one)
    return "\n".join([*lines, *chapter("data.sources", recipe.SourceSection)]) + "\n"


def chapter(name: str, section: type[Section]) -> list[str]:
    """A section, and those within it."""
    lines = [
        "",
        f"## `{name}`",
        "",
        inspect.cleandoc(vars(section).get("__doc__") or ""),
        "",
        *table(section),
    ]
    for key, field in section.model_fields.items():
        for one in sections(field.annotation):
            lines += chapter(f"{name}.{key}", one)
    return lines


def of_drafters() -> str:
    lines = ["# Options of the drafters", "", "What `--drafter-option KEY=VALUE` takes, and "
             "`drafter_options` in Python and in engine files.", ""]  # fmt: skip
    for name in drafters.DRAFTERS:
        if (section := drafters.OPTIONS.get(name)) is not None and section.model_fields:
            lines += chapter(name, section)
    return "\n".join(lines) + "\n"


def api() -> str:
    lines = ["# Names of the package", ""]
    for name in medusa_kit.__all__:
        if name.startswith("_"):
            continue
        is_class = inspect.isclass(getattr(medusa_kit, name))
        directive, members = ("class", ["   :members:"]) if is_class else ("function", [])
        lines += ["```{eval-rst}", f".. auto{directive}:: medusa_kit.{name}", *members, "```", ""]
    return "\n".join(lines)


def table(section: type[Section]) -> list[str]:
    """A row for each key that is a value."""
    told, known = dict(comments(section)), section.model_json_schema()["properties"]
    rows = [
        f"| `{name}` | {values(known[name])} | {default(known[name].get('default'))} "
        f"| {told.get(name, '')} |"
        for name, field in section.model_fields.items() if not sections(field.annotation)
    ]  # fmt: skip
    return [*HEADER, *rows] if rows else []


def comments(section: type[Section]) -> Iterator[tuple[str, str]]:
    """(key, what the comments say)."""
    above: list[str] = []
    for line in inspect.getsource(section).splitlines():
        if found := COMMENT.fullmatch(line):
            above.append(found[1])
            continue
        if (found := FIELD.match(line)) and found[1] in section.model_fields:
            behind = line.partition("  # ")[2]
            yield found[1], " ".join([*above, *([behind] if behind else [])]).replace("|", "\\|")
        above = []


def values(known: Mapping[str, Any]) -> str:
    """By a JSON schema, as pydantic makes it of a field."""
    if "anyOf" in known:
        return " or ".join(values(one) for one in known["anyOf"] if one.get("type") != "null")
    if "enum" in known:
        return ", ".join(f"`{word}`" for word in known["enum"])
    if "const" in known:
        return f"`{known['const']}`"
    if known.get("type") == "array":
        return "a list"
    bounds = [f"{words} {known[name]:g}" for name, words in BOUNDS.items() if name in known]
    return " ".join(
        [TYPES.get(known.get("type", ""), "a mapping"), *[" and ".join(bounds)]]
    ).strip()


def default(value: Any) -> str:
    if value is None or value == {}:
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def sections(annotation: Any) -> list[type[Section]]:
    kinds = (annotation, *get_args(annotation))
    return [kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, Section)]
