"""Requests of one call of `generate`, decoded to their ends."""

import contextlib
from collections.abc import Sequence

from medusa_kit import console
from medusa_kit.infer.decode.drafter import Drafter
from medusa_kit.infer.decode.request import Emission, Emitted, Request, emission
from medusa_kit.infer.decode.scheduler import Scheduler


def emissions(emitted: Emitted) -> list[Emission]:
    """What a step emitted; where log-probabilities are wanted, their request keeps them."""
    found = list[Emission]()
    for request, tokens in emitted:
        found.append(emission(request, tokens))
        request.token_scores += (found[-1].scores or [])[: len(tokens)]
    return found


def decode(
    scheduler: Scheduler,
    requests: Sequence[Request],
    drafter: Drafter,
    batch_size: int,
    progress: bool,
) -> None:
    """Raises what `Scheduler.decode` raises. `progress`: shown on stderr."""
    if not progress and all(one.output_options.num_top_tokens is None for one in requests):
        scheduler.decode(requests, drafter, batch_size)
        return

    def ended(emitted: Emitted) -> int:
        emissions(emitted)
        return sum(request.finish_reason is not None for request, _ in emitted)

    shown = console.progress("answering", len(requests), "prompts")
    with shown if progress else contextlib.nullcontext() as bar:
        for number in scheduler.run(requests, drafter, batch_size, note=ended):
            if bar is not None and number:
                bar.advance(number)
