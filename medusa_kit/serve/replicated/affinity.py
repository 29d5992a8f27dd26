"""Which replica a request should go to: the one that has read its prefix or loaded its heads, as
long as it is not much busier than the others.

A prompt becomes a chain of blocks, each hashed with all before it, so that two prompts share as
many hashes as they share blocks from the start. What was sent where is remembered; what a replica
has dropped since then is not known, and costs no more than a replica chosen by load.
"""

import json
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from xxhash import xxh64_intdigest

BLOCK_CHARACTERS = 256
BLOCK_TOKENS = 64
MAX_BLOCKS = 100_000  # remembered of each replica
MAX_HEADS = 256


@dataclass(frozen=True)
class RoutingKey:
    """`heads`: that the request names. `blocks`: hashes of its prompt's blocks."""

    heads: str | None = None
    blocks: tuple[int, ...] = ()


def routing_key(body: bytes, base: str) -> RoutingKey:
    """The key of a request for the base model of this name; empty for what is no valid request,
    which the replica will refuse."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return RoutingKey()
    if not isinstance(request, dict):
        return RoutingKey()
    model, adapter = request.get("model"), request.get("adapter_id")
    names = (name for name in (adapter, model) if isinstance(name, str))
    heads = next((name for name in names if name != base), None)
    if adapter is not None and heads is not None:
        heads = f"{base}:{adapter}"  # the same heads as under `model`
    return RoutingKey(heads, tuple(_hashes(_blocks(request))))


def _blocks(request: Mapping[str, Any]) -> Iterator[str]:
    """Messages begin and end blocks: an earlier turn of a conversation has the same ones."""
    messages, prompt = request.get("messages"), request.get("prompt")
    if isinstance(messages, list):
        if tools := request.get("tools"):
            yield json.dumps(tools)
        for message in messages:
            yield from _pieces(json.dumps(message), BLOCK_CHARACTERS)
        return
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]  # of several, the first
    if isinstance(prompt, str):
        yield from _pieces(prompt, BLOCK_CHARACTERS)
    elif isinstance(prompt, list):
        for ids in _pieces(prompt, BLOCK_TOKENS):
            yield str(ids)


def _pieces(whole: Any, size: int) -> Iterator[Any]:
    for start in range(0, len(whole), size):
        yield whole[start : start + size]


def _hashes(blocks: Iterator[str]) -> Iterator[int]:
    so_far = 0
    for block in blocks:
        so_far = xxh64_intdigest(block.encode("utf-8", "surrogatepass"), seed=so_far)
        yield so_far


class _Known:
    """What one replica has been sent, the newest last."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._heads: OrderedDict[str, None] = OrderedDict()

    def add(self, key: RoutingKey) -> None:
        # A prompt's first blocks are the newest, so that its last ones are forgotten first.
        for block in reversed(key.blocks):
            _touch(self._blocks, block, MAX_BLOCKS)
        if key.heads is not None:
            _touch(self._heads, key.heads, MAX_HEADS)

    def match(self, key: RoutingKey) -> tuple[bool, int]:
        """(whether it has the heads, how many blocks of the prefix)."""
        blocks = next(
            (i for i, block in enumerate(key.blocks) if block not in self._blocks), len(key.blocks)
        )
        return key.heads in self._heads, blocks


def _touch(kept: OrderedDict[Any, None], key: Any, max_kept: int) -> None:
    kept[key] = None
    kept.move_to_end(key)
    if len(kept) > max_kept:
        kept.popitem(last=False)


class Affinity:
    """`slack`: how many more requests than the least busy replica one may have, and still be
    preferred for what it knows."""

    def __init__(self, slack: int) -> None:
        self._slack = slack
        self._known: dict[str, _Known] = {}

    def rank(self, key: RoutingKey, loads: Mapping[str, int]) -> list[list[str]]:
        """The replicas, the preferred ones first, each group to be chosen from by load. `loads`:
        requests under way by replica."""
        if not loads:
            return []
        min_load = min(loads.values())
        matches = {
            replica: self._known[replica].match(key)
            for replica, load in loads.items()
            if replica in self._known and load <= min_load + self._slack
        }
        best = max(matches.values(), default=(False, 0))
        if best == (False, 0):
            return [list(loads)]
        first = [replica for replica, match in matches.items() if match == best]
        others = [replica for replica in loads if replica not in first]
        return [first, others] if others else [first]

    def sent(self, key: RoutingKey, replica: str) -> None:
        self._known.setdefault(replica, _Known()).add(key)

    def keep(self, replicas: Collection[str]) -> None:
        """Forget all others."""
        self._known = {name: known for name, known in self._known.items() if name in replicas}
