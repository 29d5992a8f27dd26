"""A forward traced on the meta device into one graph, its kernels and its memory.

A read on the host, which a CUDA graph cannot contain, and any mixing of host and device fail the
trace. Every operation of the graph that is not a view or an allocation counts as one kernel (a few,
such as sorting, launch more). It is taken to move all that it reads and writes; gathers and
scatters move only what they touch.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from benchmarks.gpu_check.shapes import META, cores_of_a_gpu
from medusa_kit.infer.device.guard import NoHostReads

aten = torch.ops.aten
# Not views by their schema, but still without a kernel.
NO_KERNEL = {
    aten._unsafe_view, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty,
    aten.detach, aten.alias, aten.lift_fresh, aten.sym_size,
}  # fmt: skip
# These read as much of their first argument as they return.
GATHERS = {aten.embedding, aten.index, aten.gather, aten.index_select}
# These write as much of it as the values that they get: operation -> index of that argument.
SCATTERS = {aten.index_put: 2, aten.index_put_: 2, aten.copy_: 1}
FILLS = {aten.fill_, aten.zero_}


@dataclass(frozen=True)
class Kernel:
    """One kernel, and the bytes it moves."""

    name: str
    num_bytes: int


def traced(work: Callable[[], object]) -> torch.fx.GraphModule:
    """One graph of all operations of `work`. Raises HostRead, or RuntimeError where a value is read
    that the meta device does not have."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def with_argument(x: Tensor) -> Tensor:  # make_fx needs one
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


def peak_bytes(graph: torch.fx.GraphModule) -> int:
    """The most that results take at once; each is freed after its last use, and views keep it. A
    CUDA graph's memory is about that: its allocator rounds up, and what it returns stays."""
    owner: dict[Any, Any] = {}  # the node whose memory a node's result is in
    last: dict[Any, int] = {}
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    for place, node in enumerate(nodes):
        owner[node] = owner.get(node.args[0], node.args[0]) if _shares(node) else node
        for used in (node, *node.all_input_nodes):
            last[owner.get(used, used)] = place
    sizes = {n: sum(map(_stored, _tensors([n.meta.get("val")]))) for n in nodes if owner[n] is n}
    held = most = 0
    ends: dict[int, int] = {}
    for node, size in sizes.items():
        ends[last[node]] = ends.get(last[node], 0) + size
    for place, node in enumerate(nodes):
        held += sizes.get(node, 0)
        most = max(most, held)
        held -= ends.get(place, 0)
    return most


def _shares(node: torch.fx.Node) -> bool:
    """Whether the result is in the first argument's memory."""
    operation: Any = node.target
    if not isinstance(operation, torch._ops.OpOverload):
        return False
    in_place = operation._schema.name.endswith("_")
    return operation.is_view or in_place or operation.overloadpacket is aten._unsafe_view


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
    """The bytes in memory: an expanded tensor is stored once."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride != 0 else 1
    return numel * tensor.element_size()
