"""Which backend computes tree attention in each layer, and which layers fell back to another one.

`auto`: on CUDA the first backend that supports a case, ordered by the number of kernels per layer
(counted in tests' test_backend_costs.py): `triton`, `flash`, `sdpa`. Where no slot is hidden from
any node, `flash` comes first, since one of torch's kernels computes everything. Elsewhere `sdpa`.
A backend that cannot run or computes something wrong is ruled out, and the next one takes over.
A backend that was asked for by name is used, or the reason why it cannot be is an error.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from medusa_kit import console, installing
from medusa_kit.errors import ConfigError
from medusa_kit.infer.attention import flash, triton_backend
from medusa_kit.infer.attention.backend import AttentionCall, Backend, BackendFailure, Case
from medusa_kit.infer.attention.sdpa import tree_sdpa
from medusa_kit.settings.engine import check_value

BACKENDS = {
    "flash": Backend(flash.tree_flash, flash.unsupported, reads_lengths=True),
    "triton": Backend(
        triton_backend.tree_triton, triton_backend.unsupported, triton_backend.missing
    ),
    "sdpa": Backend(tree_sdpa, lambda _: None),
}
FOR_TREES = ("triton", "flash", "sdpa")
WHERE_ALL_IS_SEEN = ("flash", "triton", "sdpa")


class AttentionChoice:
    """The backend asked for, and the one in use for each case that occurs in a model.

    `fixed_shapes`: consider only backends that do not read lengths on the host.
    Raises ConfigError for a name that is unknown or not installed.
    """

    def __init__(self, requested: str = "auto", fixed_shapes: bool = False) -> None:
        check_value("attention", requested)
        absent = BACKENDS[requested].missing() if requested != "auto" else None
        if absent:
            lack, extra = absent
            raise ConfigError(
                f"attention {requested!r} was asked for, but {lack}",
                hint=f"{installing.extra(extra)}, or use --attention auto",
            )
        self.requested, self.fixed_shapes = requested, fixed_shapes
        self.fallbacks: list[str] = []
        self.split_finely = False  # set by the self-check, so that short rows are split and merged
        self.ruled_out: dict[str, str] = {}  # by name: what went wrong
        self._chosen: dict[Case, str] = {}
        self.expected: str | None = None  # what was in use in an earlier load

    def for_fixed_shapes(self) -> "AttentionChoice":
        """The choice for forwards of fixed shapes. What was ruled out stays ruled out, and both
        share one list of fallbacks."""
        choice = AttentionChoice(self.requested, fixed_shapes=True)
        choice.ruled_out, choice.fallbacks = dict(self.ruled_out), self.fallbacks
        return choice

    @property
    def name(self) -> str:
        """The backends in use, in order of the layers, as in `flash+sdpa`."""
        used = dict.fromkeys(self._chosen.values())
        return "+".join(used) or self.expected or self.requested

    @property
    def masks(self) -> bool:
        """Whether some layer's attention reads every slot in sight and masks those unseen."""
        return "sdpa" in self._chosen.values() or self.requested == "sdpa"

    def report(self) -> dict[str, Any]:
        """For reports: what was requested, what is in use, and why the two differ."""
        return {"asked": self.requested, "used": self.name, "fallbacks": list(self.fallbacks)}

    def attend(self, call: AttentionCall) -> Tensor:
        """Attention output [B, N, H, E] by the backend for this case.

        Raises ConfigError where the backend was asked for by name and cannot run here.
        """
        case = Case.of(call)
        name = self._chosen.get(case) or self.choose(case)
        call.step.split_finely = self.split_finely
        try:
            return BACKENDS[name].attend(call)
        except BackendFailure as error:
            if self.requested != "auto":
                raise cannot_use(name, str(error)) from error
            self.rule_out(name, str(error))
            console.warn(f"attention {name} cannot run here: {error}")
        return self.attend(call)

    def rule_out(self, name: str, reason: str) -> None:
        """Use the next backend instead from now on."""
        self.ruled_out[name] = reason
        self._chosen = {case: used for case, used in self._chosen.items() if used != name}

    def replaceable(self) -> str | None:
        """A backend in use that another could replace: none requested by name, and not sdpa."""
        if self.requested != "auto":
            return None
        return next((name for name in self._chosen.values() if name != "sdpa"), None)

    def choose(self, case: Case) -> str:
        """The first candidate that supports the case; `sdpa` supports every case.

        Raises ConfigError where a backend was asked for by name and does not support it.
        """
        reasons: list[str] = []
        for name in self._candidates(case):
            reason = self.ruled_out.get(name) or BACKENDS[name].unsupported(case)
            if reason is None:
                break
            if self.requested != "auto":
                raise cannot_use(name, reason)
            reasons.append(f"{name}: {reason}")
        self._chosen[case] = name
        self._note(reasons, name)
        return name

    def _candidates(self, case: Case) -> Iterable[str]:
        if self.requested != "auto":
            return (self.requested,)
        if case.device != "cuda":
            return ("sdpa",)
        names = FOR_TREES if case.hides else WHERE_ALL_IS_SEEN
        return [n for n in names if not (self.fixed_shapes and BACKENDS[n].reads_lengths)]

    def _note(self, reasons: list[str], name: str) -> None:
        for reason in reasons:
            line = f"{reason}; {name} instead"
            if line not in self.fallbacks:
                self.fallbacks.append(line)


def check_before_loading(requested: str, device: str, dtype: torch.dtype) -> None:
    """Raises ConfigError for a backend that supports no model there, whatever its head sizes."""
    choice = AttentionChoice(requested)
    if requested != "auto":
        choice.choose(Case(device, dtype, 64, 64))


def cannot_use(name: str, reason: str) -> ConfigError:
    """The error for a backend that was requested by name."""
    return ConfigError(
        f"attention {name!r} was asked for, but cannot be used here: {reason}",
        hint="use --attention auto, which takes what can be used, or sdpa, which always can",
    )
