"""Values in messages: on one line, recognisable, and marked where they are cut."""

from typing import Any

import numpy as np
import pytest

from medusa_kit.engine.given import check_prompt, stop_strings
from medusa_kit.errors import ConfigError, check_count, unknown_value
from medusa_kit.settings.engine import check_value
from medusa_kit.shown import shown, shown_json

LONG = "word " * 100
BEGINNING = repr(LONG[:100])


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("a", "'a'"),
        ("x" * 100, repr("x" * 100)),
        (LONG, f"{BEGINNING}…"),
        (LONG.encode(), f"b{BEGINNING}…"),
        ({"role": "user", "content": LONG}, f"{{'role': 'user', 'content': {BEGINNING}…}}"),
        (list(range(9)), "[0, 1, 2, 3, 4, 5, 6, 7, …]"),
        ({n: n for n in range(9)}, f"{{{', '.join(f'{n}: {n}' for n in range(8))}, …}}"),
        ([[[[1]]]], "[[[[…]]]]"),
        ({1: {2: {3: {4: 5}}}}, "{1: {2: {3: {…}}}}"),
        (10**5000, "an integer of too many digits"),
        (Broken(), "<Broken>"),
        (np.zeros((2, 2)), "array([[0., 0.], [0., 0.]])"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_is_recognised(value: Any, said: str) -> None:
    assert shown(value) == said


def test_who_sent_json_sees_its_words() -> None:
    value = {"a": [True, False, None], "b": "true"}
    assert shown(value) == "{'a': [True, False, None], 'b': 'true'}"
    assert shown_json(value) == "{'a': [true, false, null], 'b': 'true'}"


def test_messages_cut_values_behind_their_quotes() -> None:
    """The … is no part of a text, and what is cut ends where it says so."""
    for refused in (
        lambda: check_prompt(LONG.encode()),
        lambda: check_prompt([LONG]),
        lambda: stop_strings([LONG.encode()]),
        lambda: check_value("force", LONG),
        lambda: check_value("drafter_options", LONG),
        lambda: check_value("weights", LONG),
        lambda: check_count("n", LONG),
    ):
        with pytest.raises(ConfigError, match="word '…") as caught:
            refused()
        assert "..." not in caught.value.message
        assert len(caught.value.message) < 400
    assert f"{BEGINNING}…" in unknown_value("a", LONG, ["b"]).message
