"""The self-check at load: can trees be verified on this model, and how large is rounding?

Random trees on two rows of different length are scored through the tree cache and tree attention.
Each root-to-node path is scored again as plain text by a reference: the model itself, with
transformers' own attention and no cache, or the model in pieces (base/layerwise.py). This finds
what lists of architectures miss: families that drop arguments, mix neighbours by slot order, or
place tokens by something other than position ids.

Shapes: B batch, T tokens, N nodes with root, X nodes of several trees, V vocabulary.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from medusa_kit import console
from medusa_kit.base.families import needs_chains
from medusa_kit.base.faults import finite
from medusa_kit.base.model import RELATIVE_TOLERANCE, BaseModel
from medusa_kit.errors import CheckpointError, IncompatibleBaseError, MedusaKitError
from medusa_kit.infer.attention import with_replaced_attention
from medusa_kit.infer.check_texts import drawn_texts
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.own_rounding import (
    FAILURES,
    allowed_error,
    cached_error,
    difference,
    vocab_size_of,
)
from medusa_kit.infer.verifier import Verifier, window_owners
from medusa_kit.locks import lock_of
from medusa_kit.no_gradients import no_gradients

# The window of sliding layers during the check: prompts are too short for a real one to matter.
CHECK_WINDOW = 4
WINDOWS = ("sliding_window", "attention_chunk_size")  # what models call them

Paths = Sequence[Sequence[int]]


class Reference(Protocol):
    """The model that trees are compared with."""

    @property
    def model(self) -> Any:
        """transformers' model, whose windows apply to `last_logits`."""

    def last_logits(self, texts: Paths) -> Tensor:
        """logits_BV after the last token of each text, by plain forwards."""

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """The model's weights by name, one after the other."""


@dataclass(frozen=True)
class TreeCheck:
    """`rounding_tolerance`: twice the largest difference of logits seen, and at least the last bit
    of the largest logit. A top-2 margin below it may flip."""

    relative_error: float
    rounding_tolerance: float
    remembered: bool = False  # from an earlier load on this machine


def coarsest(checks: Iterable[TreeCheck]) -> TreeCheck:
    """The check with the largest tolerance, which holds for whatever runs a step."""
    return max(checks, key=lambda check: check.rounding_tolerance)


def check_backends(verifier: Verifier) -> TreeCheck:
    """`check_trees`. Where it fails, rows are padded; where that is of no use, and with `auto`,
    backends of tree attention are ruled out in turn.

    Raises IncompatibleBaseError where the last backend fails too.
    """
    failed: dict[str, str] = {}
    while True:
        try:
            check = check_trees(verifier)
            break
        except IncompatibleBaseError as error:
            if changed_since(verifier.base):
                raise
            if not verifier.pads:  # the model may mind that the nodes of all rows come as one row
                verifier.pad(True)
                continue
            verifier.pad(False)
            name = verifier.attention.replaceable()
            if name is None:
                raise
            failed[name] = error.message
            verifier.attention.rule_out(name, error.message)
    for name, reason in failed.items():
        passed = verifier.attention.name
        console.warn(f"attention {name} failed the check at load, {passed} passed it: {reason}")
    return check


def changed_since(base: BaseModel) -> bool:
    """Whether the model is another one than it was described as, so that a check of it that failed
    says nothing of what runs it."""
    return base.look() != base.number


def check_trees(verifier: Verifier, reference: Reference | None = None) -> TreeCheck:
    """Compare trees with plain forwards of `reference`, the base's own model unless given. What
    passed in an earlier load is remembered, unless the base was loaded to be checked.

    Raises IncompatibleBaseError, with the measured error, where a tree's logits are wrong.
    """
    base, record = verifier.base, verifier.check_record()
    known = None if record is None or base.check else record.read()
    if known is not None and (check := check_of(known)) is not None:
        verifier.attention.expected = known.get("attention")
        return check
    doing = "checking drafting against plain decoding"
    console.stage(doing)
    if record is not None:
        console.note(f"{doing}, once on this machine")
        console.detail(f"trees against plain forwards: {verifier.steps_run_by}")
    check = _run(verifier, OwnModel(base) if reference is None else reference)
    if record is not None:
        record.write(**asdict(check), attention=verifier.attention.name)
    return check


