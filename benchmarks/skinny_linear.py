"""Products with few rows on a CPU: torch, MKL's packed weights, inductor, and the C++ kernels.

    python benchmarks/skinny_linear.py --rows 1 2 4 8 16

Runs all linear layers of the embedded model once, as a verify step does, in one interleaved run,
and prints medians in ms and the time to read as many bytes. `blocks` are those of the GGUF file,
which are exact; `int8` are weights rounded to eight bits, which is lossy.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from medusa_kit import console
from medusa_kit.base.files import gguf_source
from medusa_kit.base.loading import load_base_model
from medusa_kit.infer.cpu.linear import make_native
from medusa_kit.infer.cpu.packed.gguf_blocks import GGUFBlocks
from medusa_kit.infer.cpu.packed.int8_weights import int8_blocks
from medusa_kit.infer.mkl_linear import install_packed_linears, pack_for_rows

Run = Callable[[dict[int, Tensor]], Any]


def copies(layers: list[nn.Linear]) -> nn.ModuleList:
    """The same weights in new plain layers, which will be replaced."""
    return nn.ModuleList(bare(layer, layer.weight.detach()) for layer in layers)


def bare(layer: nn.Linear, weight: Tensor) -> nn.Linear:
    copy = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    copy.weight = nn.Parameter(weight, requires_grad=False)
    return copy


def through(layers: nn.ModuleList) -> Run:
    return lambda inputs: [layer(inputs[layer.in_features]) for layer in layers]


def native(layers: list[nn.Linear], kind: str, blocks: dict[int, Any]) -> tuple[Run, int]:
    """Our kernels over weights of a kind: (what to run, bytes that it reads)."""
    chosen, size = nn.ModuleList(), 0
    for number, layer in enumerate(layers):
        weight, own = layer.weight.detach(), None
        if kind == "bfloat16":
            weight = weight.bfloat16().float()
        elif kind == "int8":
            own = int8_blocks(weight)
            weight = own.expand()
        elif kind == "blocks":
            own = blocks.get(number)
        copy = bare(layer, weight)
        make_native(copy, own)
        size += copy.packed.num_bytes  # type: ignore[operator, union-attr]
        chosen.append(copy)
    return through(chosen), size


def inductor(layers: list[nn.Linear]) -> Run:
    """torch.compile with freezing and max-autotune: weights are packed ahead, kernels timed."""
    import torch._inductor.config as inductor_config

    inductor_config.freezing = True
    chosen = copies(layers)

    def whole(*inputs: Tensor) -> list[Tensor]:
        by_width = {x.shape[1]: x for x in inputs}
        return [layer(by_width[layer.in_features]) for layer in chosen]

    compiled = torch.compile(whole, mode="max-autotune-no-cudagraphs", dynamic=False)
    return lambda inputs: compiled(*inputs.values())


def floor(num_bytes: int, repeats: int = 9) -> float:
    """Seconds to read that many bytes once."""
    buffer, times = torch.ones(num_bytes // 4), []
    for _ in range(repeats):
        start = time.perf_counter()
        buffer.sum()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@torch.inference_mode()
def measure(
    runs: dict[str, Run], rows: int, layers: list[nn.Linear], repeats: int
) -> dict[str, float]:
    inputs = {layer.in_features: torch.randn(rows, layer.in_features) for layer in layers}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 2):
        for name, run in runs.items():
            start = time.perf_counter()
            run(inputs)
            if repeat >= 2:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--inductor", action="store_true", help="minutes of compiling for each row count"
    )
    options = parser.parse_args()
    base = load_base_model("smollm2-135m-instruct", device="cpu")
    names = {module: name for name, module in base.model.named_modules()}
    layers = [module for module in base.model.modules() if type(module) is nn.Linear]
    path = gguf_source("smollm2-135m-instruct")
    assert path is not None
    found, gguf, config = {}, GGUFBlocks(path), base.config
    for number, layer in enumerate(layers):
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        name = names[layer].replace("lm_head", "model.embed_tokens")
        found[number] = gguf.find(name, layer.weight, heads.get(name.rsplit(".", 1)[-1], 1))
    packed = copies(layers)
    install_packed_linears(packed)
    runs: dict[str, Run] = {"torch": through(copies(layers)), "MKL, packed": through(packed)}
    sizes = {}
    for kind in ("float32", "bfloat16", "blocks", "int8"):
        runs[f"C++, {kind}"], sizes[f"C++, {kind}"] = native(layers, kind, found)
    sizes["torch"] = sizes["MKL, packed"] = sizes["C++, float32"]
    columns = []
    for rows in options.rows:
        pack_for_rows(packed, rows)
        tried = dict(runs)
        if options.inductor:
            tried["inductor"] = inductor(layers)
            sizes["inductor"] = sizes["C++, float32"]
        columns.append(measure(tried, rows, layers, options.repeats))
    table = [
        (name, f"{sizes[name] / 1e6:,.0f}", f"{floor(sizes[name]) * 1e3:.1f}",
         *(f"{column[name] * 1e3:.1f}" for column in columns))
        for name in columns[0]
    ]  # fmt: skip
    heads_row = (
        "kernel",
        "MB",
        "reading them once, ms",
        *(f"{rows} rows, ms" for rows in options.rows),
    )
    console.out.print(console.table(f"all {len(layers)} linear layers once", heads_row, table))


if __name__ == "__main__":
    main()
