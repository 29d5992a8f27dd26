"""The part `step`: counts the kernels and bytes of a captured step, and estimates its time.

The step is the real one (`GraphStep`), over shapes without weights; attention is counted as the
Triton backend's launches. Times are a roofline: all bytes at the memory's full bandwidth, as if
the caches on the chip kept nothing, and a fixed time from each kernel to the next.

Shapes: B batch, N nodes with root.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from medusa_kit import console
from medusa_kit.base.model import BaseModel
from medusa_kit.bench.gpu_check.inductor import inductor_kernels
from medusa_kit.bench.gpu_check.report import Report
from medusa_kit.bench.gpu_check.shapes import SHAPES, TritonLaunches, base_of_shape, step_of_shape
from medusa_kit.bench.gpu_check.tracing import Kernel, kernels_of, traced
from medusa_kit.infer.cuda_graph.step import GraphStep

NODES = (1, 16, 64)
LENGTH, NUM_SLOTS = 1024, 2048  # tokens of the row, and slots of its cache
BANDWIDTHS = {"4.8 TB/s": 4.8e12, "3.35 TB/s": 3.35e12}  # an H200's and an H100's
PER_KERNEL = 1.0  # µs from one kernel of a graph to the next: assumed, not measured
OURS = ("split_kernel", "merge_kernel")
# The most kernels of a Llama's forward, compiled or not, so that no new one goes unnoticed: in each
# layer, and once for embedding, masks, rotary tables, the last norm and logits.
MOST_A_LAYER, MOST_ONCE = {False: 41, True: 15}, 40


@dataclass(frozen=True)
class StepCount:
    """The kernels of a step, those in the model's forward, and the bytes that all of them move.

    `floor`: the bytes of weights that a plain forward reads.
    """

    shape: str
    num_nodes: int
    compiled: bool
    num_kernels: int
    in_the_forward: int
    num_layers: int
    num_bytes: int
    floor: int

    @property
    def kernels_per_layer(self) -> float:
        return self.in_the_forward / self.num_layers

    def milliseconds(self, bytes_per_second: float, per_kernel: float = PER_KERNEL) -> float:
        """`per_kernel`: µs from one kernel to the next."""
        return 1e3 * self.num_bytes / bytes_per_second + 1e-3 * per_kernel * self.num_kernels

    def floor_milliseconds(self, bytes_per_second: float) -> float:
        return 1e3 * self.floor / bytes_per_second


def count_step(step: GraphStep, attention: TritonLaunches) -> tuple[list[Kernel], list[Kernel]]:
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
    """The bytes of weights that every forward reads: all but the input embedding, of which it reads
    only rows, unless it is also the output embedding."""
    tied = base.config.tie_word_embeddings
    embedding = base.model.get_input_embeddings().weight
    weights = {id(weight): weight.nbytes for weight in base.model.parameters()}
    return sum(weights.values()) - (0 if tied else embedding.nbytes)


def count_base(
    base: BaseModel, name: str, num_nodes: int, compiled: bool,
    length: int = LENGTH, num_slots: int = NUM_SLOTS,
) -> StepCount:  # fmt: skip
    """One row of `length` tokens, in the dtype of the base."""
    attention = TritonLaunches(length)
    step = step_of_shape(base, num_nodes, num_slots, attention)
    forward, rest = count_step(step, attention)
    if compiled:
        ours = [kernel for kernel in forward if kernel.name in OURS]
        forward = inductor_kernels(step) + ours
    kernels = forward + rest
    return StepCount(
        name,
        num_nodes,
        compiled,
        len(kernels),
        len(forward),
        base.info.num_layers,
        sum(kernel.num_bytes for kernel in kernels),
        weight_bytes(base),
    )


def check(quick: bool) -> Report:
    """The part `step` of `make gpu-check`. It takes minutes, nearly all in torch.compile."""
    shapes = {name: dict(shape) for name, shape in SHAPES.items()}
    if quick:
        shapes = {"2 layers of SmolLM2": {**shapes["SmolLM2-135M"], "num_hidden_layers": 2}}
    rows, misses = list[StepCount](), list[str]()
    cases = [(name, compiled) for name in shapes for compiled in (False, True)]
    with console.progress("counting", len(cases) * len(NODES), "steps") as bar:
        for name, compiled in cases:
            base, found = base_of_shape(shapes[name]), list[StepCount]()
            try:
                for nodes in NODES:
                    found.append(count_base(base, name, nodes, compiled))
                    bar.advance(note=name)
            except RuntimeError as error:  # HostRead is one
                misses.append(f"{name}: the step does not trace to one graph: {error}")
                continue
            rows += found
            misses += _misses(found)
    columns = ["shape", "nodes", "compiled", "kernels", "a layer", "GB moved", "GB of weights"]
    columns += [f"ms at {name}: weights, step" for name in BANDWIDTHS]
    title = f"Steps, counted ({PER_KERNEL} µs a kernel assumed)"
    return Report(title, columns, list(map(_cells, rows)), list(map(asdict, rows)), misses)


def _misses(found: list[StepCount]) -> Iterator[str]:
    """`found`: the counts of one shape, by number of nodes."""
    first = found[0]
    most = MOST_A_LAYER[first.compiled] * first.num_layers + MOST_ONCE
    what = f"{first.shape}, {'compiled' if first.compiled else 'not compiled'}"
    for row in found:
        if row.in_the_forward > most:
            yield f"{what}: {row.in_the_forward} kernels in the forward, at most {most} expected"
    trees = {row.num_kernels for row in found if row.num_nodes > 1}
    if len(trees) > 1:
        yield f"{what}: kernels grow with the nodes of a tree: {sorted(trees)}"


def _cells(row: StepCount) -> list[str]:
    cells = [row.shape, str(row.num_nodes), "yes" if row.compiled else "no"]
    cells += [str(row.num_kernels), f"{row.kernels_per_layer:.1f}"]
    cells += [f"{row.num_bytes / 1e9:.2f}", f"{row.floor / 1e9:.2f}"]
    for bandwidth in BANDWIDTHS.values():
        floor, whole = row.floor_milliseconds(bandwidth), row.milliseconds(bandwidth)
        cells.append(f"{floor:.2f}, {whole:.2f} ({whole / floor:.2f} x)")
    return cells