def check_of(figures: Mapping[str, Any]) -> TreeCheck | None:
    """The check that these remembered figures describe; None where they are not such figures."""
    relative, tolerance = figures.get("relative_error"), figures.get("rounding_tolerance")
    for number in (relative, tolerance):
        if not isinstance(number, float) or not 0 <= number < math.inf:
            return None
    return TreeCheck(relative, tolerance, remembered=True)  # type: ignore[arg-type]


@no_gradients
def _run(verifier: Verifier, reference: Reference) -> TreeCheck:
    base = verifier.base
    windowed = [*verifier.windowed(), *window_owners(reference.model)]
    try:
        # What the model computes by itself, whatever a caller's autocast rounds.
        exact = torch.autocast(base.device.type, enabled=False)
        with verifier.lock(), lock_of(reference.model), exact:
            with narrow_windows(windowed) as narrowed:
                measured = [_measure(verifier, reference)]
                own = isinstance(reference, OwnModel) and not verifier.chains_only
                cached = cached_error(base) if own else None
            if narrowed:  # of its real size, with other masks and another kernel
                measured.append(_measure(verifier, reference, 1))
    except FAILURES as error:
        raise _refusal(base, f"a forward failed: {error}") from error
    tolerance, relative = map(max, zip(*measured, strict=True))
    if not all(math.isfinite(error) for _, error in measured):  # max may pass NaN over
        raise _no_numbers(base, reference)
    allowed = allowed_error(base, relative)
    shape = "tree" if needs_chains(base.config) is None else "chain"
    if not relative <= allowed:
        raise _refusal(
            base, f"its logits on a {shape} are off by {relative:.1e} of their spread "
            f"(allowed {allowed:.0e}){_beside(cached) if base.info.quantized else ''}"
        )  # fmt: skip
    _check_own_cache(base, cached)
    return TreeCheck(relative, tolerance)


def _beside(cached: float | None) -> str:
    if cached is None:
        return ""
    return f"; without any tree, its logits with and without a cache differ by {cached:.1e}"


def _check_own_cache(base: BaseModel, cached: float | None) -> None:
    """Raises IncompatibleBaseError where transformers' own KV cache keeps other positions than the
    model's attention sees: answers then depend on how text was read, which trees do not follow."""
    if cached is None or base.info.quantized or cached <= allowed_error(base, cached):
        return
    raise IncompatibleBaseError(
        f"the answers of {base.info.name!r} ({base.info.model_type}) depend on transformers' KV "
        f"cache: with it the model's own logits are off by {cached:.1e} of their spread",
        hint="a sliding_window, attention_chunk_size or layer_types in its config that the family "
        "does not attend by, or a layer that the model has twice, does that; leave it out",
    )


class OwnModel:
    """The reference of a base whose model is in memory."""

    def __init__(self, base: BaseModel) -> None:
        self.model, self._device = base.own_model, base.device
        # Layers may round the inputs of a whole batch together.
        self._separately = base.info.quantized

    def last_logits(self, texts: Paths) -> Tensor:
        """All texts in one forward. They are padded on the right, which a causal model cannot see
        before it."""
        if self._separately:
            return self.separately(texts)
        with with_replaced_attention(self.model):
            return self._together(texts)

    def _together(self, texts: Paths) -> Tensor:
        ids_BT = nn.utils.rnn.pad_sequence(
            [torch.tensor(text, device=self._device) for text in texts], batch_first=True
        )
        logits_BTV = self.model(ids_BT, use_cache=False).logits
        ends_B = torch.tensor([len(text) - 1 for text in texts], device=self._device)
        return logits_BTV[torch.arange(len(texts), device=self._device), ends_B]

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        return self.model.state_dict().items()

    def separately(self, texts: Paths) -> Tensor:
        rows = [torch.tensor([text], device=self._device) for text in texts]
        with with_replaced_attention(self.model):
            return torch.cat([self.model(ids_1T, use_cache=False).logits[:, -1] for ids_1T in rows])


