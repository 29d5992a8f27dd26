"""Which backend computes tree attention, layer by layer, and which layers fell back to another one.

`auto`: on CUDA the first that can do a case, in the order of fewest kernels a layer (counted in
tests' test_backend_costs.py): `triton`, `flash`, `sdpa`, but `flash` first where no slot is
hidden from any node and one of torch's kernels does it all; elsewhere `sdpa`.
What turns out not to run or to compute something wrong is ruled out, and the next one goes on.
A backend that was asked for by name runs, or the reason why it cannot is an error.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from medusa_kit import console
from medusa_kit.errors import ConfigError
from medusa_kit.infer.attention import flash, triton_backend
from medusa_kit.infer.attention.backend import Backend, BackendFailure, Case
from medusa_kit.infer.attention.sdpa import tree_sdpa
from medusa_kit.infer.tree_step import TreeStep
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
    """The backend asked for, and what it comes down to for each case that a model brings.

    `fixed_shapes`: only those that need no length on the host are in question.
    Raises ConfigError for a name that is unknown or not installed.
    """

    def __init__(self, asked: str = "auto", fixed_shapes: bool = False) -> None:
        check_value("attention", asked)
        absent = BACKENDS[asked].missing() if asked != "auto" else None
        if absent:
            what, extra = absent
            raise ConfigError(
                f"attention {asked!r} was asked for, but {what}",
                hint=f"pip install 'medusa-kit[{extra}]', or use attention auto",
            )
        self.asked, self.fixed_shapes = asked, fixed_shapes
        self.fallbacks: list[str] = []
        self.split_finely = False  # while the check at load wants to see rows split and merged
        self.ruled_out: dict[str, str] = {}  # by name: what was seen to go wrong
        self._chosen: dict[Case, str] = {}

    def for_fixed_shapes(self) -> "AttentionChoice":
        """The same for steps of fixed shapes: what was ruled out stays so, and what they leave to
        another backend is listed among the fallbacks of this one."""
        choice = AttentionChoice(self.asked, fixed_shapes=True)
        choice.ruled_out, choice.fallbacks = dict(self.ruled_out), self.fallbacks
        return choice

    @property
    def name(self) -> str:
        """The backends in use, the one that does the first layer first, as in `flash+sdpa`."""
        used = dict.fromkeys(self._chosen.values())
        return "+".join(used) or self.asked

    def report(self) -> dict[str, Any]:
        """For reports: what was asked for, what is in use, and why that is not the same."""
        return {"asked": self.asked, "used": self.name, "fallbacks": list(self.fallbacks)}

    def attend(
        self,
        query_BHNE: Tensor,
        key_BGLE: Tensor,
        value_BGLE: Tensor,
        step: TreeStep,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Attention output [B, N, H, E] by the backend that this case goes to.

        Raises ConfigError for the one that was asked for by name and cannot run here.
        """
        hides = softcap is not None or sinks_H is not None or not step.sees_all(window)
        case = Case.of(query_BHNE, value_BGLE, softcap, sinks_H, hides)
        name = self._chosen.get(case) or self.choose(case)
        step.split_finely = self.split_finely
        arguments = (query_BHNE, key_BGLE, value_BGLE, step, scale, window, softcap, sinks_H)
        try:
            return BACKENDS[name].attend(*arguments)
        except BackendFailure as error:
            if self.asked != "auto":
                raise cannot_use(name, str(error)) from error
            self.rule_out(name, str(error))
            console.warn(f"attention {name} cannot run here: {error}")
        return self.attend(*arguments)

    def rule_out(self, name: str, reason: str) -> None:
        """Use the next backend instead from now on."""
        self.ruled_out[name] = reason
        self._chosen = {case: used for case, used in self._chosen.items() if used != name}

    def exchangeable(self) -> str | None:
        """The backend in use that another could stand in for: not one asked for, nor the last."""
        if self.asked != "auto":
            return None
        return next((name for name in self._chosen.values() if name != "sdpa"), None)

    def choose(self, case: Case) -> str:
        """The first backend of those in question that can do the case.

        Raises ConfigError for the one that was asked for by name and cannot; `sdpa` always can.
        """
        reasons: list[str] = []
        for name in self._candidates(case):
            reason = self.ruled_out.get(name) or BACKENDS[name].unsupported(case)
            if reason is None:
                break
            if self.asked != "auto":
                raise cannot_use(name, reason)
            reasons.append(f"{name}: {reason}")
        self._chosen[case] = name
        self._note(reasons, name)
        return name

    def _candidates(self, case: Case) -> Iterable[str]:
        if self.asked != "auto":
            return (self.asked,)
        if case.device != "cuda":
            return ("sdpa",)
        names = FOR_TREES if case.hides else WHERE_ALL_IS_SEEN
        return [n for n in names if not (self.fixed_shapes and BACKENDS[n].reads_lengths)]

    def _note(self, reasons: list[str], name: str) -> None:
        for reason in reasons:
            line = f"{reason}; {name} instead"
            if line not in self.fallbacks:
                self.fallbacks.append(line)


def check_before_loading(asked: str, device: str, dtype: torch.dtype) -> None:
    """Raises ConfigError for a backend that can do no model there, whatever its heads are like."""
    choice = AttentionChoice(asked)
    if asked != "auto":
        choice.choose(Case(device, dtype, 64, 64))


def cannot_use(name: str, reason: str) -> ConfigError:
    """For a backend that was asked for by name."""
    return ConfigError(
        f"attention {name!r} was asked for, but cannot be used here: {reason}",
        hint="use attention auto, which takes what can be used, or sdpa, which always can",
    )
