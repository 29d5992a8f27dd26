"""A captured forward, traced and counted on a machine without a GPU."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu_check import step as part
from benchmarks.gpu_check.inductor import inductor_kernels
from benchmarks.gpu_check.shapes import (
    META,
    TritonLaunches,
    base_of_shape,
    forward_of_shape,
)
from benchmarks.gpu_check.step import count, kernels_of_forward, weight_bytes
from benchmarks.gpu_check.tracing import kernels_of, peak_bytes, traced
from medusa_kit.base.model import BaseModel
from medusa_kit.infer.attention.sdpa import tree_sdpa
from medusa_kit.infer.device.captured import CapturedForward
from medusa_kit.infer.device.guard import HostRead

pytest.importorskip("triton", reason="triton is not installed (extra `triton`)")
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return base_of_shape(TINY)


def kernels(base: BaseModel, rows: int, nodes: int) -> Counter[str]:
    found, _ = kernels_of_forward(base, rows, nodes, 100, 256)
    return Counter(kernel.name for kernel in found)


def test_kernels_grow_with_layers_alone(base: BaseModel) -> None:
    """Not with nodes, nor with rows, but that attention of several is padded."""
    alone, forward = kernels(base, 1, 16), kernels(base, 8, 16)
    for nodes in (1, 64):
        assert kernels(base, 1, nodes) == alone, nodes
    for rows, nodes in ((8, 1), (32, 8)):
        assert kernels(base, rows, nodes) == forward, (rows, nodes)
    larger = base_of_shape({**TINY, "num_hidden_layers": 2})
    layer = kernels(larger, 8, 16) - forward
    assert layer.total() - (kernels(larger, 1, 16) - alone).total() in (2, 3)
    assert layer.total() <= part.MAX_A_LAYER[False], layer
    assert layer["split_kernel"] == layer["merge_kernel"] == 1
    assert layer["aten.mm.default"] == 7
    assert forward.total() - layer.total() <= part.MAX_ONCE, forward


@pytest.mark.parametrize(
    "fault",
    [
        lambda tokens: tokens.sum().item(),
        lambda tokens: tokens[tokens > 1],
        lambda tokens: tokens + torch.zeros(tokens.shape, dtype=torch.int64),
        lambda tokens: tokens.cpu(),
    ],
    ids=["a value", "a size", "host and device", "a copy"],
)
def test_a_read_on_the_host_fails_the_trace(
    base: BaseModel, fault: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured, plain = forward_of_shape(base, 16, 256, TritonLaunches(100)), CapturedForward._step
    traced(captured.run)

    def step(self: CapturedForward) -> Any:
        fault(self._tokens_T)
        return plain(self)

    monkeypatch.setattr(CapturedForward, "_step", step)
    with pytest.raises((HostRead, RuntimeError)):
        traced(captured.run)


def test_bytes_are_those_that_move() -> None:
    a, b = torch.empty(3, 5, device=META), torch.empty(5, 7, device=META)
    table_VE, ids = torch.empty(900, 4, device=META), torch.empty(6, dtype=torch.int64, device=META)
    works: list[tuple[Callable[[], Any], list[int]]] = [
        (lambda: a @ b, [4 * (15 + 35 + 21)]),
        (lambda: a.T, []),
        (lambda: a + a[:1].expand(3, 5), [4 * (15 + 5 + 15)]),
        (lambda: torch.nn.functional.embedding(ids, table_VE), [4 * 2 * 24 + 8 * 6]),
        (lambda: table_VE[ids], [4 * 2 * 24 + 8 * 6]),
        (lambda: a.copy_(a[:1].expand(3, 5)), [4 * 2 * 5]),
        (lambda: a.mul_(2), [4 * 2 * 15]),
        (lambda: a.zero_(), [4 * 15]),
        (lambda: torch.empty(9, device=META), []),
    ]
    for number, (work, expected) in enumerate(works):
        assert [kernel.num_bytes for kernel in kernels_of(traced(work))] == expected, number

    def scatter() -> None:
        table_VE[ids] = torch.nn.functional.embedding(ids, table_VE)

    assert [k.num_bytes for k in kernels_of(traced(scatter))][-1] == 4 * 2 * 24 + 8 * 6


def test_what_is_around_the_model_is_counted_once(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled or not, and of no layer."""
    monkeypatch.setattr(part, "NUM_SLOTS", 256)
    around = Counter(kernel.name for kernel in part.kernels_around(base, 2, 8))
    assert around["aten.argmax.default"] == 1
    assert around <= kernels(base, 2, 8)
    assert not {"aten.mm.default", "split_kernel"} & set(around)
    monkeypatch.setattr(part, "inductor_kernels", lambda *_: [])
    found = part.compiled_kernels(base, 2, 8, [part.Kernel("split_kernel", 7)])
    assert Counter(kernel.name for kernel in found) == around + Counter(["split_kernel"])


