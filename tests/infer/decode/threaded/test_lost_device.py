"""After an error that ends the accelerator's context the batch ends, not failing for ever."""

from typing import Any

import pytest
import torch
from support.batches import drafters, engine_for, row_for
from support.scheduler_threads import threaded

from medusa_kit.errors import ClosedError
from medusa_kit.infer import memory
from medusa_kit.infer.memory import is_device_lost

ASSERTED = RuntimeError("CUDA error: device-side assert triggered\nCompile with ...")


def accelerator(monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)

    def synchronize() -> None:
        if not works:
            raise ASSERTED

    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)


def test_an_error_is_told_from_a_lost_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_device_lost(ASSERTED)  # there is no device here
    accelerator(monkeypatch, works=True)
    assert not is_device_lost(ASSERTED)
    accelerator(monkeypatch, works=False)
    assert is_device_lost(ASSERTED)
    for other in (ValueError("wrong"), RuntimeError("shape"), MemoryError(),
                  torch.OutOfMemoryError("CUDA error: out of memory")):  # fmt: skip
        assert not is_device_lost(other)


@pytest.mark.parametrize("lost", [False, True])
def test_the_thread_ends_with_its_device(monkeypatch: pytest.MonkeyPatch, lost: bool) -> None:
    engine = engine_for("gpt2")
    score, broken = engine.verifier.score, [True]

    def scored(*given: Any, **more: Any) -> Any:
        if broken[0]:
            raise RuntimeError(str(ASSERTED))
        return score(*given, **more)

    monkeypatch.setattr(engine.verifier, "score", scored)
    accelerator(monkeypatch, works=not lost)
    monkeypatch.setattr(memory, "device_memory_error", None)
    drafter = drafters(engine)["none"]
    thread = threaded(engine, 2)
    first = thread.submit(row_for(engine, 5, 4), drafter)
    with pytest.raises(RuntimeError, match="device-side assert"):
        first.result()
    broken[0] = False
    if lost:
        thread.close(timeout=30)
        assert "device-side assert" in str(thread.ended)
        with pytest.raises(ClosedError):
            thread.submit(row_for(engine, 5, 4), drafter)
    else:
        assert thread.submit(row_for(engine, 5, 4), drafter).result() is not None
        assert thread.ended is None
        thread.close()
