"""Server-sent events as clients take them apart."""

import pytest

from medusa_kit.serve.streaming import sse_event


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "\x0b", "\x1e", "\n", "é"])
def test_an_event_is_one_line_by_every_rule(character: str) -> None:
    """Clients that split decoded text break lines at more characters than the standard does."""
    lines = sse_event({"text": f"a{character}b"}).decode().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("data: {")
    assert lines[1] == ""
