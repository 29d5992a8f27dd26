"""Whether a model decodes in steps of fixed shapes: what was asked for, obstacles, self-check."""

from functools import partial

from medusa_kit.errors import ConfigError, IncompatibleBaseError
from medusa_kit.infer.cuda_graph.compiled import compiled_forward
from medusa_kit.infer.cuda_graph.forward import StaticVerifier
from medusa_kit.infer.cuda_graph.runner import GraphRunner
from medusa_kit.infer.self_check import TreeCheck, check_backends
from medusa_kit.infer.verifier import Verifier
from medusa_kit.settings.engine import check_fixed_shapes


def check_before_loading(fixed_shapes: str, compiled: bool, device: str) -> None:
    """Raises ConfigError for a compiled forward of steps that are not used on this device."""
    if compiled and fixed_shapes == "auto" and device != "cuda":
        raise ConfigError(
            f"compile is for steps of fixed shapes, which are not used by themselves where the "
            f"model is on {device}",
            hint="ask for them too: --fixed-shapes always (in Python fixed_shapes='always'), or "
            "leave out --compile (compiled=True)",
        )


def use_fixed_shapes(
    verifier: Verifier, check: TreeCheck, fixed_shapes: str, compiled: bool
) -> tuple[GraphRunner | None, TreeCheck]:
    """Steps of fixed shapes where they can take over, and the check that then holds.

    `auto` means on CUDA. They are checked like any forward, and that nothing in them waits for the
    host; a backend of tree attention that fails leaves them to the next. Raises ConfigError where
    they were asked for by name and cannot be used.
    """
    check_fixed_shapes(fixed_shapes, compiled)
    check_before_loading(fixed_shapes, compiled, verifier.base.device.type)
    by_name = fixed_shapes == "always" or compiled
    on_cuda = verifier.base.device.type == "cuda"
    if fixed_shapes == "never" or not (by_name or on_cuda):
        return None, check
    static = StaticVerifier(verifier)
    reason = _obstacle(verifier, needs_cuda=fixed_shapes == "auto")
    if reason is None:
        try:
            checks = [check, _checked(static)]
            if compiled:
                checks.append(_checked_compiled(static))
            forward = partial(compiled_forward, verifier.base) if compiled else None
            check = max(checks, key=lambda measured: measured.rounding_tolerance)
            return GraphRunner(static, forward), check
        except IncompatibleBaseError as error:
            reason = error.message
    if by_name:
        asked = "compile" if compiled else f"fixed_shapes {fixed_shapes!r}"
        raise ConfigError(
            f"{asked} was asked for, but steps of fixed shapes cannot be used: {reason}",
            hint="leave it out; the ordinary loop decodes the same",
        )
    verifier.steps_run_by = f"torch (no fixed shapes: {reason})"
    return None, check


def _obstacle(verifier: Verifier, needs_cuda: bool) -> str | None:
    devices = {str(parameter.device) for parameter in verifier.base.model.parameters()}
    if needs_cuda and verifier.base.device.type != "cuda":
        return f"the model is on {verifier.base.device.type}"
    if len(devices) > 1:
        return f"the model lies on several devices ({', '.join(sorted(devices))})"
    if verifier.attention.asked == "flash":
        return "attention 'flash' reads lengths on the host"
    return None


def _checked(static: StaticVerifier) -> TreeCheck:
    static.guarding = True
    try:
        return check_backends(static)
    finally:
        static.guarding = False


def _checked_compiled(static: StaticVerifier) -> TreeCheck:
    """The same self-check for a compiled forward. Without the guard, which cannot look into one."""
    static.compiled = compiled_forward(static.base)
    try:
        return check_backends(static)
    finally:
        static.compiled = None
