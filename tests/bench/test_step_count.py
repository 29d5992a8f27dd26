"""A captured step, traced and counted on a machine without a GPU."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_kit.base_model import BaseModel
from medusa_kit.bench.shapes_only import META, TritonLaunches, base_of_shape, step_of_shape
from medusa_kit.bench.step_count import count_base, count_step, kernels_of, table, traced
from medusa_kit.infer.fixed import step as fixed_step
from medusa_kit.infer.fixed.guard import HostRead

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
    """Not with nodes: 16 and 64 launch the same, and with rows neither."""
    forward, rest = counts(base, 16)
    assert (forward, rest) == counts(base, 64)
    attention = TritonLaunches(100)
    several = count_step(step_of_shape(base, 16, 256, attention, rows=4), attention)
    assert len(several[0]) == forward.total()
    deeper, same = counts(base_of_shape({**TINY, "num_hidden_layers": 3}), 16)
    assert same.total() == rest.total()
    layer = deeper.total() - forward.total()
    assert layer <= 43, deeper - forward  # of a Llama; fewer is better, and the docs say how many
    assert (deeper - forward)["split_kernel"] == (deeper - forward)["merge_kernel"] == 1
    assert (deeper - forward)["aten.mm.default"] == 7
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
    assert row.microseconds(1e6, 0.0) == pytest.approx(row.num_bytes)
    assert row.microseconds(1e30, 2.0) == pytest.approx(2 * row.num_kernels)
    line = table([row]).splitlines()[-1]
    assert line.startswith(f"| tiny | 1 | no | {row.num_kernels} | {row.kernels_per_layer:.1f} |")
    header, rule, _ = table([row]).splitlines()
    assert header.count("|") == rule.count("|") == line.count("|")


def test_torch_compile_launches_a_third() -> None:
    """Inductor's own schedule of a compiled forward for a GPU that is not there."""
    plain, compiled = (
        [count_base(base_of_shape({**TINY, "num_hidden_layers": layers}), "tiny", 16, one, 100, 256)
         for layers in (1, 2)] for one in (False, True)
    )  # fmt: skip
    layer = [rows[1].num_kernels - rows[0].num_kernels for rows in (plain, compiled)]
    assert layer[1] <= 16 < layer[0] / 2, layer
    assert compiled[1].num_bytes < plain[1].num_bytes