def test_memory_is_what_lives_at_once() -> None:
    a, b = torch.empty(100, 50, device=META), torch.empty(50, 100, device=META)

    def work() -> None:
        first = a + 1  # 20,000 bytes
        second = first.T @ first  # 10,000 more, beside a view
        del first
        third = second.exp()  # in place of the first
        third.mul_(2)
        b @ a  # 10,000 that nobody reads, when the second is gone

    assert peak_bytes(traced(work)) == 4 * (100 * 50 + 50 * 50)
    assert peak_bytes(traced(lambda: a.T)) == 4  # the trace's own number


def test_weights_are_read_once_and_the_roofline_is_theirs(base: BaseModel) -> None:
    (row,) = count(base, "tiny", 1, 16)
    weights = {k: v.nbytes for k, v in base.model.named_parameters() if "embed_tokens" not in k}
    assert row.floor == weight_bytes(base) == sum(weights.values())
    assert row.num_bytes > row.floor
    assert row.memory is not None
    logits, states = 16 * TINY["vocab_size"] * 2, 16 * TINY["hidden_size"] * 2
    assert row.memory > logits + states
    assert row.milliseconds(1e3, 0.0) == pytest.approx(row.num_bytes)
    assert row.milliseconds(1e30, 2.0) == pytest.approx(2e-3 * row.num_kernels)
    assert row.floor_milliseconds(1e3) == pytest.approx(row.floor)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method")  # torch's own import
def test_torch_compile_launches_less_than_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's own schedule of a compiled forward for a GPU that is not there. Tests interpret
    Triton's kernels, which do not compile, so attention is torch's here."""

    def kernels_and_compiled(layers: int) -> tuple[int, int]:
        base, attention = base_of_shape({**TINY, "num_hidden_layers": layers}), TritonLaunches(100)
        captured = forward_of_shape(base, 16, 256, attention)
        monkeypatch.setattr(attention, "attend", tree_sdpa)
        plain = len(kernels_of(traced(captured.run)))
        # Compiling takes seconds, and is done for one layer, with all that is around it.
        compiled = inductor_kernels(base, captured, attention, tree_sdpa) if layers == 1 else []
        return plain, len(compiled)

    (once, compiled), (twice, _) = kernels_and_compiled(1), kernels_and_compiled(2)
    assert 0 < compiled < (twice - once) / 2, (once, twice, compiled)


@pytest.mark.slow
def test_the_part_says_what_misses_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch.compile, for speed: `make gpu-check` has the rest."""
    monkeypatch.setattr(part, "SHAPES", {"SmolLM2-135M": TINY})
    monkeypatch.setattr(part, "inductor_kernels", lambda *_: [])
    monkeypatch.setattr(part, "NUM_SLOTS", 512)
    monkeypatch.setattr(part, "CASES", ((1, 64), (8, 16)))
    report = part.check(quick=True)
    assert report.misses == []
    assert {len(row) for row in report.rows} == {len(report.columns)}
    found = [(row["rows"], row["num_nodes"], row["compiled"]) for row in report.data]
    assert found == [(1, 64, False), (1, 64, True), (8, 16, False)]
    monkeypatch.setattr(part, "MAX_ONCE", 3)
    assert len(part.check(quick=True).misses) == 2

    def reads(self: CapturedForward) -> Any:
        return self._tokens_T.sum().item()

    monkeypatch.setattr(CapturedForward, "_step", reads)
    (miss, *_) = part.check(quick=True).misses
    assert "does not trace to one graph" in miss
