"""How often guesses of text drafters are right in an engine's first answer, by kind of guess.

Measured once and shipped (assets/guess_chances.json, which says how; made again by
benchmarks/guess_chances.py), so that a new engine knows from its first step which guesses pay. What
it then sees itself counts more with each step (estimates.py).
"""

import importlib.resources
import json
from collections.abc import Hashable, Mapping
from functools import lru_cache

NAME = "guess_chances.json"


@lru_cache(maxsize=1)
def first_chances() -> Mapping[Hashable, float]:
    """The share of right guesses by the key of their kind (Trie.keys)."""
    path = importlib.resources.files("medusa_kit") / "assets" / NAME
    table = json.loads(path.read_text(encoding="utf-8"))
    return {tuple(key): float(share) for key, share, _ in table["kinds"]}
