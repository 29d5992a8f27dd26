"""What benchmarks/trace_request.py counts is what runs."""

import importlib
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import medusa_kit
from benchmarks import trace_request as script
from medusa_kit.infer.decode import step_thread
from medusa_kit.tree.shape import TreeShape, chain, shape_of


def test_a_function_that_gets_a_tensor_alone_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in another thread. What is outside of the package does not, nor does a lambda."""
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit/inside_of_it.py").write_text("def twice(x):\n    return once(x) * 2\n\n"
                                                  "def once(x):\n    return x\n\n"
                                                  "def lose(x):\n    (lambda: x)()\n")  # fmt: skip
    (tmp_path / "outside_of_it.py").write_text("def twice(x):\n    return x * 2\n")
    monkeypatch.setattr(script, "PACKAGE", str(tmp_path / "kit"))
    for folder in (tmp_path, tmp_path / "kit"):
        monkeypatch.syspath_prepend(folder)
    inside, outside = map(importlib.import_module, ("inside_of_it", "outside_of_it"))
    trace = script.Trace()
    run = trace.run = script.Run()
    threading.setprofile(trace)
    try:
        thread = threading.Thread(target=inside.twice, args=(torch.ones(2),))
        thread.start()
        thread.join()
    finally:
        threading.setprofile(None)
    sys.setprofile(trace)
    try:
        inside.twice(torch.ones(2))
        inside.lose(TreeShape((-1,)))
        outside.twice(torch.ones(2))
    finally:
        sys.setprofile(None)
    name = "inside_of_it.py"
    assert run.calls == {(name, "twice"): 2, (name, "once"): 2, (name, "lose"): 1}
    assert run.made() == {"TreeShape": 1}
    assert run.modules == [name]


@pytest.mark.parametrize("drafter", ["none", "medusa"])
def test_all_modules_of_a_request(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the interpreter's other hook, that of debuggers, sees them."""
    monkeypatch.setattr(step_thread, "LINGER", 0.0)  # so that each answer has a new thread
    engine = medusa_kit.load("debug-tiny", heads="untrained", device="cpu", guesses="all")
    found = dict[str, None]()

    def generate() -> None:
        engine.generate(script.PROMPT, max_new_tokens=5, drafter=drafter)
        engine.scheduler.thread.hand_and_wait(lambda: None)

    def without_thread() -> None:
        """Until the one that made the last answer has ended."""
        until = time.monotonic() + 60
        while engine.scheduler.thread._thread is not None:
            assert time.monotonic() < until
            time.sleep(0.001)

    def follow(frame: FrameType, event: str, value: Any) -> None:
        name = frame.f_code.co_filename
        if name.startswith(script.PACKAGE) and not frame.f_code.co_name.startswith("<"):
            found[name[len(script.PACKAGE) + 1 :]] = None

    chain.cache_clear()  # as in a process that has seen many lengths
    shape_of.cache_clear()
    generate()
    generate()  # reads only the end of its prompt, a shape that is made once
    without_thread()
    trace = script.Trace()
    threading.setprofile(trace)
    try:
        run, steps = script.traced(engine, trace, drafter, 5)
    finally:
        threading.setprofile(None)
    without_thread()
    sys.settrace(follow)
    threading.settrace(follow)
    try:
        generate()
    finally:
        sys.settrace(None)
        threading.settrace(None)
    assert set(run.modules) == set(found)
    assert {"infer/tree_cache.py", "infer/decode/accept/rules.py", "data/chat.py"} <= set(found)
    assert steps > 0
    assert run.calls["infer/tree_cache.py", "commit"] >= steps
    assert max(run.made().values()) >= steps


def test_its_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["trace_request", "--drafters", "none,suffix"])
    script.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[0:4:2]] == ["none", "suffix"]
    assert "calls a step" in lines[0]
    assert "objects made a step, by class: " in lines[1]
    assert any("infer/tree_cache.py: " in line for line in lines[4:])
