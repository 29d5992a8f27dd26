"""Which requests are decoded in steps of fixed shapes, and the steps made so far.

One step, and on CUDA one captured graph, for each (rows, tree, slots); rows and slots are rounded
up, so that few are made. What a step cannot do stays on the loop of decode.py: sampling, processed
logits, typical acceptance, trees that change from step to step.

Shapes: B batch.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch

from medusa_kit import console
from medusa_kit.base_model import BaseModel
from medusa_kit.errors import ConfigError, IncompatibleBaseError, nearest
from medusa_kit.infer.drafters.base import Drafter
from medusa_kit.infer.drafters.hydra import HydraDrafter
from medusa_kit.infer.drafters.medusa import MedusaDrafter
from medusa_kit.infer.drafters.plain import PlainDrafter
from medusa_kit.infer.fixed.capture import GraphMemory, can_capture
from medusa_kit.infer.fixed.forward import FixedVerifier
from medusa_kit.infer.fixed.step import FixedStep
from medusa_kit.infer.token_choice import TokenChooser
from medusa_kit.infer.tree_check import TreeCheck, check_trees
from medusa_kit.infer.verifier import Forward, Verifier
from medusa_kit.locks import SharedLock

FIXED_SHAPES = ("auto", "always", "never")
STATIC_DRAFTERS = (PlainDrafter, MedusaDrafter, HydraDrafter)
FEWEST_SLOTS = 256
SLOTS_MULTIPLE = 64  # attention kernels like rows of the mask that are aligned
KEPT_STEPS = 2  # each holds a cache; two trees or batch sizes in turn are not captured anew


class Request(Protocol):
    """What matters of a row here (decode.Row)."""

    prompt_ids: list[int]
    chooser: TokenChooser
    max_new_tokens: int


class FixedShapes:
    """The steps of one base model. `compiled` runs its forward in place of the model's own."""

    def __init__(self, verifier: FixedVerifier, compiled: Forward | None = None) -> None:
        self.verifier, self.compiled = verifier, compiled
        self._steps: list[FixedStep] = []  # the one used last comes last
        self._graphs: GraphMemory | None = None
        self.refused: str | None = None  # why capturing failed, once it has
        self._lock = SharedLock()

    @property
    def name(self) -> str:
        """For statistics: what runs the steps."""
        forward = "torch" if self.compiled is None else "torch.compile"
        graph = " in a CUDA graph" if self.verifier.base.device.type == "cuda" else ""
        return f"{forward}, fixed shapes{graph} ({self.verifier.attention.name})"

    @contextmanager
    def borrowed(self, drafter: Drafter, rows: Sequence[Request]) -> Iterator[FixedStep | None]:
        """A step for these rows, or None where the loop has to decode them; it is theirs alone."""
        step: FixedStep | None = None
        try:
            with self._lock:
                step = self._step(drafter, rows) if self._applies(drafter, rows) else None
                if step is not None:
                    step.busy = True
            yield step
        except torch.OutOfMemoryError:
            self.forget()
            raise
        finally:
            if step is not None:
                step.busy = False

    def forget(self) -> None:
        """Give back the memory of all steps."""
        self._steps.clear()
        self._graphs = None

    def _applies(self, drafter: Drafter, rows: Sequence[Request]) -> bool:
        return (
            self.refused is None
            and type(drafter) in STATIC_DRAFTERS
            and all(row.chooser.takes_argmax for row in rows)
            and not any(step.busy for step in self._steps)  # one answer streams, another is asked
        )

    def _step(self, drafter: Drafter, rows: Sequence[Request]) -> FixedStep | None:
        longest = max(len(row.prompt_ids) + row.max_new_tokens for row in rows)
        context = self.verifier.base.info.context_length
        B = 1 << (len(rows) - 1).bit_length()
        S = num_slots(longest + drafter.num_nodes - 1, context + drafter.num_nodes - 1)
        for index, step in enumerate(self._steps):
            if (step.batch_size, step.num_slots) == (B, S) and _drafts_alike(step.drafter, drafter):
                self._steps.append(self._steps.pop(index))
                return step
        del self._steps[: len(self._steps) + 1 - KEPT_STEPS]
        return self._new_step(drafter, B, S)

    def _new_step(self, drafter: Drafter, batch_size: int, num_slots: int) -> FixedStep | None:
        device = self.verifier.base.device
        if self._graphs is None and can_capture(device):
            self._graphs = GraphMemory(device)
        try:
            step = FixedStep(
                self.verifier, cast(Any, drafter), batch_size, num_slots, self.compiled,
                self._graphs,
            )  # fmt: skip
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # the capture; the model itself has run at load
            self.refused = str(error).splitlines()[0]
            self.forget()
            console.warn(f"steps are not captured in a CUDA graph: {self.refused}")
            return None
        self._steps.append(step)
        return step


