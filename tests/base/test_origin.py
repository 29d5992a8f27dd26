"""What a file was made from is compared part by part, in one place."""

import pytest

from medusa_kit.base.origin import BASE, CONFIG, HEADS, TREE, check_origin, compare
from medusa_kit.base.tokenizer.encoding_digest import ENCODING
from medusa_kit.errors import ConfigError, TreeError

WHOLE, OLD = "2:whole:output", "output"
NOW = {BASE: WHOLE, HEADS: "1:a", ENCODING: "1:ids:turns"}


@pytest.mark.parametrize(
    ("then", "other", "unknown"),
    [
        (NOW, [], []),
        ({**NOW, HEADS: "1:b"}, [HEADS], []),
        ({**NOW, BASE: "2:whole:another"}, [BASE], []),
        ({**NOW, BASE: "2q:packed:output"}, [], []),  # a quantised copy
        ({**NOW, BASE: OLD}, [], []),  # a fingerprint of version 1
        ({**NOW, ENCODING: "1:ids:others"}, [], []),  # another template: the same tokens
        ({**NOW, ENCODING: "1:others:turns"}, [ENCODING], []),
        ({BASE: WHOLE, HEADS: None}, [], [HEADS, ENCODING]),
        ({TREE: "x"}, [], [BASE, HEADS, ENCODING]),
    ],
)
def test_parts_are_compared_by_what_they_mean(
    then: dict[str, str], other: list[str], unknown: list[str]
) -> None:
    found = compare(then, NOW)
    assert (list(found.other), found.unknown) == (other, unknown)


@pytest.mark.parametrize(
    ("config", "base", "other"),
    [
        ({"rope": {"theta": 1e4, "type": "default"}, "eps": 1e-5}, WHOLE, {}),
        ({"rope": {"theta": 1e4}, "window": None}, WHOLE, {}),  # of another version of a library
        ({"eps": 9.999999747378752e-06}, WHOLE, {}),  # of a file that keeps float32
        ({"rope": {"theta": 7.0}, "eps": 1e-5}, WHOLE, {"rope": {"theta": 7.0}}),
        ({"factors": [1.100000023841858, 2]}, WHOLE, {}),
        ({"factors": [1.1, 3]}, WHOLE, {"factors": [1.1, 3]}),
        ({"factors": [1.1]}, WHOLE, {"factors": [1.1]}),
        ({"eps": 1e-6}, WHOLE, {"eps": 1e-6}),
        ({"eps": 1e-6}, "2q:packed:output", {}),  # a copy, which another file describes
    ],
)
def test_configs_differ_where_both_say_something(
    config: dict[str, object], base: str, other: dict[str, object]
) -> None:
    now = {
        BASE: WHOLE,
        CONFIG: {"rope": {"theta": 1e4, "type": "default"}, "eps": 1e-5, "factors": [1.1, 2]},
    }
    found = compare({BASE: base, CONFIG: config}, now)
    assert (found.other.get(CONFIG, ({}, {}))[0], found.unknown) == (other, [])


def test_what_is_not_known_now_is_not_compared() -> None:
    assert compare({HEADS: "1:b"}, {HEADS: None, TREE: None}).other == {}


def test_a_file_of_others_is_refused_and_one_that_does_not_say_has_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(TreeError, match=r"x.json was made with other heads .*1:b ≠ 1:a") as caught:
        check_origin("x.json", {HEADS: "1:b"}, {HEADS: "1:a"}, "do it again", TreeError)
    assert caught.value.hint == "do it again"
    with pytest.raises(ConfigError, match="another base model and other heads"):
        check_origin("x.json", {HEADS: "1:b", BASE: "x"}, {BASE: "y", HEADS: "1:a"}, "again")
    assert capsys.readouterr().err == ""
    check_origin("x.json", {}, NOW, "again")
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("x.json does not say with which base model and which heads and") == 1
