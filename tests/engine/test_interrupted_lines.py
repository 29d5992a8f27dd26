"""Ctrl-C at any line of a wait for steps: a stream beside it has its answer, and the engine answers
on, even where somebody keeps the interruption with all that it refers to.
"""

import linecache
import sys
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
from support.callers import Words
from support.small_engines import endless_base, engine_with_heads, random_prompt, reusing

from medusa_kit.engine.engine import Engine
from medusa_kit.infer.decode import caller, scheduler, step_thread

FILES = {module.__file__ for module in (caller, scheduler, step_thread)}
SOON = 20.0


def interrupted(work: Callable[[], Any], at: int) -> KeyboardInterrupt | None:
    """What `work` was interrupted by at a line of these files; None where it has fewer."""
    remaining = at

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal remaining
        if frame.f_code.co_filename not in FILES:
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        # No signal is handled where `with` leaves a lock of C, or where a function is entered.
        if event == "line" and not line.startswith(("with ", "try:")):
            remaining -= 1
            if remaining == 0:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt as error:
        return error
    finally:
        sys.settrace(None)
    return None


@pytest.mark.skipif(sys.gettrace() is not None, reason="a debugger or coverage traces lines")
def test_a_stream_beside_it_and_the_next_answers_are_right() -> None:
    engine = engine_with_heads(endless_base(24))
    engine.base.tokenizer = Words()
    engine.scheduler = reusing(engine.verifier)
    prompt, other = random_prompt(8, 1, 24), random_prompt(9, 2, 24)

    def ask() -> list[int]:
        return list(engine.generate(other, max_new_tokens=4, drafter="none").token_ids)

    alone = Engine(engine.verifier, engine.check, reusing(engine.verifier), engine.heads)
    text = alone.generate(prompt, max_new_tokens=10, drafter="none").text
    expected, ends, at = ask(), set[str](), 1

    def read(stream: Any) -> None:
        pieces = [next(stream)]
        kept = interrupted(ask, at)
        ends.add("none" if kept is None else "some")
        thread = Thread(target=go_on, args=(stream, pieces), daemon=True)
        thread.start()
        thread.join(SOON)
        assert not thread.is_alive()
        assert heard.pop() == text
        assert ask() == expected
        assert engine.scheduler.idle
        assert not engine.scheduler.batches.used

    def go_on(stream: Any, pieces: list[str]) -> None:
        heard.append("".join([*pieces, *stream]))

    heard = list[str]()
    while "none" not in ends:
        read(engine.stream(prompt, max_new_tokens=10, drafter="none"))
        at += 1
    assert "some" in ends
