"""Where a C++ file can be changed, found line by line.

Our sources are formatted, with spaces around operators and none in a template's brackets.
"""

import re
from collections.abc import Iterator

from benchmarks.mutants.python_source import Change

OPERATORS = {
    "comparison": {" < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " == ": " != ",
                   " != ": " == "},
    "sign": {" + ": " - ", " - ": " + ", " += ": " -= "},
    "and/or": {" && ": " || ", " || ": " && "},
    "min/max": {"std::min": "std::max", "std::max": "std::min"},
}  # fmt: skip
CONSTANT = re.compile(r"(?<![\w.<\"])\d+(?![\w.>\"])")
NOT = re.compile(r"!(?=[\w(])")
STATEMENT = re.compile(r"[\w.\->\[\], ()+*]+( [-+*|]?= .*|\(.*\));")
DECLARATION = re.compile(r"(return|const|auto|int|float|delete)\b|[\w:<>,*&]+ [\w*&]+[ (=]")
# Of another processor than avx2's; or what changes speed alone.
ELSEWHERE = re.compile(r"AVX512|AVXVNNI|VNNI|NEON|aarch64|__ARM|MK_PLAIN|MSC_VER")
NO_CODE = re.compile(r"^\s*(//|#|using |template|static_assert|struct |class |enum |constexpr |\})")
SPEED_ALONE = re.compile(r"prefetch|reserve\(|alignas|BETWEEN_STEPS|yield\(|pause")
FUNCTION = re.compile(r"^(    )?(?! )(?:template <[^>]*> )?[\w:<>,*& ]*?\b(\w+)\([^;]*$")
WORDS = {"if", "for", "while", "switch", "return", "else"}


def changes(source: str) -> list[Change]:
    found = []
    for number, function, text in _code(source):
        for kind, before, after in _edits(text):
            found.append(Change(kind, function, number, before.strip(), after.strip()))
    return found


def _code(source: str) -> Iterator[tuple[int, str, str]]:
    """(line from 1, function, text without its comment) of lines that avx2 compiles."""
    function, compiled = "", [True]
    for number, line in enumerate(source.splitlines(), start=1):
        if line.startswith("#if"):
            compiled.append("ifndef" in line or not ELSEWHERE.search(line))
        elif line.startswith(("#else", "#elif")):
            compiled[-1] = not compiled[-1] and not ELSEWHERE.search(line)
        elif line.startswith("#endif"):
            compiled.pop()
        named = FUNCTION.match(line)
        if named and "{" in line and named[2] not in WORDS:
            function = named[2]
        if function and all(compiled) and not NO_CODE.match(line):
            yield number, function, line


def _edits(line: str) -> Iterator[tuple[str, str, str]]:
    code = line.partition("//")[0]
    if SPEED_ALONE.search(code):
        return
    for kind, pairs in OPERATORS.items():
        for old, new in pairs.items():
            for at in re.finditer(re.escape(old), code):
                yield kind, line, line[: at.start()] + new + line[at.end() :]
    for at in CONSTANT.finditer(code):
        yield "constant", line, line[: at.start()] + str(int(at[0]) + 1) + line[at.end() :]
    for at in NOT.finditer(code):
        yield "not", line, line[: at.start()] + line[at.end() :]
    text = code.strip()
    if STATEMENT.fullmatch(text) and not DECLARATION.match(text):
        yield "statement", line, line.replace(text, ";")
