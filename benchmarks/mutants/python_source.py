"""Where a Python file can be changed: one place of one line, inside a function.

Left out are docstrings, messages, annotations, logs and what raises, whose change no test of
behaviour should see.
"""

import ast
from collections.abc import Iterator
from typing import NamedTuple

FLIPPED: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
}  # fmt: skip
EXTREMES = {"min": "max", "max": "min"}
DEFAULTS = {"bool": "False", "int": "0", "float": "0.0", "str": '""'}
LOGS = {"note", "warn", "print", "debug", "info", "warning", "note_once"}
SHOWN = {"__repr__", "__str__", "describe"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Change(NamedTuple):
    """`kind`, and the line's text before and after; `line` counts from 1."""

    kind: str
    function: str  # its qualified name
    line: int
    old: str
    new: str


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """The functions and methods of a module, with qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield prefix + node.name, node
        if isinstance(node, Function | ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")


def changes(source: str) -> list[Change]:
    lines = source.splitlines()
    found = []
    for name, function in functions(ast.parse(source)):
        if function.name in SHOWN:
            continue
        for node in _code(function):
            for kind, old, start, end, new in _places(node, function, lines):
                if old == end[0] == start[0]:
                    text = lines[old - 1]
                    after = _cut(text, start[1], end[1], new)
                    found.append(Change(kind, name, old, text.strip(), after.strip()))
    return found


def _cut(text: str, start: int, end: int, new: str) -> str:
    """Columns of `ast` count bytes."""
    raw = text.encode()
    return (raw[:start] + new.encode() + raw[end:]).decode()


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """What runs, but for inner functions, which have names of their own."""
    body = node.body if isinstance(node, Function) else ast.iter_child_nodes(node)
    for one in body:
        if isinstance(one, Function | ast.ClassDef | ast.Raise | ast.JoinedStr | ast.Assert):
            continue
        if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant):
            continue
        if isinstance(one, ast.Call) and _name(one.func) in LOGS:
            continue
        if isinstance(one, ast.AnnAssign):
            if one.value is not None:
                yield from (one.value, *_code(one.value))
            continue
        yield one
        yield from _code(one)


def _name(function: ast.expr) -> str:
    return getattr(function, "id", getattr(function, "attr", ""))


Place = tuple[str, int, tuple[int, int], tuple[int, int], str]


def _places(node: ast.AST, function: Function, lines: list[str]) -> Iterator[Place]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        old, new = FLIPPED[type(node.ops[0])]
        yield from _between("comparison", node.left, node.comparators[0], old, new, lines)
    elif isinstance(node, ast.BinOp) and not _text(node.left) and not _text(node.right):
        signs = {ast.Add: ("+", "-"), ast.Sub: ("-", "+")}
        if type(node.op) in signs:
            old, new = signs[type(node.op)]
            yield from _between("sign", node.left, node.right, old, new, lines)
    elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        yield from _between("and/or", *node.values, old, new, lines)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        line, at = node.lineno, node.col_offset
        yield "not", line, (line, at), (line, at + len("not ")), ""
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield _whole("constant", node, str(node.value + 1))
    elif isinstance(node, ast.Call) and _name(node.func) in EXTREMES:
        name, end = node.func, (node.func.end_lineno or 0, node.func.end_col_offset or 0)
        start = (end[0], end[1] - len(_name(name)))
        yield "min/max", end[0], start, end, EXTREMES[_name(name)]
    elif isinstance(node, ast.Return) and node.value is not None:
        returns = ast.unparse(function.returns) if function.returns else "None"
        default = DEFAULTS.get(returns, "None")
        if ast.unparse(node.value) != default:
            yield _whole("return", node, f"return {default}")
    elif isinstance(node, ast.Expr | ast.AugAssign) or (
        isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript)
    ):
        value = node.value
        if not isinstance(value, ast.Yield | ast.Await) and not (
            isinstance(value, ast.Call) and _name(value.func) in LOGS
        ):
            yield _whole("statement", node, "pass")


def _whole(kind: str, node: ast.expr | ast.stmt, new: str) -> Place:
    start, end = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
    return kind, node.lineno, start, end, new


def _between(
    kind: str, left: ast.expr, right: ast.expr, old: str, new: str, lines: list[str]
) -> Iterator[Place]:
    """The operator, where both operands end and begin in its line."""
    line, first = left.end_lineno or 0, left.end_col_offset or 0
    if line == right.lineno:
        between = lines[line - 1].encode()[first : right.col_offset].decode()
        at = first + between.index(old)
        yield kind, line, (line, at), (line, at + len(old)), new


def _text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr | ast.List | ast.ListComp | ast.Tuple) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
