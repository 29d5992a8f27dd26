"""The part `step`: counts a captured forward's kernels, bytes and memory, and estimates its time.

It is the real one (`CapturedForward.run`), over shapes without weights; attention is counted as the
Triton backend's launches. Times are a roofline: all bytes at the memory's full bandwidth, as if
the caches on the chip kept nothing, and a fixed time from each kernel to the next.

Shapes: B rows, N nodes of each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from benchmarks.gpu_check.inductor import inductor_kernels
from benchmarks.gpu_check.report import Report
from benchmarks.gpu_check.shapes import (
    SHAPES,
    TritonLaunches,
    base_of_shape,
    forward_of_shape,
    no_model,
)
from benchmarks.gpu_check.tracing import Kernel, kernels_of, peak_bytes, traced
from medusa_kit import console
from medusa_kit.base.model import BaseModel

CASES = ((1, 1), (1, 16), (1, 64), (8, 1), (8, 16), (32, 1), (32, 8))  # rows, nodes of each
COMPILED = ((1, 64),)  # those that are compiled too, which takes most of the time
LENGTH, NUM_SLOTS = 1024, 2048  # tokens of a row, and slots of its cache
BANDWIDTHS = {"4.8 TB/s": 4.8e12, "3.35 TB/s": 3.35e12}  # an H200's and an H100's
PER_KERNEL = 1.0  # µs from one kernel of a graph to the next: assumed, not measured
OURS = ("split_kernel", "merge_kernel")
# The most kernels of a Llama's forward, compiled or not, so that no new one goes unnoticed: in each
# layer, and once for embedding, trees, rotary tables, the last norm, logits and likeliest tokens;
# four kernels of them say where a node has no token (infer/likeliest.py).
MAX_A_LAYER, MAX_ONCE = {False: 44, True: 18}, 50


@dataclass(frozen=True)
class Count:
    """The kernels of a captured forward, the bytes that they move and the memory that they need.

    `floor`: the bytes of weights that a plain forward reads.
    """

    shape: str
    rows: int
    num_nodes: int
    compiled: bool
    num_kernels: int
    num_layers: int
    num_bytes: int
    memory: int | None  # None: not known of compiled ones
    floor: int

    @property
    def kernels_per_layer(self) -> float:
        return self.num_kernels / self.num_layers

    def milliseconds(self, bytes_per_second: float, per_kernel: float = PER_KERNEL) -> float:
        """`per_kernel`: µs from one kernel to the next."""
        return 1e3 * self.num_bytes / bytes_per_second + 1e-3 * per_kernel * self.num_kernels

    def floor_milliseconds(self, bytes_per_second: float) -> float:
        return 1e3 * self.floor / bytes_per_second


def weight_bytes(base: BaseModel) -> int:
    """The bytes of weights that every forward reads: all but the input embedding, of which it reads
    only rows, unless it is also the output embedding."""
    tied = base.config.tie_word_embeddings
    embedding = base.model.get_input_embeddings().weight
    weights = {id(weight): weight.nbytes for weight in base.model.parameters()}
    return sum(weights.values()) - (0 if tied else embedding.nbytes)


def kernels_of_forward(
    base: BaseModel, rows: int, nodes: int, length: int = LENGTH, num_positions: int = NUM_SLOTS
) -> tuple[list[Kernel], int]:
    """(its kernels, bytes of memory) for rows of `length` tokens, in the dtype of the base."""
    attention = TritonLaunches(length)
    captured = forward_of_shape(base, nodes, num_positions, attention, rows)
    attention.launches.clear()
    graph = traced(captured.run)
    ours = [Kernel(one.name, one.num_bytes) for one in attention.launches]
    return kernels_of(graph) + ours, peak_bytes(graph)


def compiled_kernels(base: BaseModel, rows: int, nodes: int, plain: list[Kernel]) -> list[Kernel]:
    """The same once the model's forward is compiled, but not what is captured around it. `plain`:
    before."""
    attention = TritonLaunches(LENGTH)
    captured = forward_of_shape(base, nodes, NUM_SLOTS, attention, rows)
    compiled = inductor_kernels(base, captured, attention) + [k for k in plain if k.name in OURS]
    return compiled + kernels_around(base, rows, nodes)


def kernels_around(base: BaseModel, rows: int, nodes: int) -> list[Kernel]:
    """Those that are captured besides the model's: trees and positions before it, likeliest tokens
    after it."""
    attention = TritonLaunches(LENGTH)
    captured = forward_of_shape(base, nodes, NUM_SLOTS, attention, rows, no_model(base))
    return kernels_of(traced(captured.run))


def count(base: BaseModel, name: str, rows: int, nodes: int) -> Iterator[Count]:
    """One forward as it is and, of COMPILED, compiled."""
    kernels, memory = kernels_of_forward(base, rows, nodes)
    layers, floor = base.info.num_layers, weight_bytes(base)

    def counted(kernels: list[Kernel], compiled: bool) -> Count:
        moved = sum(kernel.num_bytes for kernel in kernels)
        taken = None if compiled else memory
        return Count(name, rows, nodes, compiled, len(kernels), layers, moved, taken, floor)

    yield counted(kernels, False)
    if (rows, nodes) in COMPILED:
        yield counted(compiled_kernels(base, rows, nodes, kernels), True)


def check(quick: bool) -> Report:
    """The part `step` of `make gpu-check`. It takes minutes, nearly all in torch.compile."""
    shapes = {name: dict(shape) for name, shape in SHAPES.items()}
    if quick:
        shapes = {"2 layers of SmolLM2": {**shapes["SmolLM2-135M"], "num_hidden_layers": 2}}
    found, misses = list[Count](), list[str]()
    with console.progress("counting", len(shapes) * len(CASES), "forwards") as bar:
        for name, shape in shapes.items():
            base = base_of_shape(shape)
            for rows, nodes in CASES:
                try:
                    found += count(base, name, rows, nodes)
                except RuntimeError as error:  # HostRead is one
                    misses.append(f"{name}: the forward does not trace to one graph: {error}")
                bar.advance(note=name)
    misses += _misses(found)
    columns = ["shape", "rows", "nodes of each", "compiled", "kernels", "a layer", "GB moved"]
    columns += ["GB of weights", "MB of memory"]
    columns += [f"ms at {name}: weights, forward" for name in BANDWIDTHS]
    title = f"Captured forwards, counted ({PER_KERNEL} µs a kernel assumed)"
    return Report(title, columns, list(map(_cells, found)), list(map(asdict, found)), misses)


def _misses(found: Sequence[Count]) -> Iterator[str]:
    seen: dict[tuple[str, bool, bool], Count] = {}
    for row in found:
        most = MAX_A_LAYER[row.compiled] * row.num_layers + MAX_ONCE
        what = f"{row.shape}, {row.rows} x {row.num_nodes} nodes"
        what += ", compiled" if row.compiled else ""
        if row.num_kernels > most:
            yield f"{what}: {row.num_kernels} kernels, at most {most} expected"
        first = seen.setdefault((row.shape, row.compiled, row.rows > 1), row)  # one is not padded
        if not row.compiled and row.num_kernels != first.num_kernels:  # fusions depend on sizes
            other = f"{first.rows} x {first.num_nodes} nodes ({first.num_kernels})"
            yield f"{what}: {row.num_kernels} kernels, as many as for {other} expected"


def _cells(row: Count) -> list[str]:
    cells = [row.shape, str(row.rows), str(row.num_nodes), "yes" if row.compiled else "no"]
    cells += [str(row.num_kernels), f"{row.kernels_per_layer:.1f}"]
    cells += [f"{row.num_bytes / 1e9:.2f}", f"{row.floor / 1e9:.2f}"]
    cells += ["" if row.memory is None else f"{row.memory / 1e6:.1f}"]
    for bandwidth in BANDWIDTHS.values():
        floor, whole = row.floor_milliseconds(bandwidth), row.milliseconds(bandwidth)
        cells.append(f"{floor:.2f}, {whole:.2f} ({whole / floor:.2f} x)")
    return cells
