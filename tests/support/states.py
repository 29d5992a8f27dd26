"""Requests as drafters see them, from lists."""

from collections.abc import Sequence

from torch import Tensor

from medusa_kit.infer.decode.accept.sampler import Sampler
from medusa_kit.infer.decode.drafter import Drafter, RequestText, State


def state_from(
    tokens: Sequence[Sequence[int]],
    roots_B: Sequence[int],
    hidden_BD: Tensor | None = None,
    samplers: Sequence[Sampler] = (),
) -> State:
    """`hidden_BD`: none where there are no numbers in it."""
    known = hidden_BD is not None and hidden_BD.shape[0] == len(tokens)
    return State(
        [
            RequestText(
                text=list(text),
                root=root,
                hidden_ND=hidden_BD[row : row + 1] if known and hidden_BD is not None else None,
                sampler=samplers[row] if samplers else None,
            )
            for row, (text, root) in enumerate(zip(tokens, roots_B, strict=True))
        ]
    )


def begun(drafter: Drafter, state: State) -> State:
    """The same, after its requests have begun."""
    for request in state.requests:
        drafter.begin(request)
    return state
