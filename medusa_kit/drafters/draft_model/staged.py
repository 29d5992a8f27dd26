"""What guesses for the draft model: nothing, or a smaller drafter inside (staged speculation, arXiv
2308.04623). The draft model takes from its guesses what it would have said itself, so its draft is
the same with fewer of its forwards.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from medusa_kit.drafters.factory import DraftContext, build_drafter
from medusa_kit.drafters.memory import Memory
from medusa_kit.drafters.plain import PlainDrafter
from medusa_kit.infer.draft import Draft, Drafter, State, StepResult, notes_of
from medusa_kit.infer.verifier import Verifier
from medusa_kit.settings.drafters import StagedOptions
from medusa_kit.settings.sampling import SamplingParams


class Inside:
    """Guesses after the draft model's own roots. `make`: the smaller drafter; None: no guesses.

    A drafter may rely on text that only grows, but drafts are taken back. One that says
    `rewinds = True` copes and is asked before each forward; any other once a draft, where the text
    is final, and is made anew should that change after all.
    """

    def __init__(self, device: torch.device, make: Callable[[], Drafter] | None = None) -> None:
        self._plain = PlainDrafter(device)
        self._make = make
        self.drafter = make() if make else None
        self._told: list[list[int]] = []  # texts that it knows

    @property
    def needs_state(self) -> bool:
        return self.drafter is not None

    @property
    def notes(self) -> list[str]:
        """The inner drafter's name and results."""
        if self.drafter is None:
            return []
        return [f"inside it drafts {self.drafter.name}", *notes_of(self.drafter)]

    def propose(self, state: State, first: bool) -> Draft:
        """`first`: whether the texts are final, none of their tokens a guess."""
        if self.drafter is None or not (first or self._rewinds):
            return self._plain.propose(state)
        self._tell(state)
        return self.drafter.propose(state)

    def observe(self, step: StepResult) -> None:
        if self.drafter is not None and self._rewinds:
            self.drafter.observe(step)

    def select_rows(self, rows: Sequence[int]) -> None:
        if self.drafter is not None:
            known = [row for row in rows if row < len(self._told)]  # others have joined since
            self._told = [self._told[row] for row in known]
            self.drafter.select_rows(known)

    @property
    def _rewinds(self) -> bool:
        return bool(getattr(self.drafter, "rewinds", False))

    def _tell(self, state: State) -> None:
        """Let new rows join; a drafter that cannot go on from what it knows is made anew."""
        assert self._make is not None
        texts, known = [list(tokens) for tokens in state.tokens], len(self._told)
        if not self._rewinds and any(
            now[: len(before)] != before for now, before in zip(texts, self._told, strict=False)
        ):
            self.drafter, known = self._make(), 0
        assert self.drafter is not None
        if known < len(texts):
            self.drafter.join(state.of_rows(range(known, len(texts))))
        self._told = texts


def build_inside(context: DraftContext, verifier: Verifier, staged: StagedOptions | None) -> Inside:
    """`verifier`: the draft model's, which is the base of what is inside. Raises ConfigError."""
    if staged is None:
        return Inside(verifier.base.device)
    own = replace(
        context,
        verifier=verifier,
        heads=None,
        tree=None,
        break_even=None,
        draft_model=staged.draft_model,
        sampling=SamplingParams(),
        memory=context.remembered(("staged", id(verifier)), Memory),
    )
    return Inside(verifier.base.device, lambda: build_drafter(staged.drafter, own, staged.options))
