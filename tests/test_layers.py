"""The house rules that a reader relies on: one-way imports, lazy CLI."""

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
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
        "installing",
        "locks",
        "loops",
        "no_gradients",
        "one_thread",
        "outputs",
        "paths",
        "process_lock",
        "shown",
        "stdout",
        "tables",
        "store",
        "together",
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
                    ("console", "tables"),
                    ("errors", "shown"), ("files", "shown"),
                    ("outputs", "errors"), ("outputs", "files"), ("paths", "errors"),
                    ("together", "files"), ("together", "errors"),
                    ("store", "paths"),
                    ("store", "console"),
                    ("store", "locks"),
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
    found = _in_circles(_imports_of_modules())
    assert not found, f"these import each other: {found}"


def test_folders_import_one_way() -> None:
    """The modules of a folder as one, without those of its sub-folders, at every depth."""
    graph = _imports_of_folders()
    del graph["medusa_kit"]  # its modules have tiers of their own
    found = _in_circles(graph)
    assert not found, f"these folders import each other: {found}"


def test_the_page_has_the_order_of_folders() -> None:
    """Every folder that has folders beside it, each behind all that it imports."""
    graph, wrong = _imports_of_folders(), list[str]()
    page = (ROOT / "docs/ARCHITECTURE.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z_/]+)/` \| (`.* < .*`) \|$", page, re.M))
    for top, order in rows.items():
        parent = f"medusa_kit.{top.replace('/', '.')}"
        own = parent.rpartition(".")[2]
        steps = [step.split(", ") for step in order.replace("`", "").split(" < ")]
        height = {parent if name == own else f"{parent}.{name}": at
                  for at, step in enumerate(steps) for name in step}  # fmt: skip
        known = {name for name in graph if name == parent or name.rpartition(".")[0] == parent}
        wrong += [f"{top}: {name} is not there" for name in height.keys() ^ known]
        wrong += [f"{name} imports {other}" for name in known & height.keys()
                  for other in graph[name] & height.keys()
                  if height[other] >= height[name]]  # fmt: skip
    parents = {name.rpartition(".")[0] for name, used in graph.items() if used}
    assert {f"medusa_kit.{top.replace('/', '.')}" for top in rows} >= parents - {"", "medusa_kit"}
    assert not wrong


def test_what_lies_in_a_folder_imports_one_way() -> None:
    """Modules and sub-folders side by side, a sub-folder with all that is in it."""
    graph = dict[str, set[str]]()
    for name, used in _imports_of_modules().items():
        for other in used:
            own, theirs = name.split("."), other.split(".")
            pairs = enumerate(zip(own, theirs, strict=False))
            at = next((at for at, (one, two) in pairs if one != two), None)
            if at is not None:  # else one is the package that the other is in
                graph.setdefault(".".join(own[: at + 1]), set()).add(".".join(theirs[: at + 1]))
    found = _in_circles(graph)
    assert not found, f"these import each other: {found}"


def _imports_of_modules() -> dict[str, set[str]]:
    """The modules of the package that each of them imports."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in MODULES}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    del names["medusa_kit"]  # its public names load when they are used
    return {name: _absolute_imports(path, names) & set(names) for name, path in names.items()}


def _imports_of_folders() -> dict[str, set[str]]:
    """The folders that each of them imports, by modules of its own."""
    graph = dict[str, set[str]]()
    for name, used in _imports_of_modules().items():
        folder, others = _folder(name), {_folder(other) for other in used}
        graph[folder] = graph.get(folder, set()) | others - {folder}
    return graph


def _folder(module: str) -> str:
    """The folder that a module's file is in, with dots."""
    package = (ROOT / module.replace(".", "/")).is_dir()
    return module if package else module.rpartition(".")[0]


def _in_circles(imports: Mapping[str, set[str]]) -> list[str]:
    """Those that import themselves by way of others."""
    remaining = dict(imports)
    for _ in range(len(imports)):
        targets = set().union(*remaining.values())
        remaining = {
            name: used for name, used in remaining.items()
            if name in targets and used & remaining.keys()
        }  # fmt: skip
    return sorted(remaining)


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
    assert [str(p.relative_to(PACKAGE)) for p in users] == ["train/processes/deepspeed_setup.py"]


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
