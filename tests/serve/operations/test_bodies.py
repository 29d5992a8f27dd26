"""Bodies are judged by what JSON is built of, before they are parsed."""

import asyncio
import json
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_kit.serve.operations import bodies
from medusa_kit.serve.operations.bodies import (
    SMALL,
    ShapeError,
    Turns,
    check_shape,
    outside_of_text,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a"\\[]{},:é\ud83d\n', max_size=6),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=20,
)


def counts(value: Any) -> tuple[int, int, int]:
    """(commas, pairs, lists and objects) of a value that is written without its own text."""
    if isinstance(value, list):
        parts = [counts(one) for one in value]
    elif isinstance(value, dict):
        parts = [counts(one) for one in value.values()]
    else:
        return 0, 0, 0
    pairs = len(value) if isinstance(value, dict) else 0
    own = (max(0, len(value) - 1), pairs, 1)
    return tuple(map(sum, zip(own, *parts, strict=True)))  # type: ignore[return-value]


@settings(max_examples=40, deadline=None)
@given(JSON, st.integers(1, 9))
def test_text_is_not_counted(value: Any, block: int) -> None:
    for ascii_only in (True, False):
        body = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
        outside, inside, escaped = b"", False, False
        for start in range(0, len(body), block):
            read = np.frombuffer(body[start : start + block], np.uint8)
            some, inside, escaped = outside_of_text(read, inside, escaped)
            outside += some.tobytes()
        assert not inside
        assert not escaped
        found = (
            outside.count(b","),
            outside.count(b":"),
            outside.count(b"[") + outside.count(b"{"),
        )
        assert found == counts(value)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[" + b"1," * (bodies.MAX_VALUES + 1) + b"1]", "values"),
        (b"{" + b'"a":1,' * (bodies.MAX_PAIRS + 1) + b'"a":1}', "pairs"),
        (b"[" + b"[]," * (bodies.MAX_INSIDE + 1) + b"1]", "lists and objects"),
        (b"[" * (bodies.MAX_LEVELS + 1), "nested too deeply"),
        (b'{"a":' * (bodies.MAX_LEVELS + 1), "nested too deeply"),
        (b'{"a": ' + b"1" * (bodies.MAX_DIGITS + 1) + b"}", "digits"),
        (b'{"a": 1.' + b"1" * (2 * bodies.MAX_DIGITS) + b"e5}", "digits"),
        ('{"a": [1]}'.encode("utf-16"), "UTF-8"),
        ('{"a": [1]}'.encode("utf-16-le"), "UTF-8"),
        ('{"a": [1]}'.encode("utf-32-be"), "UTF-8"),
    ],
)
def test_what_is_not_parsed(body: bytes, said: str) -> None:
    with pytest.raises(ShapeError, match=said):
        check_shape(body)


@pytest.mark.parametrize(
    "filler", [b"[", b"1,", b'{\\"a\\":', b"7", b'\\\\\\"', b"\xc3\xa9", b"\xff"]
)
def test_text_of_any_length_may_say_anything(filler: bytes) -> None:
    check_shape(b'{"a": "' + filler * 2 * bodies.MAX_VALUES + b'", "b": [1]}')


def test_a_string_that_does_not_end_is_left_to_the_parser() -> None:
    for body in (b'{"a": "' + b"[" * 10_000, b"\\" * 10_001, b'"' * 10_001 + b"[" * 300):
        check_shape(body)


def test_large_bodies_take_turns_the_smallest_first() -> None:
    order: list[int] = []
    gate, inside = threading.Event(), threading.Lock()

    def work(size: int) -> int:
        assert gate.wait(30)
        with inside:
            order.append(size)
        return size

    async def main() -> None:
        turns = Turns()
        sizes = [SMALL + 5, SMALL + 9, SMALL + 7, SMALL + 3]
        tasks = [asyncio.create_task(turns.run(size, work, size)) for size in sizes]
        cancelled = asyncio.create_task(turns.run(SMALL + 1, work, 0))
        await asyncio.sleep(0)  # all wait, but the first
        cancelled.cancel()
        assert await turns.run(SMALL, lambda: "at once") == "at once"
        gate.set()
        assert await asyncio.gather(*tasks) == sizes
        assert order == [SMALL + 5, SMALL + 3, SMALL + 7, SMALL + 9]
        with pytest.raises(ZeroDivisionError):
            await turns.run(SMALL + 1, lambda: 1 / 0)
        assert await turns.run(SMALL + 1, work, 1) == 1

    asyncio.run(main())
