"""Activations of 16 and 8 bits: what quantised weights are multiplied by, for steps in C++.

Within a precision a node's results have the same bits in any tree, batch and prompt, since sums of
integers are exact. So trees and plain decoding give the same tokens. Against float32 answers may
differ: with int16 at rare near ties, with int8 about as much as llama.cpp's do.

Shapes: B batch, X nodes of several trees, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from medusa_kit import console
from medusa_kit.errors import ConfigError, IncompatibleBaseError
from medusa_kit.infer.cpu.decoder import FLOAT32, INT8, INT16
from medusa_kit.infer.cpu.describe import Unsupported
from medusa_kit.infer.cpu.verifier import NativeVerifier
from medusa_kit.infer.self_check import (
    ROUNDS,
    TreeCheck,
    check_of,
    difference,
    narrow_windows,
    score_random_trees,
)
from medusa_kit.infer.tree_step import Nodes
from medusa_kit.infer.verifier import Verifier
from medusa_kit.no_gradients import no_gradients
from medusa_kit.settings.engine import check_value

# The largest error of logits on the trees of the self-check, as a share of their spread.
ALLOWED = {INT16: 2e-2, INT8: 1.0}


def with_activations(
    verifier: Verifier, check: TreeCheck, activations: str
) -> tuple[Verifier, TreeCheck]:
    """(a verifier of this precision, what its self-check found); `check`: that in float32.

    Raises ConfigError where steps do not run in C++, or multiply nothing in integers, and
    IncompatibleBaseError where the self-check fails.
    """
    check_value("activations", activations)
    if activations == FLOAT32:
        return verifier, check
    without = f"use activations {FLOAT32}"
    if not isinstance(verifier, NativeVerifier):
        raise ConfigError(
            f"activations {activations} need steps in C++; here they are run by "
            f"{verifier.steps_run_by}",
            hint=f"{without}, or a CPU, dtype float32 and a model whose steps run in C++",
        )
    try:
        rounded = verifier.with_activations(activations)
    except Unsupported as reason:
        raise ConfigError(
            f"activations {activations} need weights that are multiplied as integers: {reason}",
            hint=f"{without}, or a quantised GGUF file or weights int8 on a processor with AVX2, "
            "VNNI or NEON's dot products",
        ) from reason
    return rounded, _checked(rounded, verifier)


def activations_of(verifier: Verifier) -> str:
    """In the words of the option."""
    return verifier.activations if isinstance(verifier, NativeVerifier) else FLOAT32


def _checked(rounded: NativeVerifier, exact: NativeVerifier) -> TreeCheck:
    """The self-check of a precision: trees against own plain decoding, bit for bit, and against
    float32 within `ALLOWED`. What passed in an earlier load is remembered.

    Raises IncompatibleBaseError.
    """
    memory = rounded.check_memory()
    known = None if memory is None or rounded.base.check else memory.read()
    if known is not None and (check := check_of(known)) is not None:
        return check
    console.stage(f"checking drafting with activations {rounded.activations}")
    check = _compare(rounded, exact)
    if memory is not None:
        memory.write(**asdict(check), attention=rounded.attention.name)
    return check


@no_gradients
def _compare(rounded: NativeVerifier, exact: NativeVerifier) -> TreeCheck:
    with rounded.lock(), narrow_windows(rounded.windowed()):
        trees_XV, paths = score_random_trees(rounded, ROUNDS)
        plain_XV, exact_XV = _read_plainly(rounded, paths), _read_plainly(exact, paths)
    tolerance, off = difference(trees_XV, plain_XV)
    if off:
        raise _refusal(rounded, f"logits on a tree are off by {off:.1e} of their spread", "none")
    error, allowed = difference(plain_XV, exact_XV)[1], ALLOWED[rounded.activations]
    if not error <= allowed:
        found = f"logits are off by {error:.1e} of their spread from those in float32"
        raise _refusal(rounded, found, f"{allowed:.0e}")
    return TreeCheck(error, tolerance)


def _read_plainly(verifier: Verifier, paths: Sequence[Sequence[int]]) -> Tensor:
    """logits_XV after each text: all but its last token as a prompt, then a step of one node."""
    scores = list[Tensor]()
    for path in paths:
        cache = verifier.new_cache(1, len(path))
        verifier.prefill(cache, [path[:-1]])
        last = Nodes.chains([path[-1:]], verifier.base.device)
        scores.append(verifier.score_trees(cache, last, [0]).logits_NV)
    return torch.cat(scores)


def _refusal(verifier: NativeVerifier, found: str, allowed: str) -> IncompatibleBaseError:
    return IncompatibleBaseError(
        f"activations {verifier.activations} failed the check at load on "
        f"{verifier.base.info.name!r}: {found} (allowed: {allowed})",
        hint=f"use activations {FLOAT32}",
    )
