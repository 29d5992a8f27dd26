"""Grammars on the command line."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.debug_model import MODEL, PLAIN

Run = Callable[..., tuple[int, str, str]]
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"],
          "additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}  # fmt: skip


def test_answers_follow_what_is_given(run: Run, tmp_path: Path) -> None:
    schema, rules = tmp_path / "schema.json", tmp_path / "rules.lark"
    schema.write_text(json.dumps(SCHEMA))
    rules.write_text('start: "x" start "y" | "z"')
    code, out, err = run("generate", "hi", *PLAIN[:-1], "20", "--json-schema", schema)
    assert code == 0, err
    assert json.loads(out) in ({"n": 1}, {"n": 22})
    assert re.fullmatch(r"x*(zy*)?\n", run("generate", "hi", *PLAIN, "--lark", rules)[1])
    assert re.fullmatch(r"[ab]{3}\n", run("generate", "hi", *PLAIN, "--regex", "[ab]{3}")[1])
    choices = ["--choice", "yes", "--choice", "no"]
    assert run("generate", "hi", *PLAIN, *choices)[1] in ("yes\n", "no\n")


def test_a_file_may_begin_with_a_mark_of_its_encoding(run: Run, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"const": 1}', encoding="utf-8-sig")
    assert run("generate", "hi", *PLAIN, "--json-schema", schema)[:2] == (0, "1\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--regex", "(a"], "the regular expression cannot be used"),
        (["--regex", "a", "--choice", "b"], "--regex and --choice contradict each other"),
        (["--json-schema", "none.json"], "none.json cannot be read"),
        (["--json-schema", "bad.json"], "the JSON schema is not JSON"),
        (
            ["--json-schema", "odd.json"],
            'schema: the JSON schema cannot be used: Unimplemented keys: ["not"]',
        ),
        (
            ["--json-schema", "big.json"],
            "schema.properties.n: the JSON schema cannot be used: "
            "9007199254740993 cannot be followed exactly",
        ),
        (
            ["--json-schema", "endless.json"],
            "schema.items: the JSON schema cannot be used: '#' leads back to itself",
        ),
    ],
)
def test_what_is_wrong_is_said_before_a_model_loads(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text("{")
    Path("odd.json").write_text('{"not": {}}')
    Path("big.json").write_text(json.dumps({"properties": {"n": {"const": 2**53 + 1}}}))
    Path("endless.json").write_text('{"type": "array", "items": {"$ref": "#"}, "minItems": 1}')
    monkeypatch.setattr("medusa_kit.load", None)
    code, out, err = run("generate", "hi", *PLAIN, *words)
    assert (code, out) == (2, "")
    assert said in err


@pytest.mark.parametrize(
    ("pattern", "said"),
    [("[a-z", "'[a-z': unclosed character class at character 1"),
     ("a(b", "'a(b': unclosed group at character 2")],
)  # fmt: skip
def test_a_wrong_pattern_is_one_line(run: Run, pattern: str, said: str) -> None:
    code, _, err = run("generate", "a", *MODEL, "--regex", pattern)
    assert code == 2
    assert f"error: the regular expression cannot be used: {said}\n" in err
