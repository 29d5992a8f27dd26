"""An optional smaller drafter for the draft model (staged speculation, arXiv 2308.04623). The draft
model accepts its draft tokens where it would choose the same, so its drafts stay the same with
fewer forwards.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from medusa_kit.drafters.factory import DraftContext, build_drafter
from medusa_kit.drafters.native.layer_drafts import draft_config, kind
from medusa_kit.drafters.plain import PlainDrafter
from medusa_kit.errors import ConfigError
from medusa_kit.infer.decode.drafter import Drafter, RequestText, State, StepResult
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.verifier import Verifier
from medusa_kit.settings.drafters import StagedOptions
from medusa_kit.settings.sampling import SamplingParams


class Inside:
    """Draft tokens after the draft model's own roots. `make`: the smaller drafter; None: no draft
    tokens.

    A drafter may rely on text that only grows, but drafts are taken back. One with `rewinds = True`
    can handle this and is asked before each forward. Any other is asked once for each draft, when
    the text is final, and is built anew if the text changes after all.
    """

    def __init__(self, device: torch.device, make: Callable[[], Drafter] | None = None) -> None:
        self._plain = PlainDrafter(device)
        self._make = make
        self.drafter = make() if make else None

    @property
    def needs_state(self) -> bool:
        return self.drafter is not None

    @property
    def notes(self) -> list[str]:
        """The inner drafter's name and results."""
        if self.drafter is None:
            return []
        return [f"its own drafter is {self.drafter.name}", *self.drafter.notes]

    def propose(self, state: State, first: bool) -> Forest:
        """`first`: whether the texts are final, without draft tokens."""
        if self.drafter is None or not (first or self._rewinds):
            return self._plain.propose(state)
        self._restart_if_needed(state)
        return self.drafter.propose(state)

    def observe(self, step: StepResult) -> None:
        if self.drafter is not None and self._rewinds:
            self.drafter.observe(step)

    def finish(self, inner: RequestText) -> None:
        if self.drafter is not None:
            self.drafter.finish([inner])
            inner.kept.clear()

    @property
    def _rewinds(self) -> bool:
        return self.drafter is not None and self.drafter.rewinds

    def _restart_if_needed(self, state: State) -> None:
        """Let new requests begin; a drafter that cannot go on from the texts that it knows is made
        anew."""
        assert self._make is not None
        known = [one.kept.get(self, []) for one in state.requests]
        pairs = zip(state.tokens, known, strict=True)
        if not self._rewinds and any(now[: len(text)] != text for now, text in pairs):
            self.drafter = self._make()
            for one in state.requests:
                one.kept.clear()
        assert self.drafter is not None
        for one in state.requests:
            if self not in one.kept:
                self.drafter.begin(one)
            one.kept[self] = list(one.text)


def build_inside(context: DraftContext, verifier: Verifier, staged: StagedOptions | None) -> Inside:
    """`verifier`: the draft model's, the base of the smaller drafter. Raises ConfigError."""
    if staged is None:
        return Inside(verifier.base.device)
    if (config := draft_config(staged.draft_model)) is not None:
        raise ConfigError(
            f"staged draft_model {staged.draft_model!r} is {kind(config)}, which reads layers of "
            "the base; a draft model hands over none",
            hint="name it as the draft model itself: --draft-model MODEL",
        )
    own = replace(
        context,
        verifier=verifier,
        heads=None,
        tree=None,
        paying=False,
        draft_model=staged.draft_model,
        sampling=SamplingParams(),
        memory=context.memory.of_draft_model(id(verifier)),
    )
    return Inside(verifier.base.device, lambda: build_drafter(staged.drafter, own, staged.options))
