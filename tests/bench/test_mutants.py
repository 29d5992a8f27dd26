"""Mutants differ from the code in one place, and are found again where it has moved."""

import ast
from pathlib import Path
from typing import Any

import pytest

from benchmarks.mutants import cpp_source, python_source
from benchmarks.mutants.__main__ import numbers_of
from benchmarks.mutants.drawing import GROUPS, Mutant, read_list
from benchmarks.mutants.placing import place
from benchmarks.mutants.running import Run, here
from medusa_kit.errors import ConfigError

SOURCE = '''
def first(values, most: int = 3) -> int:
    """Not 1 of these."""
    if not values and most < 2:
        raise ValueError(f"{most} > 1")
    values.append(max(values) + 1)
    console.note("3 or 4")
    return len(values) - most


class Holder:
    def left(self, at):
        self.sizes[at] -= 1
        return self.sizes[at] is None or (at == 0)
'''
CPP = """
int64_t first(int64_t count) {
    const int64_t half = count / 2 - 1;  // not 3 + 4
    if (half < 0 && !count) return std::min(half, count);
    state.low = half;
    return half;
}
"""


def changed(source: str, module: Any) -> set[tuple[str, str, str]]:
    return {(one.kind, one.function, one.new) for one in module.changes(source)}


def test_what_is_changed_in_python() -> None:
    assert changed(SOURCE, python_source) == {
        ("and/or", "first", "if not values or most < 2:"),
        ("not", "first", "if values and most < 2:"),
        ("comparison", "first", "if not values and most <= 2:"),
        ("constant", "first", "if not values and most < 3:"),
        ("statement", "first", "pass"),
        ("min/max", "first", "values.append(min(values) + 1)"),
        ("sign", "first", "values.append(max(values) - 1)"),
        ("constant", "first", "values.append(max(values) + 2)"),
        ("return", "first", "return 0"),
        ("sign", "first", "return len(values) + most"),
        ("statement", "Holder.left", "pass"),
        ("constant", "Holder.left", "self.sizes[at] -= 2"),
        ("return", "Holder.left", "return None"),
        ("and/or", "Holder.left", "return self.sizes[at] is None and (at == 0)"),
        ("comparison", "Holder.left", "return self.sizes[at] is not None or (at == 0)"),
        ("comparison", "Holder.left", "return self.sizes[at] is None or (at != 0)"),
        ("constant", "Holder.left", "return self.sizes[at] is None or (at == 1)"),
    }


def test_what_is_changed_in_cpp() -> None:
    assert changed(CPP, cpp_source) == {
        ("sign", "first", "const int64_t half = count / 2 + 1;  // not 3 + 4"),
        ("constant", "first", "const int64_t half = count / 3 - 1;  // not 3 + 4"),
        ("constant", "first", "const int64_t half = count / 2 - 2;  // not 3 + 4"),
        ("comparison", "first", "if (half <= 0 && !count) return std::min(half, count);"),
        ("constant", "first", "if (half < 1 && !count) return std::min(half, count);"),
        ("and/or", "first", "if (half < 0 || !count) return std::min(half, count);"),
        ("not", "first", "if (half < 0 && count) return std::min(half, count);"),
        ("min/max", "first", "if (half < 0 && !count) return std::max(half, count);"),
        ("statement", "first", ";"),
    }


def test_changes_of_our_own_files_parse_and_are_of_one_line() -> None:
    source = Path(python_source.__file__).read_text(encoding="utf-8")
    lines, found = source.splitlines(), python_source.changes(source)
    assert len({one.kind for one in found}) >= 6
    for one in found:
        text = lines[one.line - 1]
        assert text.strip() == one.old != one.new
        others = [*lines[: one.line - 1], text.replace(one.old, one.new), *lines[one.line :]]
        assert ast.dump(ast.parse("\n".join(others))) != ast.dump(ast.parse(source)), one


