"""A captured step, traced and counted on a machine without a GPU."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_kit.base.model import BaseModel
from medusa_kit.bench.gpu_check import step as part
from medusa_kit.bench.gpu_check.inductor import inductor_kernels
from medusa_kit.bench.gpu_check.shapes import META, TritonLaunches, base_of_shape, step_of_shape
from medusa_kit.bench.gpu_check.step import count_base, count_step
from medusa_kit.bench.gpu_check.tracing import kernels_of, traced
from medusa_kit.infer.attention.sdpa import tree_sdpa
from medusa_kit.infer.cuda_graph import step as fixed_step
from medusa_kit.infer.cuda_graph.guard import HostRead

pytest.importorskip("triton", reason="triton is not installed (extra `triton`)")
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return base_of_shape(TINY)


def counts(base: BaseModel, num_nodes: int) -> tuple[Counter[str], Counter[str]]:
    attention = TritonLaunches(100)
    forward, rest = count_step(step_of_shape(base, num_nodes, 256, attention), attention)
    return Counter(k.name for k in forward), Counter(k.name for k in rest)


def test_kernels_grow_with_layers_alone(base: BaseModel) -> None:
    """Not with nodes, since 16 and 64 launch the same, nor with rows."""
    forward, rest = counts(base, 16)
    assert (forward, rest) == counts(base, 64)
    attention = TritonLaunches(100)
    several = count_step(step_of_shape(base, 16, 256, attention, rows=4), attention)
    assert len(several[0]) == forward.total()
    deeper, same = counts(base_of_shape({**TINY, "num_hidden_layers": 3}), 16)
    assert same.total() == rest.total()
    layer = deeper.total() - forward.total()
    assert layer <= part.MOST_A_LAYER[False], deeper - forward
    assert (deeper - forward)["split_kernel"] == (deeper - forward)["merge_kernel"] == 1
    assert (deeper - forward)["aten.mm.default"] == 7
    assert forward.total() - 2 * layer <= part.MOST_ONCE
    assert rest.total() <= 70, rest


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
    attention = TritonLaunches(100)
    step, plain = step_of_shape(base, 16, 256, attention), fixed_step.accept_greedy
    traced(step.advance)

    def accept(tree: Any, tokens_BN: Tensor, *others: Any) -> Any:
        fault(tokens_BN)
        return plain(tree, tokens_BN, *others)

    monkeypatch.setattr(fixed_step, "accept_greedy", accept)
    with pytest.raises((HostRead, RuntimeError)):
        traced(step.advance)


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


def test_weights_are_read_once_and_the_roofline_is_theirs(base: BaseModel) -> None:
    row = count_base(base, "tiny", 1, False, 100, 256)
    weights = {k: v.nbytes for k, v in base.model.named_parameters() if "embed_tokens" not in k}
    assert row.floor == sum(weights.values())
    assert row.num_bytes > row.floor
    assert row.milliseconds(1e3, 0.0) == pytest.approx(row.num_bytes)
    assert row.milliseconds(1e30, 2.0) == pytest.approx(2e-3 * row.num_kernels)
    assert row.floor_milliseconds(1e3) == pytest.approx(row.floor)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method")  # torch's own import
def test_torch_compile_launches_less_than_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's own schedule of a compiled forward for a GPU that is not there. Tests interpret
    Triton's kernels, which do not compile, so attention is torch's here."""
    counts = []
    for layers in (1, 2):
        attention = TritonLaunches(100)
        step = step_of_shape(
            base_of_shape({**TINY, "num_hidden_layers": layers}), 16, 256, attention
        )
        monkeypatch.setattr(attention, "attend", tree_sdpa)
        counts.append((len(count_step(step, attention)[0]), len(inductor_kernels(step, tree_sdpa))))
    plain, compiled = (counts[1][one] - counts[0][one] for one in (0, 1))
    assert compiled < plain / 2, counts


def test_the_part_says_what_misses_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch.compile, for speed: `make gpu-check` has the rest."""
    monkeypatch.setattr(part, "SHAPES", {"SmolLM2-135M": TINY})
    monkeypatch.setattr(part, "inductor_kernels", lambda step: [])
    monkeypatch.setattr(part, "NODES", (16,))
    report = part.check(quick=True)
    assert report.misses == []
    assert {len(row) for row in report.rows} == {len(report.columns)}
    assert [row["num_nodes"] for row in report.data] == [16] * 2
    monkeypatch.setattr(part, "MOST_ONCE", 3)
    assert len(part.check(quick=True).misses) == 1

    def reads(tree: Any, tokens_BN: Tensor, *others: Any) -> Any:
        return tokens_BN.sum().item()

    monkeypatch.setattr(fixed_step, "accept_greedy", reads)
    (miss, *_) = part.check(quick=True).misses
    assert "does not trace to one graph" in miss
