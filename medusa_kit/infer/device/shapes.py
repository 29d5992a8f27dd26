"""Whether a model's forwards have fixed shapes: the option, obstacles, the self-check."""

from functools import partial

from medusa_kit.errors import ConfigError, IncompatibleBaseError
from medusa_kit.infer.device import fused_model
from medusa_kit.infer.device.compiled import compiled_forward
from medusa_kit.infer.device.verifier import CapturedVerifier
from medusa_kit.infer.self_check import TreeCheck, check_backends, coarsest
from medusa_kit.infer.verifier import Verifier
from medusa_kit.settings.engine import check_fixed_shapes


def check_before_loading(fixed_shapes: str, compiled: bool, device: str) -> None:
    """Raises ConfigError for a compiled forward of steps that are not used on this device."""
    if compiled and fixed_shapes == "auto" and device != "cuda":
        raise ConfigError(
            f"compile is for forwards of fixed shapes, which are not used by themselves where the "
            f"model is on {device}",
            hint="ask for them too: --fixed-shapes always (in Python fixed_shapes='always'), or "
            "leave out --compile (compiled=True)",
        )


def use_fixed_shapes(
    verifier: Verifier, check: TreeCheck, fixed_shapes: str, compiled: bool
) -> tuple[CapturedVerifier | None, TreeCheck, str | None]:
    """(a verifier of fixed shapes if there can be one, the check that then holds, why not).

    `auto` tries it on CUDA. It passes the same self-check as any verifier, and nothing in its
    forwards may wait for the host. A backend of tree attention that fails is replaced by the next.
    Raises ConfigError where fixed shapes were asked for by name and cannot be used.
    """
    check_fixed_shapes(fixed_shapes, compiled)
    check_before_loading(fixed_shapes, compiled, verifier.base.device.type)
    by_name = fixed_shapes == "always" or compiled
    on_cuda = verifier.base.device.type == "cuda"
    if fixed_shapes == "never" or not (by_name or on_cuda):
        return None, check, None
    reason = _obstacle(verifier, needs_cuda=fixed_shapes == "auto")
    if reason is None:
        base, attention = verifier.base, verifier.attention.for_fixed_shapes()
        forward = partial(compiled_forward, base) if compiled else None
        try:
            guarded = check_backends(CapturedVerifier(base, attention, guarded=True))
            captured = CapturedVerifier(base, attention, forward)
            checks = [check, guarded, check_backends(captured)]
            if (reason := captured.refused) is None:
                captured.fuse(fused_model.MODE)
                return captured, coarsest(checks), None
        except IncompatibleBaseError as error:
            reason = error.message
    if by_name:
        option = "compile" if compiled else f"fixed_shapes {fixed_shapes!r}"
        raise ConfigError(
            f"{option} was asked for, but forwards of fixed shapes cannot be used: {reason}",
            hint="leave it out; the ordinary loop decodes the same",
        )
    return None, check, reason


def _obstacle(verifier: Verifier, needs_cuda: bool) -> str | None:
    if verifier.chains_only:
        return "the model carries a state, which they have no place for"
    devices = {str(parameter.device) for parameter in verifier.base.own_model.parameters()}
    if needs_cuda and verifier.base.device.type != "cuda":
        return f"the model is on {verifier.base.device.type}"
    if len(devices) > 1:
        return f"the model lies on several devices ({', '.join(sorted(devices))})"
    if verifier.attention.requested == "flash":
        return "attention 'flash' reads lengths on the host"
    return None
