"""What a captured step launches and moves, counted without a GPU: one graph of it, its kernels.

The step is traced on the meta device into one graph. A read on the host, which a CUDA graph cannot
hold, and any mixing of host and device fail the trace. Every operation of that graph that is not a
view or bare memory launches a kernel (a few launch more; they are counted once), and is taken to
move what it reads and writes; gathers and scatters what they touch. Attention is the Triton
backend's own launches.

Shapes: B batch, N nodes with root.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from medusa_kit.base_model import BaseModel
from medusa_kit.bench.shapes_only import (
    META,
    SHAPES,
    TritonLaunches,
    base_of_shape,
    cores_of_a_gpu,
    step_of_shape,
)
from medusa_kit.infer.fixed.guard import NoHostReads
from medusa_kit.infer.fixed.step import FixedStep

aten = torch.ops.aten
# No view by its schema, and still without a kernel.
NO_KERNEL = {
    aten._unsafe_view, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty,
    aten.detach, aten.alias, aten.lift_fresh, aten.sym_size,
}  # fmt: skip
# These touch as much of their first argument as they give.
GATHERS = {aten.embedding, aten.index, aten.gather, aten.index_select}
# These write as much of it as the values they are given; which argument those are.
SCATTERS = {aten.index_put: 2, aten.index_put_: 2, aten.copy_: 1}
FILLS = {aten.fill_, aten.zero_}


@dataclass(frozen=True)
class Kernel:
    """One kernel, and the bytes it moves."""

    name: str
    num_bytes: int


@dataclass(frozen=True)
class StepCount:
    """A step's kernels, those of the model's forward among them, and the bytes that all move.

    `floor`: the bytes of the weights that a plain forward reads.
    """

    shape: str
    num_nodes: int
    compiled: bool
    num_kernels: int
    kernels_per_layer: float
    num_bytes: int
    floor: int

    def microseconds(self, bytes_per_second: float, per_kernel: float) -> float:
        """Bytes at full bandwidth, and so many µs between one kernel and the next."""
        return 1e6 * self.num_bytes / bytes_per_second + per_kernel * self.num_kernels

    def floor_microseconds(self, bytes_per_second: float) -> float:
        return 1e6 * self.floor / bytes_per_second


def traced(work: Callable[[], object]) -> torch.fx.GraphModule:
    """One graph of all operations of `work`. Raises HostRead, or RuntimeError where a value is
    looked at that the meta device does not have."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def with_argument(x: Tensor) -> Tensor:  # make_fx wants one
        with NoHostReads():
            work()
        return x + 1

    with torch.inference_mode(), cores_of_a_gpu():
        return make_fx(with_argument)(torch.empty(1, device=META))


def kernels_of(graph: torch.fx.GraphModule) -> list[Kernel]:
    """The kernels of a traced graph, in order, without the one that `traced` adds."""
    found = []
    for node in graph.graph.nodes:
        operation = node.target
        if node.op != "call_function" or not isinstance(operation, torch._ops.OpOverload):
            continue
        if not operation.is_view and operation.overloadpacket not in NO_KERNEL:
            found.append(Kernel(str(operation), _moved(graph, node)))
    return found[:-1]


def _moved(graph: torch.fx.GraphModule, node: torch.fx.Node) -> int:
    operation: Any = node.target
    out = sum(map(_stored, _tensors([node.meta.get("val")])))
    arguments = [_value(graph, one) for one in tree_iter((node.args, node.kwargs))]
    read = [_stored(one) for one in _tensors(arguments)]
    if operation.overloadpacket in FILLS:
        return out
    if operation.overloadpacket in GATHERS:
        return 2 * out + sum(read[1:])
    if (place := SCATTERS.get(operation.overloadpacket)) is not None:
        values = _stored(_value(graph, node.args[place]))
        return 2 * values + (sum(read[1:-1]) if place == 2 else 0)
    in_place = operation._schema.name.endswith("_")
    return sum(read) + (read[0] if in_place else out)


def _value(graph: torch.fx.GraphModule, argument: Any) -> Any:
    if not isinstance(argument, torch.fx.Node):
        return argument
    if argument.op == "get_attr":
        return getattr(graph, str(argument.target))
    return argument.meta.get("val")


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    return [one for one in tree_iter(list(values)) if isinstance(one, Tensor)]


