"""What torch.compile would launch on a GPU, from Inductor's scheduler, without a GPU.

The compiled forward is traced by Dynamo as on CUDA, in one piece and with our Triton
kernels inside. Its graph is then moved to a CUDA device that is not there, and Inductor lowers,
fuses and schedules it for compute capability 9.0: one scheduled node is one generated kernel or one
call of cuBLAS. Nothing is generated or compiled. Passes that fold constants are left out, since
they would run operations on the device. All this uses internals of torch, as of version 2.13.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from math import prod
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu_check.shapes import CORES, cores_of_a_gpu
from benchmarks.gpu_check.tracing import Kernel
from medusa_kit.base.model import BaseModel
from medusa_kit.infer.attention import triton_backend
from medusa_kit.infer.attention.choice import AttentionChoice
from medusa_kit.infer.device.captured import CapturedForward
from medusa_kit.infer.device.compiled import compiled_forward

GPU = torch.device("cuda", 0)
CAPABILITY = (9, 0)
PROPERTIES = {
    "multi_processor_count": CORES, "major": CAPABILITY[0], "warp_size": 32,
    "regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048,
}  # fmt: skip


class Scheduled(Exception):
    """Stops the compiler after scheduling; carries the kernels."""

    def __init__(self, kernels: list[Kernel]) -> None:
        super().__init__("scheduled")
        self.kernels = kernels


def inductor_kernels(
    base: BaseModel,
    captured: CapturedForward,
    attention: AttentionChoice,
    attend: Any = triton_backend.tree_triton,
) -> list[Kernel]:
    """The kernels of the model's forward once it is compiled, without ours of tree attention.

    Raises RuntimeError where it does not compile in one piece.
    """
    found: list[list[Kernel]] = []
    patch = mock.patch.object(attention, "attend", attend)
    with patch, torch.inference_mode(), cores_of_a_gpu(), _as_if_triton_ran():
        captured.scores(compiled_forward(base, _Backend(found)))
    if len(found) != 1:
        raise RuntimeError(f"the compiled forward came out as {len(found)} graphs, not one")
    return found[0]


class _Backend:
    """A backend of torch.compile that schedules each graph, then runs it uncompiled."""

    def __init__(self, found: list[list[Kernel]]) -> None:
        self.found = found

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._inductor import compile_fx

        def skip(module: Any, *_: Any, **__: Any) -> Any:
            return module

        with mock.patch.object(compile_fx, "_recursive_joint_graph_passes", skip):
            try:
                compile_fx.compile_fx(graph, inputs, inner_compile=_schedule)
            except Scheduled as done:
                self.found.append(done.kernels)
        return lambda *args: _empty_outputs(graph)


def _empty_outputs(graph: Any) -> Any:
    (outputs,) = next(node for node in graph.graph.nodes if node.op == "output").args
    values = [one.meta["example_value"] for one in outputs]  # fake tensors, which go with no others
    return tuple(torch.empty(tuple(v.shape), dtype=v.dtype, device="meta") for v in values)


def _schedule(module: Any, inputs: Any, **_: Any) -> Any:
    """From a graph to a schedule as in Inductor (compile_fx.py, codegen_and_compile)."""
    from torch._guards import detect_fake_mode
    from torch._inductor import compile_fx
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    mode = detect_fake_mode(inputs)
    assert mode is not None
    _put_on_the_gpu(module)
    with _as_if_cuda(), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        with mode:
            inputs = [_on_the_gpu(one) for one in inputs]
        compile_fx.view_to_reshape(module)
        FakeTensorProp(module, mode).propagate_dont_convert_inputs(*inputs)
        compile_fx._recursive_record_original_output_strides(module)
        compile_fx._recursive_post_grad_passes(module, is_inference=True)
        graph = GraphLowering(
            module, example_inputs=inputs, shape_env=mode.shape_env, is_inference=True
        )
        with V.set_graph_handler(graph):
            graph.run(*inputs)
            graph.init_wrapper_code()
            graph._update_scheduler()
            raise Scheduled(list(_kernels(graph)))


def _on_the_gpu(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=GPU)


def _put_on_the_gpu(module: Any) -> None:
    def moved(argument: Any) -> Any:
        return GPU if isinstance(argument, torch.device) else argument

    for node in module.graph.nodes:
        node.args = torch.fx.node.map_aggregate(node.args, moved)
        node.kwargs = torch.fx.node.map_aggregate(node.kwargs, moved)


def _kernels(graph: Any) -> Iterator[Kernel]:
    from torch._inductor.ir import UserDefinedTritonKernel
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

    for node in graph.scheduler.nodes:
        if isinstance(node, NopKernelSchedulerNode):
            continue
        if isinstance(node, ExternKernelSchedulerNode):
            if not isinstance(node.node, UserDefinedTritonKernel):
                name = getattr(node.node, "python_kernel_name", None) or type(node.node).__name__
                yield Kernel(str(name), node.get_read_write_buffers_sizes())
            continue
        yield Kernel("fused", _bytes_of_fused(graph, node))


def _bytes_of_fused(graph: Any, node: Any) -> int:
    """The bytes that a generated kernel moves: of each buffer no more than its iterations touch.
    Inductor would count the whole embedding for a gather and the whole cache for a scatter."""
    sizes = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
    most = max(prod(map(int, chain(*part.get_ranges()))) for part in node.get_nodes())
    return sum(min(size, most * graph.get_dtype(name).itemsize) for name, size in sizes.items())


@contextmanager
def _as_if_triton_ran() -> Iterator[None]:
    """Makes Dynamo keep Triton's kernels in the graph, which it does only where they can run."""
    import triton
    from torch.utils import _triton
    from triton.backends.compiler import GPUTarget

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)

        def get_current_device(self) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return GPU

    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(Driver())
    try:
        with mock.patch.object(_triton, "has_triton", return_value=True):
            yield
    finally:
        triton.runtime.driver._active = before


@contextmanager
def _as_if_cuda() -> Iterator[None]:
    """Answers Inductor's questions about the device before it generates code."""
    from torch._inductor import scheduler
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._subclasses import fake_tensor

    known = DeviceProperties(type="cuda", index=0, cc=90, **PROPERTIES)
    properties = SimpleNamespace(name="counted", minor=0, total_memory=80 << 30, **PROPERTIES)
    stand_ins = {
        "_lazy_init": lambda: None, "is_available": lambda: True, "device_count": lambda: 1,
        "current_device": lambda: 0, "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_properties": lambda device=None: properties,
        "synchronize": lambda device=None: None,
    }  # fmt: skip
    with ExitStack() as stack:
        for name, value in stand_ins.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        # Else a torch built for CUDA asks the driver for memory first.
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context"))
        stack.enter_context(mock.patch.object(scheduler, "has_triton", return_value=True))
        create = classmethod(lambda cls, device: known)
        stack.enter_context(mock.patch.object(DeviceProperties, "create", create))
        yield