def num_slots(needed: int, most: int) -> int:
    """Slots to make where `needed` are: a power of two, but no more than can ever be used."""
    rounded = max(FEWEST_SLOTS, 1 << (needed - 1).bit_length())
    return min(rounded, -(-most // SLOTS_MULTIPLE) * SLOTS_MULTIPLE)


def _drafts_alike(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    return isinstance(one, PlainDrafter) or (one.heads is other.heads and one.tree == other.tree)


def check_choice(fixed_shapes: str, compiled: bool) -> None:
    """Raises ConfigError for a word that is none, or a compiled forward without its steps."""
    if fixed_shapes not in FIXED_SHAPES:
        raise ConfigError(
            f"fixed_shapes {fixed_shapes!r} is unknown; expected one of {', '.join(FIXED_SHAPES)}",
            hint=f"did you mean {nearest(fixed_shapes, FIXED_SHAPES) or 'auto'}?",
        )
    if compiled and fixed_shapes == "never":
        raise ConfigError("compile has no meaning with fixed_shapes 'never'", hint="leave one out")


def use_fixed_shapes(
    verifier: Verifier, check: TreeCheck, fixed_shapes: str, compiled: bool
) -> TreeCheck:
    """Let steps of fixed shapes take over where they can; the check that then holds.

    `auto` means on CUDA. They are proved like any forward, and that nothing in them waits for the
    host. Raises ConfigError where they were asked for by name and cannot be used.
    """
    check_choice(fixed_shapes, compiled)
    by_name = fixed_shapes == "always" or compiled
    on_cuda = verifier.base.device.type == "cuda"
    if fixed_shapes == "never" or not (by_name or on_cuda):
        return check
    fixed = FixedVerifier(verifier)
    reason = _obstacle(verifier, needs_cuda=fixed_shapes == "auto")
    if reason is None:
        try:
            own = _proved(fixed)
            forward = _compiled(verifier.base) if compiled else None
            verifier.fixed = FixedShapes(fixed, forward)
            return own if own.noise > check.noise else check
        except IncompatibleBaseError as error:
            reason = error.message
    if by_name:
        asked = "compile" if compiled else f"fixed_shapes {fixed_shapes!r}"
        raise ConfigError(
            f"{asked} was asked for, but steps of fixed shapes cannot be used: {reason}",
            hint="leave it out; the ordinary loop decodes the same",
        )
    verifier.steps_run_by = f"torch (no fixed shapes: {reason})"
    return check


def _obstacle(verifier: Verifier, needs_cuda: bool) -> str | None:
    devices = {str(parameter.device) for parameter in verifier.base.model.parameters()}
    if needs_cuda and verifier.base.device.type != "cuda":
        return f"the model is on {verifier.base.device.type}"
    if len(devices) > 1:
        return f"the model lies on several devices ({', '.join(sorted(devices))})"
    if verifier.attention.asked == "flash":
        return "attention 'flash' reads lengths on the host"
    return None


def _proved(fixed: FixedVerifier) -> TreeCheck:
    fixed.guarding = True
    try:
        return check_trees(fixed)
    finally:
        fixed.guarding = False


def _compiled(base: BaseModel) -> Forward:
    """torch.compile of decoder and output embedding; the load check found them equal to the model.

    Compiled when first called, once for each shape.
    """
    if not base.decoder_is_exact:
        raise IncompatibleBaseError(f"{base.info.model_type} has no decoder that can stand alone")

    def forward(tokens_BN: torch.Tensor, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_BND = base.model.get_decoder()(tokens_BN, **arguments).last_hidden_state
        return hidden_BND, base.head_logits(hidden_BND)

    return cast(Forward, torch.compile(forward, dynamic=False))