def _measure(
    verifier: Verifier, reference: Reference, rounds: int | None = None
) -> tuple[float, float]:
    """(rounding tolerance, relative error) over so many trees in turn, the last one in splits."""
    actual_XV, paths = score_random_trees(verifier, rounds)
    if not isinstance(reference, OwnModel):
        return difference(actual_XV, reference.last_logits(paths))
    with suppress(*FAILURES):
        error = difference(actual_XV, reference.last_logits(paths))
        if error[1] <= RELATIVE_TOLERANCE[actual_XV.dtype]:
            return error
    # A family may mind padding, or what else is in a batch.
    return difference(actual_XV, reference.separately(paths))


def score_random_trees(
    verifier: Verifier, rounds: int | None = None
) -> tuple[Tensor, list[list[int]]]:
    """(logits_XV of the verifier, the path to each node). `rounds`: trees in turn, at most the last
    so many of those that there are for such a verifier."""
    base = verifier.base
    drawn = drawn_texts(vocab_size_of(base), verifier.chains_only, rounds)
    cache = verifier.new_cache(len(drawn.prompts), drawn.length)
    verifier.read_prompts(cache, range(len(drawn.prompts)), drawn.prompts)
    scored = list[Tensor]()
    for shape, trees in zip(drawn.shapes, drawn.trees, strict=True):
        nodes = Forest.of(trees, [parents for parents, _ in shape], base.device)
        with _split_finely(verifier, shape is drawn.shapes[-1]):
            scored.append(verifier.score(cache, nodes, range(len(drawn.prompts))).logits_NV)
        cache.commit([kept for _, kept in shape], range(len(drawn.prompts)))
    return torch.cat(scored), drawn.paths()


@contextmanager
def _split_finely(verifier: Verifier, enabled: bool) -> Iterator[None]:
    verifier.attention.split_finely = enabled
    try:
        yield
    finally:
        verifier.attention.split_finely = False


@contextmanager
def narrow_windows(owners: Iterable[Any]) -> Iterator[bool]:
    """Narrow every window and chunk during the check, so that a wrong one shows on a short text.
    Yields whether there is any."""
    windows = _wide_windows(owners)
    try:
        for owner, name, _ in windows:
            setattr(owner, name, CHECK_WINDOW)
        yield bool(windows)
    finally:
        for owner, name, window in windows:
            setattr(owner, name, window)


def any_window(owners: Iterable[Any]) -> bool:
    """Whether `narrow_windows` narrows one."""
    return bool(_wide_windows(owners))


def _wide_windows(owners: Iterable[Any]) -> list[tuple[Any, str, int]]:
    return [(owner, name, getattr(owner, name))
            for owner in {id(owner): owner for owner in owners}.values() for name in WINDOWS
            if isinstance(getattr(owner, name, None), int)
            and getattr(owner, name) > CHECK_WINDOW]  # fmt: skip


def _no_numbers(base: BaseModel, reference: Reference) -> MedusaKitError:
    """The error for a base whose logits are NaN or infinite. Only here all weights are read."""
    if (damage := finite.damage_in(reference.tensors())) is not None:
        return CheckpointError(
            f"the weights of {base.info.name!r} are damaged: {damage}",
            hint="copy the checkpoint again; if it was made with a smaller dtype, or is read in "
            f"one ({base.info.dtype} here), make or read it in a wider one",
        )
    wider = "float32" if base.info.dtype in ("float16", "bfloat16") else "float64"
    return IncompatibleBaseError(  # an attention backend may be at fault, and another one right
        f"{base.info.name!r} gives logits that are NaN or infinite, though all of its weights are "
        "finite numbers",
        hint=f"{base.info.dtype} may be too narrow for it: read it in a wider dtype (--dtype "
        f"{wider}); else the weights are damaged or of another model",
    )


def _refusal(base: BaseModel, fault: str) -> IncompatibleBaseError:
    why = "the family may mix tokens by slot order or ignore position ids"
    if base.info.quantized:
        why = (
            f"it is quantised ({base.info.quantization}): where inputs of layers are rounded too, "
            "a last bit can become a whole step; quantise its weights alone. If that is not it, "
            + why
        )
    name, kind = base.info.name, base.info.model_type
    shapes = "trees" if needs_chains(base.config) is None else "chains of draft tokens"
    return IncompatibleBaseError(
        f"{shapes} cannot be verified on {name!r} ({kind}): {fault}",
        hint=f"use transformers' own generate for this model; {why}",
    )
