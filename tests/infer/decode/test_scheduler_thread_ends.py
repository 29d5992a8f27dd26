"""The thread of a batch is closed or dropped, dies, or its process ends: nobody waits for ever."""

import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
from support.batches import LONGEST, drafters, engine_for, row_for
from support.scheduler_threads import SOON, Raises, exact, heard, stopped, threaded

from medusa_kit.errors import ClosedError


@pytest.mark.parametrize("drain", [True, False])
def test_closing_ends_every_row(drain: bool) -> None:
    engine = engine_for("llama-tied")
    with stopped(engine, 1) as (thread, first, gate):
        second = thread.submit(row_for(engine, 9, LONGEST), gate)
        thread.close(drain=drain, timeout=0)  # as far as the gate lets it
        with pytest.raises(ClosedError, match="has been closed"):
            thread.submit(row_for(engine, 4, 2), gate)
        gate.open.set()
        thread.close(drain=drain)
        assert first.done
        assert second.done
        for submission in (first, second):
            said, expected = heard(submission), exact("llama-tied", submission.request)
            assert said == expected[: len(said)]
            assert submission.request.is_complete == drain
            assert not drain or said == expected
        thread.close()


def test_a_thread_that_ends_leaves_nobody_waiting() -> None:
    engine = engine_for("gpt2")
    thread, ends = threaded(engine, 1), Raises(drafters(engine)["none"], SystemExit(1))
    first = thread.submit(row_for(engine, 5, LONGEST), ends)  # type: ignore[arg-type]
    with pytest.raises(ClosedError, match="thread has ended: SystemExit"):
        first.result()
    with pytest.raises(ClosedError, match="thread has ended: SystemExit"):
        thread.submit(row_for(engine, 5, LONGEST), ends)  # type: ignore[arg-type]
    thread.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_is_told_that_it_has_no_thread() -> None:
    engine = engine_for("gpt2")
    with stopped(engine) as (thread, first, gate):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            refused = 0
            for ask in (
                first.result,
                lambda: list(first),
                lambda: thread.submit(row_for(engine, 4, 2), gate),
            ):
                try:
                    ask()
                except ClosedError:
                    refused += 1
            thread.close()
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        gate.open.set()
        assert heard(first) == exact("gpt2", first.request)


EXIT = """
    import sys, threading
    sys.path[:0] = {paths!r}
    from support.batches import drafters, engine_for, row_for
    from support.scheduler_threads import threaded

    engine = engine_for("llama-tied")
    thread = threaded(engine, 1)
    rows = [row_for(engine, n, 200) for n in (5, 9)]
    kept = [thread.submit(row, drafters(engine)["none"]) for row in rows]
    next(iter(kept[0]))
    print("at the end")
"""


def test_a_process_may_end_while_rows_run() -> None:
    paths = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent.parent)]
    code = textwrap.dedent(EXIT.format(paths=paths))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=SOON * 2, check=False
    )
    assert (done.returncode, done.stdout) == (0, "at the end\n"), done.stderr
    assert "Error" not in done.stderr
