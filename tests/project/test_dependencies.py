"""What the package imports is declared, and what is declared is pinned."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OTHER_NAMES = {"yaml": "pyyaml"}  # of a distribution, by what is imported of it
PEERS = {"flashspec"}  # `bench` compares with it where somebody has installed it
UNPINNED = {"flash_attn"}  # needs a GPU to be installed


def plain(name: str) -> str:
    return name.lower().replace("-", "_")


def names_of(requirements: list[str]) -> set[str]:
    """The distributions in a list of requirements."""
    matches = [re.match(r"[\w.-]+", requirement) for requirement in requirements]
    return {plain(match[0]) for match in matches if match} - {"medusa_kit"}


def declared() -> set[str]:
    extras = PROJECT["optional-dependencies"]
    used = [extras[name] for name in extras if name != "dev"]
    return names_of(PROJECT["dependencies"]).union(*map(names_of, used))


def imports(node: ast.AST) -> Iterator[str]:
    """Packages imported in a syntax tree, but for types alone."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    if isinstance(node, ast.ImportFrom) and node.module:
        yield node.module.partition(".")[0]
    for child in ast.iter_child_nodes(node):
        yield from imports(child)


def test_what_is_imported_is_declared() -> None:
    """Where another package brings it along, it may stop doing so."""
    ours = {*sys.stdlib_module_names, "medusa_kit", *PEERS}
    found: dict[str, Any] = {}
    for path in (ROOT / "medusa_kit").rglob("*.py"):
        for name in set(imports(ast.parse(path.read_text()))) - ours:
            found.setdefault(OTHER_NAMES.get(name, plain(name)), path)
    assert found.keys() <= declared(), found


def test_what_is_declared_is_pinned() -> None:
    pinned = names_of((ROOT / "constraints.txt").read_text().splitlines())
    extras = PROJECT["optional-dependencies"].values()
    direct = names_of(PROJECT["dependencies"]).union(*map(names_of, extras))
    assert direct - UNPINNED <= pinned
