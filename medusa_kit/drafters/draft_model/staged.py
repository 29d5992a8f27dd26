"""An optional smaller drafter for the draft model (staged speculation, arXiv 2308.04623). The draft
model accepts its guesses where it would choose the same, so its drafts stay the same with fewer
forwards.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from medusa_kit.drafters.factory import DraftContext, build_drafter
from medusa_kit.drafters.memory import Memory
from medusa_kit.drafters.native.layer_drafts import draft_config, kind
from medusa_kit.drafters.plain import PlainDrafter
from medusa_kit.errors import ConfigError
from medusa_kit.infer.draft import Draft, Drafter, State, StepResult
from medusa_kit.infer.verifier import Verifier
from medusa_kit.settings.drafters import StagedOptions
from medusa_kit.settings.sampling import SamplingParams


class Inside:
    """Guesses after the draft model's own roots. `make`: the smaller drafter; None: no guesses.

    A drafter may rely on text that only grows, but drafts are taken back. One with `rewinds = True`
    can handle this and is asked before each forward. Any other is asked once for each draft, when
    the text is final, and is built anew if the text changes after all.
    """

    def __init__(self, device: torch.device, make: Callable[[], Drafter] | None = None) -> None:
        self._plain = PlainDrafter(device)
        self._make = make
        self.drafter = make() if make else None
        self._known: list[list[int]] = []  # texts that it knows

    @property
    def needs_state(self) -> bool:
        return self.drafter is not None

    @property
    def notes(self) -> list[str]:
        """The inner drafter's name and results."""
        if self.drafter is None:
            return []
        return [f"its own drafter is {self.drafter.name}", *self.drafter.notes]

    def propose(self, state: State, first: bool) -> Draft:
        """`first`: whether the texts are final, without guessed tokens."""
        if self.drafter is None or not (first or self._rewinds):
            return self._plain.propose(state)
        self._restart_if_needed(state)
        return self.drafter.propose(state)

    def observe(self, step: StepResult) -> None:
        if self.drafter is not None and self._rewinds:
            self.drafter.observe(step)

    def select_rows(self, rows: Sequence[int]) -> None:
        if self.drafter is not None:
            known = [row for row in rows if row < len(self._known)]  # others have joined since
            self._known = [self._known[row] for row in known]
            self.drafter.select_rows(known)

    @property
    def _rewinds(self) -> bool:
        return self.drafter is not None and self.drafter.rewinds

    def _restart_if_needed(self, state: State) -> None:
        """Let new rows join; a drafter that cannot go on from what it knows is made anew."""
        assert self._make is not None
        texts, known = [list(tokens) for tokens in state.tokens], len(self._known)
        if not self._rewinds and any(
            now[: len(before)] != before for now, before in zip(texts, self._known, strict=False)
        ):
            self.drafter, known = self._make(), 0
        assert self.drafter is not None
        if known < len(texts):
            self.drafter.join(state.of_rows(range(known, len(texts))))
        self._known = texts


def build_inside(context: DraftContext, verifier: Verifier, staged: StagedOptions | None) -> Inside:
    """`verifier`: the draft model's, the base of the smaller drafter. Raises ConfigError."""
    if staged is None:
        return Inside(verifier.base.device)
    if (config := draft_config(staged.draft_model)) is not None:
        raise ConfigError(
            f"staged draft_model {staged.draft_model!r} is {kind(config)}, which reads layers of "
            "the base; a draft model hands over none",
            hint="name it as the draft_model itself",
        )
    own = replace(
        context,
        verifier=verifier,
        heads=None,
        tree=None,
        paying=False,
        draft_model=staged.draft_model,
        sampling=SamplingParams(),
        memory=context.remembered(("staged", id(verifier)), Memory),
    )
    return Inside(verifier.base.device, lambda: build_drafter(staged.drafter, own, staged.options))