def _stored(tensor: Tensor) -> int:
    """Bytes that lie in memory: what is expanded is there once."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride != 0 else 1
    return numel * tensor.element_size()


def count_step(step: FixedStep, attention: TritonLaunches) -> tuple[list[Kernel], list[Kernel]]:
    """(kernels of the model's forward, all others of the step)."""
    forward = _with_attention(attention, lambda: step.score(step.lengths_B))
    whole = _with_attention(attention, step.advance)
    rest = list(whole)
    for kernel in forward:
        rest.remove(kernel)
    return forward, rest


def _with_attention(attention: TritonLaunches, work: Callable[[], object]) -> list[Kernel]:
    attention.launches.clear()
    kernels = kernels_of(traced(work))
    return kernels + [Kernel(one.name, one.num_bytes) for one in attention.launches]


def weight_bytes(base: BaseModel) -> int:
    """What every forward reads of the weights: all but the input embedding, of which it takes rows,
    unless the output embedding is the same."""
    tied = base.config.tie_word_embeddings
    embedding = base.model.get_input_embeddings().weight
    weights = {id(weight): weight.nbytes for weight in base.model.parameters()}
    return sum(weights.values()) - (0 if tied else embedding.nbytes)


def count_shape(
    name: str, num_nodes: int, compiled: bool = False, length: int = 1024, num_slots: int = 2048
) -> StepCount:
    """One row of `length` tokens of a model of that shape, in bfloat16."""
    return count_base(base_of_shape(SHAPES[name]), name, num_nodes, compiled, length, num_slots)


def count_base(
    base: BaseModel, name: str, num_nodes: int, compiled: bool, length: int, num_slots: int
) -> StepCount:
    attention = TritonLaunches(length)
    step = step_of_shape(base, num_nodes, num_slots, attention)
    forward, rest = count_step(step, attention)
    if compiled:
        from medusa_kit.bench.inductor_count import inductor_kernels

        ours = [kernel for kernel in forward if kernel.name in ("split_kernel", "merge_kernel")]
        forward = inductor_kernels(step) + ours
    kernels = forward + rest
    return StepCount(
        name,
        num_nodes,
        compiled,
        len(kernels),
        len(forward) / base.info.num_layers,
        sum(kernel.num_bytes for kernel in kernels),
        weight_bytes(base),
    )


BANDWIDTHS = {"H200, 4.8 TB/s": 4.8e12, "H100, 3.35 TB/s": 3.35e12}
NODES = (1, 16, 64)
PER_KERNEL = 1.0  # µs from one kernel of a graph to the next: assumed, not measured


def table(rows: Iterable[StepCount], per_kernel: float = PER_KERNEL) -> str:
    """Markdown for docs/BENCHMARKS.md: counts, and what they promise beside the floor."""
    heads = [f"{name}: floor, step, ratio" for name in BANDWIDTHS]
    lines = [
        "| shape | nodes | compile | kernels | a layer | GB moved | " + " | ".join(heads) + " |"
    ]
    lines.append("|---|" + "---:|" * (lines[0].count("|") - 2))
    for row in rows:
        cells = [row.shape, str(row.num_nodes), "yes" if row.compiled else "no"]
        cells += [
            str(row.num_kernels),
            f"{row.kernels_per_layer:.1f}",
            f"{row.num_bytes / 1e9:.2f}",
        ]
        for bandwidth in BANDWIDTHS.values():
            floor, step = row.floor_microseconds(bandwidth), row.microseconds(bandwidth, per_kernel)
            cells.append(f"{floor / 1e3:.2f} ms, {step / 1e3:.2f} ms, {step / floor:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def all_counts() -> list[StepCount]:
    """The table of docs/BENCHMARKS.md; minutes on a CPU, nearly all of them torch.compile's."""
    return [count_shape(name, num_nodes, compiled)
            for name in SHAPES for compiled in (False, True) for num_nodes in NODES]  # fmt: skip


if __name__ == "__main__":
    print(table(all_counts()))
