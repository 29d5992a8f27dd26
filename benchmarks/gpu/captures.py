"""What capturing costs: time and memory of all forwards that a batch has at its start."""

from functools import partial
from typing import Any

import torch

from benchmarks.gpu.runner import Part
from benchmarks.gpu.steps import forwards_of
from benchmarks.gpu.workbench import CAPTURED, Cannot, Workbench
from medusa_kit.bench.gpu.shapes import Shape
from medusa_kit.infer.device.verifier import CapturedVerifier

ROWS, SLOTS = 32, 4096


@torch.inference_mode()
def captures(shape: Shape, bench: Workbench) -> dict[str, Any]:
    """Raises Cannot where forwards are not captured."""
    verifier = bench.engine(shape, CAPTURED).verifier
    if not isinstance(verifier, CapturedVerifier):
        raise Cannot(f"steps are run by {verifier.steps_run_by}")
    rows = bench.size(ROWS, 4)
    cache = verifier.new_cache(rows, bench.size(SLOTS, 300))
    verifier.read_prompts(cache, [0], [[0]])  # allocates the cache
    cache.lengths = [0] * rows
    before = _reserved(bench)
    loose = verifier.num_loose
    _, seconds = bench.clock.once(lambda: verifier.prepare(cache, rows))
    forwards, after = forwards_of(cache), _reserved(bench)
    found = {
        "rows": rows,
        "forwards": len(forwards),
        "seconds": seconds,
        "ms_each": 1e3 * seconds / max(1, len(forwards)),
        "loose": verifier.num_loose - loose,
        "cache_gb": cache.num_bytes / 1e9,
        "slots_for_32": verifier.positions_for(ROWS),
        "refused": verifier.refused,
    }
    if before is not None and after is not None:
        found |= {"graphs_gb": (after - before) / 1e9}
    return found


def _reserved(bench: Workbench) -> int | None:
    """Bytes that the process holds of the device's memory."""
    if not bench.clock.on_cuda:
        return None
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(bench.device)


def capture_part(shape: Shape) -> Part:
    name = f"{shape.name}: capturing what {ROWS} rows need"
    return Part(name, "captures", partial(captures, shape), 15.0, shape.name)
