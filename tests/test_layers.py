"""The house rules that a reader relies on: one-way imports, lazy CLI."""

import ast
import re
import subprocess
import sys
from collections.abc import Collection
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "medusa_kit"
MODULES = sorted(PACKAGE.rglob("*.py"))

# A module may import from its own package and from lower tiers; packages of one tier never import
# each other.
TIERS = [
    {
        "background",
        "errors",
        "console",
        "ctrl_c",
        "equal_rows",
        "files",
        "garbage",
        "locks",
        "no_gradients",
        "outputs",
        "paths",
        "process_lock",
        "stdout",
        "store",
        "transfer",
        "usual_device",
        "version",
    },
    {"settings"},
    {"tree"},
    {"base"},
    {"heads", "data"},
    {"train", "infer"},
    {"drafters"},
    {"engine"},
    {"distill", "tuning"},
    {"bench", "serve"},
    {"quick", "hub"},
    {"demo"},
    {"cli", "__main__"},
]
SIBLINGS_ALLOWED = {("process_lock", "console"), ("process_lock", "errors"),
                    ("process_lock", "files"), ("console", "errors"), ("files", "errors"),
                    ("outputs", "errors"), ("outputs", "files"), ("paths", "errors"),
                    ("store", "paths"),
                    ("store", "console"),
                    ("store", "files"), ("__main__", "cli")}  # fmt: skip
HEAVY = ("torch", "transformers", "numpy", "matplotlib", "fastapi", "starlette", "uvicorn", "httpx",
         "openai", "llguidance", "prometheus_client", "huggingface_hub", "ray")  # fmt: skip


def part_of(path: Path) -> str:
    """The name of the top-level module or package a file belongs to."""
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def tier_of(part: str) -> int:
    return next(index for index, tier in enumerate(TIERS) if part in tier)


@cache
def imports_in(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """The imports in a file, inside functions and under TYPE_CHECKING too."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def imported_parts(path: Path) -> set[str]:
    """Top-level parts of medusa_kit that a file imports."""
    found = set()
    for node in imports_in(path):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "medusa_kit" and len(parts) > 1:
                found.add(parts[1])
    return found - {"__version__"}


def test_imports_run_one_way() -> None:
    wrong = []
    for path in MODULES:
        own = part_of(path)
        if own == "__init__":  # the package's lazy public names
            continue
        for other in imported_parts(path) - {own}:
            allowed = (own, other) in SIBLINGS_ALLOWED or tier_of(other) < tier_of(own)
            if not allowed:
                wrong.append(f"{path.relative_to(PACKAGE)} must not import {other}")
    assert not wrong


def test_no_module_imports_itself_in_a_circle() -> None:
    """Under TYPE_CHECKING neither, nor inside functions."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in MODULES}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    del names["medusa_kit"]  # its public names load when they are used
    imports = {name: _absolute_imports(path, names) & set(names) for name, path in names.items()}
    while leaves := {name for name, used in imports.items() if not used & set(imports)}:
        for name in leaves:
            del imports[name]
    assert not imports, f"these import each other: {sorted(imports)}"


def test_tree_needs_no_torch() -> None:
    for path in (PACKAGE / "tree").glob("*.py"):
        text = path.read_text()
        assert "import torch" not in text, path
        assert "transformers" not in {n.split(".")[0] for n in _absolute_imports(path)}, path


def _absolute_imports(path: Path, modules: Collection[str] = ()) -> set[str]:
    """What a file imports; `from a import b` is a.b where that is one of `modules`, else a."""
    names = set()
    for node in imports_in(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = (f"{node.module}.{alias.name}" for alias in node.names)
            names |= {name if name in modules else node.module for name in full}
    return names


def test_deepspeed_lives_in_one_file() -> None:
    users = [p for p in MODULES if any(n.startswith("deepspeed") for n in _absolute_imports(p))]
    assert [str(p.relative_to(PACKAGE)) for p in users] == ["train/deepspeed_setup.py"]


@pytest.mark.parametrize("command", [[], ["serve"]], ids=["all", "serve"])
def test_help_loads_no_heavy_library(command: list[str]) -> None:
    """What makes --help slow is torch and transformers; neither may load for it, nor the server.
    The options of a command are checked by pydantic, which typer loads for them."""
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from medusa_kit.cli import app\n"
        f"result = CliRunner().invoke(app, {[*command, '--help']})\n"
        "assert result.exit_code == 0, result.output\n"
        f"assert {'max-rows' if command else 'tree-search'!r} in result.output\n"
        f"heavy = {set(HEAVY if command else [*HEAVY, 'pydantic'])} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_tests_leave_the_time_of_other_threads_alone() -> None:
    """`support.clocks` gives a module a clock of its own."""
    own = ROOT / "tests/support/clocks.py"
    changes = re.compile(r'setattr\(\s*(?:(?:\w+\.)*time\s*,|f?"(?:\w+\.)*time\.\w+")')
    found = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")
             if path != own and changes.search(path.read_text())}  # fmt: skip
    assert not found
