"""Part a. Does a draft token get the bits of text, whatever is computed beside it?

Shapes: T nodes, V vocabulary, N outputs and K inputs of a product.
"""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.fused_block.__main__ import Findings
from benchmarks.fused_block.models import (
    FAMILIES,
    random_family,
    random_trees,
    spread,
    verifier_of,
    with_prompts,
)
from medusa_kit.base.model import BaseModel
from medusa_kit.infer.attention.triton_backend import launch
from medusa_kit.infer.device.fused_model import EXACT, FAST
from medusa_kit.infer.device.fused_tiles import product_tile
from medusa_kit.infer.device.verifier import CapturedVerifier
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.infer.verifier import Verifier
from medusa_kit.no_gradients import no_gradients
from medusa_kit.tree.shape import path_to

LENGTHS, SHORT = (100, 700, 3000), (30, 61)
COUNTS, FEW = (1, 4, 16, 64), (1, 7)
OTHERS = (16, 1, 7)  # nodes of requests beside it
PATHS = 3  # of a tree, read token by token


def run(findings: Findings, options: Namespace) -> None:
    tiny = options.dry_run
    dtypes = [torch.float32] if tiny else [torch.bfloat16, torch.float32]
    for name in list(FAMILIES)[: 2 if tiny else None]:
        for dtype in dtypes:
            base = random_family(name, dtype, tiny)
            for mode in (FAST, EXACT):
                case = f"{name} {dtype} {mode}"
                findings.measure(f"logits {case}", lambda b=base, m=mode: error(b, m, tiny))
                lengths = LENGTHS if dtype != torch.float32 and not tiny else SHORT
                for length in lengths:
                    findings.measure(
                        f"bits {case} after {length}",
                        lambda b=base, m=mode, n=length: shares(b, m, n, FEW if tiny else COUNTS),
                    )
    if not tiny:
        for size in ((6144, 4096), (4096, 14336), (28672, 4096)):
            findings.measure(f"bits of one product {size}", lambda s=size: tiles(*s))


@no_gradients
def error(base: BaseModel, mode: str, tiny: bool) -> dict[str, Any]:
    """The largest difference of logits from torch's, beside that of torch from float32's size."""
    verifier = verifier_of(base, mode)
    cache = with_prompts(verifier, [61 if tiny else 700, 20], room=80)
    trees = random_trees(base, [7, 3] if tiny else [40, 7])
    plain_TV = Verifier.score(verifier, cache, trees, [0, 1]).logits_NV
    fused_TV = verifier.score(cache, trees, [0, 1]).logits_NV
    difference = float((plain_TV.double() - fused_TV.double()).abs().max())
    same = float((plain_TV.argmax(-1) == fused_TV.argmax(-1)).float().mean())
    return {"error": difference / spread(plain_TV), "same_argmax": same,
            "steps_run_by": verifier.steps_run_by}  # fmt: skip


@no_gradients
def shares(base: BaseModel, mode: str, length: int, counts: Sequence[int]) -> dict[str, Any]:
    """For trees of each size, alone and beside others: the share of nodes on a few paths whose
    logits have the bits that they get read one by one."""
    verifier, found = verifier_of(base, mode), dict[str, Any]()
    for count in counts:
        own = random_trees(base, [count])
        text = as_text(verifier, length, own)
        for others in ((), OTHERS):
            cache = with_prompts(verifier, [length, *(40 + 9 * n for n in others)], room=160)
            trees = Forest.joined([own, random_trees(base, others, 2)]) if others else own
            scores = verifier.score(cache, trees, range(1 + len(others))).logits_NV
            same = [torch.equal(scores[node], logits) for node, logits in text.items()]
            found[f"{count} nodes, {len(others)} others"] = sum(same) / len(same)
    return {**found, "captured": verifier.num_captured, "loose": verifier.num_loose}


def as_text(verifier: CapturedVerifier, length: int, tree: Forest) -> dict[int, Tensor]:
    """logits_V of the nodes on the paths to the last nodes, each token read alone."""
    (tokens,), parents = tree.token_lists(), tree.shapes[0].parents
    found = dict[int, Tensor]()
    for last in range(len(tokens) - 1, max(-1, len(tokens) - 1 - PATHS), -1):
        cache = with_prompts(verifier, [length], room=160)
        for node in path_to(last, parents):
            found[node] = read_alone(verifier, cache, tokens[node])
    return found


def read_alone(verifier: CapturedVerifier, cache: TreeCache, token: int) -> Tensor:
    scores = verifier.score(cache, Forest.chains([[token]], verifier.base.device), [0])
    cache.commit([[0]], [0])
    return scores.logits_NV[0].clone()


@no_gradients
def tiles(outputs: int, inputs: int) -> dict[str, Any]:
    """Whether a row of one product has the same bits beside 1, 16, 64 and 200 rows, by cuBLAS and
    by our tile; and by tiles of 16 and 32 rows, which would be faster for few."""
    from medusa_kit.infer.device.fused.product import product_kernel

    torch.manual_seed(0)
    weight_NK = torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda")
    rows_TK = torch.randn(200, inputs, dtype=torch.bfloat16, device="cuda")
    tile = product_tile(outputs, 2)

    def ours(count: int, block: int) -> Tensor:
        out = rows_TK.new_empty(count, outputs)
        grid = (-(-count // block), -(-outputs // tile["BLOCK_N"]))
        launch(product_kernel, grid, rows_TK[:count], weight_NK, weight_NK, out, count, inputs,
               outputs, HAS_BIAS=False, BLOCK_T=block, **tile)  # fmt: skip
        return out

    alone = ours(1, 64)[0]
    found: dict[str, Any] = {
        f"tile of {block}, {count} rows": torch.equal(ours(count, block)[0], alone)
        for block in (16, 32, 64) for count in (1, 16, 64, 200)
    }  # fmt: skip
    first = F.linear(rows_TK[:1], weight_NK)[0]
    for count in (16, 64, 200):
        found[f"cuBLAS, {count} rows"] = torch.equal(F.linear(rows_TK[:count], weight_NK)[0], first)
    exact = F.linear(rows_TK[:1].double(), weight_NK.double())[0]
    found["relative error"] = float((alone - exact).abs().max() / exact.std())
    return found
