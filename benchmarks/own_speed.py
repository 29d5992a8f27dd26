"""The speed of this kit's prompts, plain decoding and steps, on what llama-bench times: random ids.

Unlike llama-bench, all of these choose the next token, and steps compute the logits of all nodes
(llama-bench those of the last token); nothing is left out that an answer needs.
"""

import random
import time
from typing import Any

from medusa_kit.infer.forest import Forest

SEED = 0


class OwnSpeed:
    """An engine and the ids that it is measured on."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._size = engine.base.info.vocab_size

    def ids(self, count: int) -> list[int]:
        return random.Random(SEED).choices(range(self._size), k=count)

    def prompt(self, tokens: int, repeats: int = 1, before: int = 1) -> list[float]:
        """Seconds to read so many tokens and choose the next, after `before` without a
        stopwatch."""
        return [self._row(tokens, 1).first_seconds for _ in range(before + repeats)][before:]

    def decode(self, tokens: int, depth: int) -> float:
        """Seconds of one token behind a prompt of this depth, in an answer of so many."""
        row = self._row(max(depth, 1), 1 + tokens)
        return (row.seconds - row.first_seconds) / tokens

    def steps(self, nodes: int, depth: int, repeats: int) -> list[float]:
        """Seconds of steps that score a chain of so many tokens, after one that is not counted."""
        verifier = self.engine.verifier
        cache = verifier.new_cache(1, depth + nodes)
        verifier.read_prompts(cache, [0], [self.ids(depth)])
        taken = []
        for _ in range(1 + repeats):
            start = time.perf_counter()
            chain = Forest.chains([self.ids(nodes)], self.engine.base.device)
            verifier.score(cache, chain, [0]).argmax().tolist()
            taken.append(time.perf_counter() - start)
        return taken[1:]

    def _row(self, prompt: int, new: int) -> Any:
        """An answer of so many tokens, whatever they are: the stop token does not end it."""
        from medusa_kit.drafters.plain import PlainDrafter
        from medusa_kit.infer.decode.request import make_request
        from medusa_kit.infer.decode.scheduler import Scheduler
        from medusa_kit.settings.sampling import SamplingParams

        verifier = self.engine.verifier
        row = make_request(verifier, self.ids(prompt), SamplingParams(), new)
        row.stop_ids = frozenset()
        if row.max_new_tokens < new:
            raise RuntimeError(f"{row.max_new_tokens} of {new} tokens fit into the context")
        for _ in Scheduler(verifier).run([row], PlainDrafter(verifier.base.device)):
            pass
        return row
