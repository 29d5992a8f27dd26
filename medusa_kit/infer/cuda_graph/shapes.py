"""Whether a model decodes in steps of fixed shapes: the option, obstacles, the self-check."""

from functools import partial

from medusa_kit.errors import ConfigError, IncompatibleBaseError, nearest
from medusa_kit.infer.cuda_graph.compiled import compiled_forward
from medusa_kit.infer.cuda_graph.forward import StaticVerifier
from medusa_kit.infer.cuda_graph.runner import GraphRunner
from medusa_kit.infer.self_check import TreeCheck, check_backends, coarsest
from medusa_kit.infer.verifier import Verifier

FIXED_SHAPES = ("auto", "always", "never")


def check_choice(fixed_shapes: str, compiled: bool) -> None:
    """Raises ConfigError for an unknown word, or for compile with fixed shapes switched off."""
    if fixed_shapes not in FIXED_SHAPES:
        raise ConfigError(
            f"fixed_shapes {fixed_shapes!r} is unknown; expected one of {', '.join(FIXED_SHAPES)}",
            hint=f"did you mean {nearest(fixed_shapes, FIXED_SHAPES) or 'auto'}?",
        )
    if compiled and fixed_shapes == "never":
        raise ConfigError("compile has no meaning with fixed_shapes 'never'", hint="leave one out")


def use_fixed_shapes(
    verifier: Verifier, check: TreeCheck, fixed_shapes: str, compiled: bool
) -> tuple[GraphRunner | None, TreeCheck, str | None]:
    """(steps of fixed shapes if they can be used, the check that then holds, why they cannot).

    `auto` tries them on CUDA. They pass the same self-check as any forward, and nothing in them may
    wait for the host. A backend of tree attention that fails is replaced by the next. Raises
    ConfigError where they were asked for by name and cannot be used.
    """
    check_choice(fixed_shapes, compiled)
    by_name = fixed_shapes == "always" or compiled
    on_cuda = verifier.base.device.type == "cuda"
    if fixed_shapes == "never" or not (by_name or on_cuda):
        return None, check, None
    reason = _obstacle(verifier, needs_cuda=fixed_shapes == "auto")
    if reason is None:
        base, attention = verifier.base, verifier.attention.for_fixed_shapes()
        try:
            checks = [check, check_backends(StaticVerifier(base, attention, guarded=True))]
            if compiled:  # without the guard, which cannot look into a compiled forward
                one = StaticVerifier(base, attention, compiled=compiled_forward(base))
                checks.append(check_backends(one))
            forward = partial(compiled_forward, base) if compiled else None
            return GraphRunner(StaticVerifier(base, attention), forward), coarsest(checks), None
        except IncompatibleBaseError as error:
            reason = error.message
    if by_name:
        asked = "compile" if compiled else f"fixed_shapes {fixed_shapes!r}"
        raise ConfigError(
            f"{asked} was asked for, but steps of fixed shapes cannot be used: {reason}",
            hint="leave it out; the ordinary loop decodes the same",
        )
    return None, check, reason


def _obstacle(verifier: Verifier, needs_cuda: bool) -> str | None:
    devices = {str(parameter.device) for parameter in verifier.base.model.parameters()}
    if needs_cuda and verifier.base.device.type != "cuda":
        return f"the model is on {verifier.base.device.type}"
    if len(devices) > 1:
        return f"the model lies on several devices ({', '.join(sorted(devices))})"
    if verifier.attention.asked == "flash":
        return "attention 'flash' reads lengths on the host"
    return None
