"""Chat templates that run or write for ever are ended, and the next conversation is rendered."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.debug_model import small_tokenizer
from support.tiny_models import tiny_model

from medusa_kit.base.gguf import CHATML_TEMPLATE
from medusa_kit.base.model import wrap_model
from medusa_kit.base.tokenizer import bounded_rendering
from medusa_kit.base.tokenizer.say import say
from medusa_kit.base.tokenizer.turn_end import end_of_turn
from medusa_kit.data.template import render, render_text
from medusa_kit.errors import DataError

MANY = "{% for i in range(90000) %}{% for j in range(90000) %}BODY{% endfor %}{% endfor %}"
SLOW = MANY.replace("BODY", "")
DEEP = "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(60) }}"
DOUBLED = (
    "{% set ns = namespace(text='a') %}{% for i in range(22) %}"
    "{% set ns.text = ns.text ~ ns.text %}{{ ns.text }}{{ ns.text }}{% endfor %}"
)
IN_A_BLOCK = "{% set text %}" + MANY.replace("BODY", "abcdefgh") + "{% endset %}{{ text }}"
TALK = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("rendering", [render, render_text])
@pytest.mark.parametrize(
    ("template", "said"),
    [
        (SLOW, "more than 0.2 seconds"),
        (DEEP, "more than 0.2 seconds"),
        (MANY.replace("BODY", "abcdefgh"), "writes more than"),
        (IN_A_BLOCK, "more than 0.2 seconds"),
        (DOUBLED, "writes more than"),
    ],
)
def test_it_is_ended(
    rendering: Callable[..., Any], template: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "seconds" in said:
        monkeypatch.setattr(bounded_rendering, "SECONDS", 0.2)
    monkeypatch.setattr(bounded_rendering, "MAX_WRITTEN", 1 << 20)
    with pytest.raises(DataError, match=f"cannot render the conversation: .*{said}"):
        rendering(small_tokenizer(template), TALK)
    assert rendering(small_tokenizer(CHATML_TEMPLATE), TALK)


@pytest.mark.parametrize("template", [SLOW, DEEP, IN_A_BLOCK, DOUBLED])
def test_a_base_is_loaded_all_the_same(
    template: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its tokens can be decoded; what the template does is said, and an end of turns not looked
    for again."""
    monkeypatch.setattr(bounded_rendering, "SECONDS", 0.2)
    monkeypatch.setattr(bounded_rendering, "MAX_WRITTEN", 1 << 20)
    say.cache_clear()  # what it has said before
    base = wrap_model(tiny_model("llama"), small_tokenizer(template), "tiny")
    said = capsys.readouterr().err
    assert "cannot render the conversation: it " in said
    assert "hint" not in said  # there is no conversation yet
    assert end_of_turn(base.tokenizer) is None


def test_work_within_work_has_the_outer_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_rendering, "SECONDS", 0.2)

    def inner() -> str:
        try:
            return bounded_rendering.bounded(None, lambda: render_text(small_tokenizer(SLOW), TALK))
        except DataError:
            return "went on"

    with pytest.raises(DataError, match=r"more than 0.2 seconds"):
        bounded_rendering.bounded(None, inner)
    assert render_text(small_tokenizer(CHATML_TEMPLATE), TALK)


def test_one_in_another_thread_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the thread that takes long is ended."""
    monkeypatch.setattr(bounded_rendering, "SECONDS", 0.2)
    found = list[str]()

    def slow() -> None:
        try:
            render_text(small_tokenizer(SLOW), TALK)
        except DataError:
            found.append("ended")

    thread = threading.Thread(target=slow)
    thread.start()
    while thread.is_alive():
        assert render_text(small_tokenizer(CHATML_TEMPLATE), TALK).count("Hi") == 1
    assert found == ["ended"]
