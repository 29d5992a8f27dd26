"""The words of an answer that may have thoughts before them."""

import pytest

from medusa_kit.infer.decode.text.heard import Heard, ThoughtMarks

CASES = [
    # the answer, whether the prompt opened thoughts, its words
    ("<t>a</t>\n b", False, "b"),
    ("\n<t>\na</t></t>b", False, "b"),
    ("a</t>b</t>", True, "b</t>"),
    ("<t>a</t><t>b</t>[c]d", False, "d"),
    ("[c]d", False, "d"),
    ("</t>b", False, "b"),
    (" b<t>", False, " b<t>"),
    ("<", False, ""),
    ("<x", False, "<x"),
    ("a", True, ""),
    ("", False, ""),
]


@pytest.mark.parametrize("step", [1, 2, 100])
@pytest.mark.parametrize(("text", "opened", "words"), CASES)
def test_words_however_bytes_come(text: str, opened: bool, words: str, step: int) -> None:
    heard, given = Heard(ThoughtMarks("<t>", "</t>", opened, "[c]")), text.encode()
    parts = [heard.push(given[at : at + step]) for at in range(0, len(given), step)]
    assert b"".join(parts) == words.encode()
    assert given.endswith(words.encode())
    assert heard.num_waiting <= len("</t>")


def test_long_thoughts_are_not_kept() -> None:
    heard = Heard(ThoughtMarks("<t>", "</t>", opened=True))
    for _ in range(1000):
        assert heard.push(b"thought " * 10) == b""
    assert len(heard._waiting) < 10
    assert heard.push(b"</t>b") == b"b"
