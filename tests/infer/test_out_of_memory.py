"""Memory that runs out at any operation of a step, or while a model is loaded, loses nothing."""

from pathlib import Path
from typing import Any

import pytest
from support.batches import LONGEST, alone, drafters, engine_for, row_for
from support.full_memory import Full
from support.tiny_models import model_of

from medusa_kit.base.gguf import byte_tokenizer
from medusa_kit.engine.load import load
from medusa_kit.errors import MedusaKitError
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.packed import file as packed_file
from medusa_kit.infer.cpu.packed import packing_up
from medusa_kit.infer.decode.batch import Batch

SAYS = "[enforce fail at alloc_cpu.cpp:119] . DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize("family", ["llama-tied", "gpt2"])
@pytest.mark.parametrize("after", [1, 4])
def test_any_operation_of_a_step_may_find_memory_full(family: str, after: int) -> None:
    """Rows get the tokens that they get alone, or end with the error after some of them."""
    engine = engine_for(family)
    fired = 0
    for at in (1, 4, 13, 55, 144):
        batch, shared = Batch(engine.verifier, 3), drafters(engine)
        rows = [row_for(engine, n, LONGEST) for n in (5, 17, 9)]
        for row, name in zip(rows, ("heads", "suffix", "prompt-lookup"), strict=True):
            batch.add(row, shared[name])
        for _ in range(after):
            batch.step()
        with Full(at, RuntimeError(SAYS)) as mode:
            batch.step()
        fired += mode.left <= 0
        for _ in range(500):
            if batch.num_requests:
                batch.step()
        assert batch.num_requests == 0
        for row in rows:
            expected = alone(family, len(row.prompt_ids), False)[: row.max_new_tokens]
            if row.error is None:
                assert row.token_ids == expected
            else:
                assert row.token_ids == expected[: len(row.token_ids)]
        again = row_for(engine, 9, LONGEST)
        batch.add(again, shared["heads"])
        while batch.num_requests:
            batch.step()
        assert again.error is None
        assert again.token_ids == alone(family, 9, False)[:LONGEST]
    assert fired > 2


@pytest.mark.slow
@pytest.mark.skipif(kernels.load_library() is None, reason="the C++ kernels cannot be built here")
@pytest.mark.parametrize("seam", ["written", "packed"])
@pytest.mark.parametrize("at", [1, 5])
def test_a_load_that_ran_out_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seam: str, at: int
) -> None:
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))
    tokenizer, place = byte_tokenizer(), tmp_path / "model"
    model_of("llama", vocab_size=len(tokenizer)).save_pretrained(place)
    tokenizer.save_pretrained(place)
    owner: Any = packed_file.FileSink if seam == "written" else packing_up
    name = "write" if seam == "written" else "packed_rows"
    original, calls = getattr(owner, name), []

    def full(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            raise MemoryError
        return original(*arguments, **options)

    expected = load(str(place), heads="none", device="cpu", dtype="float32", attention="sdpa")
    answer = expected.generate("abc", max_new_tokens=8).token_ids
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        try:
            found = load(str(place), heads="none", device="cpu")
            assert found.generate("abc", max_new_tokens=8).token_ids == answer
        except (MedusaKitError, MemoryError):
            pass
    assert len(calls) >= at
    left = [path for path in (tmp_path / "cache").rglob("*") if ".part" in path.name
            or path.name.startswith(".")]  # fmt: skip
    assert not [path for path in left if not path.name.endswith(".lock")], left
    again = load(str(place), heads="none", device="cpu")
    assert again.generate("abc", max_new_tokens=8).token_ids == answer