def mutant(**other: Any) -> Mutant:
    given = {"number": 1, "group": "g", "kind": "constant", "file": "medusa_kit/a.py",
             "function": "Holder.left", "occurrence": 0, "old": "self.sizes[at] -= 1",
             "new": "self.sizes[at] -= 2", "tests": ["tests/test_a.py"]}  # fmt: skip
    return Mutant(**{**given, **other})


def test_a_mutant_is_found_where_its_function_went(tmp_path: Path) -> None:
    moved = tmp_path / "medusa_kit" / "other" / "b.py"
    moved.parent.mkdir(parents=True)
    moved.write_text(SOURCE.replace("Holder", "Sizes"))
    placed = place(mutant(), tmp_path)
    assert placed is not None
    assert placed.path == moved
    assert placed.text == moved.read_text().replace("-= 1", "-= 2")
    assert place(mutant(function="Holder.right"), tmp_path) is None
    assert place(mutant(old="self.sizes[at] -= 3"), tmp_path) is None
    (tmp_path / "medusa_kit" / "a.py").write_text(SOURCE)
    placed = place(mutant(), tmp_path)
    assert placed is not None
    assert placed.path == tmp_path / "medusa_kit" / "a.py", "its own file comes first"


def test_the_second_of_two_alike(tmp_path: Path) -> None:
    path = tmp_path / "medusa_kit" / "a.py"
    path.parent.mkdir()
    path.write_text("def f(a):\n    a.b = 1\n    a.c()\n    a.b = 1\n")
    asked = mutant(function="f", old="a.b = 1", new="a.b = 2", occurrence=1)
    placed = place(asked, tmp_path)
    assert placed is not None
    assert (placed.line, placed.text.count("a.b = 2"), placed.text[-2]) == (4, 1, "2")


def test_tests_that_were_moved_are_found(tmp_path: Path) -> None:
    for name in ("tests/x/test_a.py", "tests/test_b.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    asked = ["tests/test_a.py", "tests/test_b.py", "tests/test_c.py"]
    assert here(tmp_path, asked) == ["tests/x/test_a.py", "tests/test_b.py"]


def test_what_becomes_of_mutants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real run of pytest on a tree of one function; what is known is not run again."""
    import subprocess

    tree = tmp_path / "tree"
    for name, text in {
        "medusa_kit/__init__.py": "",
        "medusa_kit/a.py": "def f(n):\n    return n + 1\n\n\ndef g(n):\n    return n + 1\n",
        "tests/test_a.py": "from medusa_kit.a import f\n\n\ndef test_f():\n    assert f(1) == 2\n",
    }.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    alike = {"old": "return n + 1", "new": "return n - 1"}
    tests = ["tests/test_a.py", "tests/test_gone.py"]
    asked = [mutant(number=n, function=name, tests=tests, **alike) for n, name in enumerate("fgh")]
    output = tmp_path / "results.json"
    run = Run(tree, output)
    run.of(asked)
    states = [run.found[str(n)]["state"] for n in range(3)]
    assert states == ["killed", "survived", "not found"]
    assert capsys.readouterr().err.count("without tests/test_gone.py") == 1
    assert "+ 1" in (tree / "medusa_kit" / "a.py").read_text(), "the tree is not touched"
    again = Run(tree, output)
    again.unchanged = {"g": -1e9}  # a test that ran would be a hang at once
    again.of(asked)
    assert again.found == run.found


def test_the_list_is_of_one_hundred() -> None:
    listed = read_list()
    assert [one.number for one in listed] == list(range(1, 101))
    assert len({(one.file, one.function, one.occurrence, one.old) for one in listed}) == 100
    assert {one.group for one in listed} == set(GROUPS)


def test_ranges_of_numbers() -> None:
    assert numbers_of("1-3,7") == {1, 2, 3, 7}
    with pytest.raises(ConfigError, match="'1-x'"):
        numbers_of("1-x")
