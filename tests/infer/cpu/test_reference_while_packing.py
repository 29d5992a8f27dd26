"""The self-check's reference computes while the model is packed, and all comes out as without."""

import errno
import queue
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gguf")
from support.gguf.quantised_files import quantised
from support.tiny_models import model_of
from torch import Tensor

import medusa_kit
from medusa_kit.base.gguf import byte_tokenizer
from medusa_kit.base.layerwise import LayerwiseModel
from medusa_kit.errors import CheckpointError
from medusa_kit.infer.cpu import packed_base
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.packed import cache
from medusa_kit.infer.cpu.packed.packing_up import Packing
from medusa_kit.infer.cpu.packed_base import PackedBase, base_for_decoding
from medusa_kit.infer.cpu.verifier import NativeVerifier
from medusa_kit.infer.runners.backends import prepare_backends
from medusa_kit.infer.self_check import check_trees

pytestmark = pytest.mark.skipif(
    kernels.load_library() is None, reason="the C++ kernels cannot be built on this machine"
)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))
    return quantised(tmp_path / "model.gguf", "llama", ("Q4_K",))


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The thread of each forward of a reference."""
    threads, compute = list[str](), LayerwiseModel.last_logits

    def counted(self: LayerwiseModel, texts: Sequence[Sequence[int]]) -> Tensor:
        threads.append(threading.current_thread().name)
        return compute(self, texts)

    monkeypatch.setattr(LayerwiseModel, "last_logits", counted)
    return threads


def loaded(path: Path) -> PackedBase:
    base = base_for_decoding(str(path), device="cpu")
    assert isinstance(base, PackedBase)
    return base


def check(base: PackedBase) -> float:
    return check_trees(NativeVerifier(base, base.decoder), base.reference).relative_error


def test_it_computes_once_beside_the_packing_and_never_after(
    path: Path, forwards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, numbers = threading.Event(), Packing.numbers
    compute = LayerwiseModel.last_logits

    def begin(self: LayerwiseModel, texts: Sequence[Sequence[int]]) -> Tensor:
        begun.set()
        return compute(self, texts)

    def wait_for_it(self: Packing) -> dict[str, Any]:
        done = numbers(self)
        assert begun.wait(60)
        return done

    monkeypatch.setattr(LayerwiseModel, "last_logits", begin)
    monkeypatch.setattr(Packing, "numbers", wait_for_it)
    assert check(loaded(path)) < 1e-4
    assert [name.startswith("medusa-kit") for name in forwards] == [True]
    again = loaded(path)  # packed by now, and the check is remembered
    check(again)
    assert len(forwards) == 1


def test_it_gives_what_it_gives_when_it_is_asked(path: Path) -> None:
    first = loaded(path)
    again = loaded(path)
    texts = [[5, 6, 7], [5, 9]]
    early = first.reference._begun
    assert early is not None
    assert again.reference._begun is None
    asked = again.reference.last_logits(early[0])
    torch.testing.assert_close(early[1].result(), asked, atol=1e-4, rtol=1e-4)
    other = first.reference.last_logits(texts)  # of other texts: computed anew
    torch.testing.assert_close(other, again.reference.last_logits(texts), atol=1e-4, rtol=1e-4)


def test_what_fails_in_its_thread_fails_the_check_as_ever(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> Tensor:
        raise RuntimeError("no such product")

    monkeypatch.setattr(LayerwiseModel, "last_logits", fail)
    engine = medusa_kit.load(str(path), device="cpu", heads=None)
    assert engine.verifier.steps_run_by == "torch (the C++ steps were refused)"
    assert "a forward failed: no such product" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("error", [CheckpointError("odd"), OSError("odd")])
def test_a_model_that_it_cannot_run_is_packed_and_the_check_tells(
    error: Exception, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: LayerwiseModel, *_: Any) -> None:
        raise error

    monkeypatch.setattr(LayerwiseModel, "__init__", fail)
    base = loaded(path)
    assert next((path.parent / "cache" / "packed").glob("model-*/weights.packed"))
    with pytest.raises(type(error), match="odd"):
        check(base)


def windowed(tmp_path: Path) -> Path:
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "windowed")
    model = model_of("mistral-sliding", vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "windowed")
    return tmp_path / "windowed"


def in_memory(tmp_path: Path) -> Path:
    """Where the cache folder cannot be written."""
    (tmp_path / "cache").write_text("a file")
    return quantised(tmp_path / "model.gguf", "llama", ("Q4_K",))


@pytest.mark.parametrize("case", [windowed, in_memory])
def test_other_ways_pass_too(
    case: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))
    base = loaded(case(tmp_path))
    assert (base.reference._begun is None) == (case is windowed)  # the check narrows its windows
    assert check(base) < 1e-4


def test_nothing_is_begun_of_what_cannot_be_packed(
    path: Path, forwards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise cache.Unsupported("of another kind")

    monkeypatch.setattr(cache, "describe", refuse)
    assert not isinstance(base_for_decoding(str(path), device="cpu"), PackedBase)
    assert forwards == []


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set to let references go beyond the first piece of a weight."""
    event, product = threading.Event(), LayerwiseModel._product

    def waiting(self: LayerwiseModel, *args: Any) -> Tensor:
        assert event.wait(60)
        return product(self, *args)

    monkeypatch.setattr(LayerwiseModel, "_product", waiting)
    return event


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> "queue.Queue[BaseException | None]":
    """How forwards of references ended."""
    found, compute = queue.Queue[BaseException | None](), LayerwiseModel.last_logits

    def noted(self: LayerwiseModel, texts: Sequence[Sequence[int]]) -> Tensor:
        try:
            logits = compute(self, texts)
        except BaseException as error:
            found.put(error)
            raise
        found.put(None)
        return logits

    monkeypatch.setattr(LayerwiseModel, "last_logits", noted)
    return found


def test_packing_again_in_memory_leaves_what_has_begun(
    path: Path, forwards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the disk becomes full."""
    write = cache.write_file

    def full(*args: Any) -> None:
        write(*args)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache, "write_file", full)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    base = loaded(path)
    turns = base.reference._pieces.turns
    assert check(base) < 1e-4
    assert len(forwards) == 1
    assert [turns.acquire(blocking=False) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("odd")])
def test_what_ends_loading_ends_it(
    error: BaseException, path: Path, held: threading.Event,
    ends: "queue.Queue[BaseException | None]", monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(packed_base, "tokenizer_of", fail)
    with pytest.raises((KeyboardInterrupt, packed_base.Unsupported)):
        packed_base.light_base(str(path), "float32", "cpu", None, "checkpoint", False)
    held.set()
    assert isinstance(ends.get(timeout=60), CancelledError)


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_a_check_that_does_not_ask_for_it_ends_it(
    attention: str, path: Path, held: threading.Event,
    ends: "queue.Queue[BaseException | None]",
) -> None:  # fmt: skip
    """The check is remembered, or torch runs the steps."""
    held.set()
    if attention == "auto":
        prepare_backends(loaded(path))
        assert ends.get(timeout=60) is None
    held.clear()
    shutil.rmtree(path.parent / "cache" / "packed", ignore_errors=True)
    base = loaded(path)
    prepare_backends(base, attention)
    held.set()
    assert isinstance(ends.get(timeout=60), CancelledError)
    assert ends.empty()
    texts = [[5, 6, 7], [5, 9]]
    asked = loaded(path).reference.last_logits(texts)
    assert torch.equal(base.reference.last_logits(texts), asked)  # and it can be asked later
