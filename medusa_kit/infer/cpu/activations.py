"""Activations of 16 and 8 bits: what quantised weights are multiplied by, for steps in C++.

Within a precision a node's results have the same bits in any tree, batch and prompt, since sums of
integers are exact. So trees and plain decoding give the same tokens. Against float32 answers may
differ: with int16 at rare near ties, with int8 about as much as llama.cpp's do.

Shapes: B batch, X nodes of several trees, V vocabulary.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from medusa_kit import console
from medusa_kit.base.files import gguf_source, stored_config, stored_quantised
from medusa_kit.base.model import CHECKPOINT
from medusa_kit.base.placement import AUTO, pick_device
from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.verifier import WITHOUT, NativeVerifier, needed
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.model_parts import Unsupported
from medusa_kit.infer.own_rounding import difference
from medusa_kit.infer.self_check import TreeCheck, check_of, narrow_windows, score_random_trees
from medusa_kit.infer.verifier import Verifier
from medusa_kit.no_gradients import no_gradients
from medusa_kit.settings.engine import FLOAT32, INT8, INT16, EngineConfig, check_value

# The largest error of logits on the trees of the self-check, as a share of their spread.
ALLOWED = {INT16: 2e-2, INT8: 1.0}
ON_A_CPU = f"{WITHOUT}, or leave out what keeps steps from running in C++ on a CPU"
QUANTISED = f"{WITHOUT}, or a quantised GGUF file or --weights int8"
INTEGERS = f"{WITHOUT}, or a processor with AVX2, VNNI or NEON's dot products"


def check_before_loading(config: EngineConfig) -> None:
    """Raises ConfigError where options, the model's config or this machine alone rule the
    activations out."""
    if config.activations == FLOAT32:
        return
    device = pick_device(config.device).type
    if device != "cpu":
        raise needed(config.activations, "a CPU", f"the device is {device}", ON_A_CPU)
    if config.dtype not in (FLOAT32, AUTO):  # auto on a CPU is float32
        raise needed(config.activations, "dtype float32", f"it is {config.dtype}", ON_A_CPU)
    for name, usual in (("attention", "auto"), ("fixed_shapes", "never"), ("compiled", False)):
        value = getattr(config, name)
        if value not in ("auto", usual):  # fixed shapes are not used by themselves on a CPU
            reason = f"{name} {value!r} is run by torch"
            raise needed(config.activations, "steps in C++", reason, ON_A_CPU)
    _check_weights(config)
    if (lacking := _lacking_kernels()) is not None:
        raise needed(config.activations, "kernels that multiply integers", lacking, INTEGERS)


def _check_weights(config: EngineConfig) -> None:
    """Raises ConfigError for weights that are no codes of few bits, as far as files say."""
    name, revision = config.model, config.revision
    if config.weights != CHECKPOINT or stored_config(name, revision) is None:
        return
    how = stored_quantised(name, revision)
    if how is None:
        reason = f"those of {name!r} are stored as floats"
        raise needed(config.activations, "weights of 4 to 8 bits", reason, QUANTISED)
    if gguf_source(name) is None:
        reason = f"the layers of {name!r} ({how}) are run by torch"
        raise needed(config.activations, "steps in C++", reason, QUANTISED)


def _lacking_kernels() -> str | None:
    if os.environ.get(kernels.OFF_SWITCH) == "0":
        return f"{kernels.OFF_SWITCH} is 0"
    library = kernels.load_library()
    if library is None:
        return "the C++ kernels cannot be built here"
    level = library.mk_isa().decode()
    return None if kernels.has_integers(library) else f"{level} does not"


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
    if not isinstance(verifier, NativeVerifier):
        reason = f"here they are run by {verifier.steps_run_by}"
        hint = f"{WITHOUT}, or a CPU, --dtype float32 and a model whose steps run in C++"
        raise needed(activations, "steps in C++", reason, hint)
    try:
        rounded = verifier.with_activations(activations)
    except Unsupported as reason:
        hint = f"{QUANTISED} on a processor with AVX2, VNNI or NEON's dot products"
        raise needed(
            activations, "weights that are multiplied as integers", str(reason), hint
        ) from reason
    return rounded, _checked(rounded, verifier)


def activations_of(verifier: Verifier) -> str:
    """The precision of a verifier's activations, in the words of the option."""
    return verifier.activations if isinstance(verifier, NativeVerifier) else FLOAT32


def _checked(rounded: NativeVerifier, exact: NativeVerifier) -> TreeCheck:
    """The self-check of a precision: trees against own plain decoding, bit for bit, and against
    float32 within `ALLOWED`. What passed in an earlier load is remembered.

    Raises IncompatibleBaseError.
    """
    record = rounded.check_record()
    known = None if record is None or rounded.base.check else record.read()
    if known is not None and (check := check_of(known)) is not None:
        return check
    console.stage(f"checking drafting with activations {rounded.activations}")
    check = _compare(rounded, exact)
    if record is not None:
        record.write(**asdict(check), attention=rounded.attention.name)
    return check


@no_gradients
def _compare(rounded: NativeVerifier, exact: NativeVerifier) -> TreeCheck:
    with rounded.lock(), narrow_windows(rounded.windowed()):
        trees_XV, paths = score_random_trees(rounded)
        plain_XV, exact_XV = _read_plainly(rounded, paths), _read_plainly(exact, paths)
    tolerance, off = difference(trees_XV, plain_XV)
    if off:
        raise _refusal(rounded, f"logits on a tree are off by {off:.1e} of their spread", "none")
    error, allowed = difference(plain_XV, exact_XV)[1], ALLOWED[rounded.activations]
    if not error <= allowed:
        reason = f"logits are off by {error:.1e} of their spread from those in float32"
        raise _refusal(rounded, reason, f"{allowed:.0e}")
    return TreeCheck(error, tolerance)


def _read_plainly(verifier: Verifier, paths: Sequence[Sequence[int]]) -> Tensor:
    """logits_XV after each text: all but its last token as a prompt, then a step of one node."""
    scores = list[Tensor]()
    for path in paths:
        cache = verifier.new_cache(1, len(path))
        verifier.read_prompts(cache, [0], [path[:-1]])
        last = Forest.chains([path[-1:]], verifier.base.device)
        scores.append(verifier.score(cache, last, [0]).logits_NV)
    return torch.cat(scores)


def _refusal(verifier: NativeVerifier, reason: str, allowed: str) -> IncompatibleBaseError:
    return IncompatibleBaseError(
        f"activations {verifier.activations} failed the check at load on "
        f"{verifier.base.info.name!r}: {reason} (allowed: {allowed})",
        hint=WITHOUT,
    )
