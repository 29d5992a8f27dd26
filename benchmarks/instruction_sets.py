"""The C++ kernels' products for several instruction sets, on one processor that has them all.

    python benchmarks/instruction_sets.py --isas avx2 avx-vnni avx512-vnni --rows 1 2 4 8 16 64

Runs all linear layers of the embedded model once, as a verify step does, in one interleaved run,
and prints medians in ms. `--library NAME=FILE` adds a library that was built elsewhere.
"""

import argparse
import ctypes
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from medusa_kit import console
from medusa_kit.base.files import gguf_source
from medusa_kit.base.loading import load_base_model
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.packed.gguf_blocks import GGUFBlocks
from medusa_kit.infer.cpu.packed.packing import PackedMatrix, pack

MODEL = "smollm2-135m-instruct"


def matrices() -> list[PackedMatrix]:
    """All linear layers in the blocks of the file."""
    base = load_base_model(MODEL, device="cpu")
    path = gguf_source(MODEL)
    assert path is not None
    gguf, config, packed = GGUFBlocks(path), base.config, []
    for name, layer in base.model.named_modules():
        if type(layer) is not nn.Linear:
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        stored = name.replace("lm_head", "model.embed_tokens")
        blocks = gguf.find(stored, layer.weight, heads.get(name.rsplit(".", 1)[-1], 1))
        packed.append(pack(layer.weight.detach(), None, blocks))
    return packed


def products(
    library: ctypes.CDLL,
    packed: list[PackedMatrix],
    x: dict[int, Tensor],
    out: Tensor,
    threads: int,
) -> float:
    """Seconds for each matrix once."""
    start = time.perf_counter()
    for matrix in packed:
        read = x[matrix.struct.inputs]
        library.mk_linear(
            ctypes.byref(matrix.struct), read.data_ptr(), len(read), out.data_ptr(), threads
        )
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isas", nargs="*", default=["avx2", "avx-vnni", "avx512-vnni"])
    parser.add_argument("--library", dest="others", nargs="*", default=[], metavar="NAME=FILE")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    libraries = {isa: kernels.build(kernels.machine_flags(isa)) for isa in options.isas}
    others = (one.split("=") for one in options.others)
    libraries |= {name: ctypes.CDLL(str(Path(path))) for name, path in others}
    opened = {name: kernels.declare(library) for name, library in libraries.items()}
    packed = matrices()
    widths = {matrix.struct.inputs for matrix in packed}
    x = {rows: {width: torch.randn(rows, width) for width in widths} for rows in options.rows}
    out = torch.empty(max(options.rows), max(matrix.struct.outputs for matrix in packed))
    times: dict[tuple[str, int], list[float]] = {}
    for repeat in range(options.repeats + 2):
        for rows in options.rows:
            for name, library in opened.items():
                taken = products(library, packed, x[rows], out, options.threads)
                if repeat >= 2:
                    times.setdefault((name, rows), []).append(taken)
    table = [
        (name, *(f"{statistics.median(times[name, rows]) * 1e3:.1f}" for rows in options.rows))
        for name in opened
    ]
    heading = ("instruction set", *(f"{rows} rows, ms" for rows in options.rows))
    console.out.print(console.table(f"all {len(packed)} linear layers once", heading, table))


if __name__ == "__main__":
    main()
