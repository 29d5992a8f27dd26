"""How much of its drafts a vLLM server has accepted, from its Prometheus page /metrics.

The counters cover all requests of all clients since the server's start, so a run is a difference of
two readings. The Prometheus client appends `_total` to their names; labels (engine, model) are
summed.
"""

import http.client
import re
import urllib.request
from collections import Counter
from dataclasses import dataclass

from medusa_kit.distill.openai_client import Endpoint, NoRedirects

LINE = re.compile(
    r"^vllm:spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)(?:_total)?"
    r"(?:\{(.*)\})?\s+([0-9.eE+-]+)(?:\s+\d+)?$",
    re.MULTILINE,
)
POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')
TIMEOUT_SECONDS = 10.0
Counts = Counter[str]  # drafts, draft_tokens, accepted_tokens, and `position N`


@dataclass(frozen=True)
class ServedSteps:
    """Steps in which a server drafted; names are those of GenerationStats where they agree."""

    num_steps: int
    draft_tokens: int
    accepted_tokens: int
    acceptance_by_depth: list[float]  # share of steps that reached depth 1, 2, …

    @property
    def tokens(self) -> int:
        """The tokens that the steps emitted: the accepted ones and one more for each step."""
        return self.num_steps + self.accepted_tokens


def read_counts(text: str) -> Counts | None:
    """The counters on a /metrics page; None where it has none of them."""
    counts: Counts = Counter()
    for name, labels, value in LINE.findall(text):
        if name.endswith("per_pos"):
            if found := POSITION.search(labels):
                counts[f"position {found[1]}"] += int(float(value))
        else:
            counts[name] += int(float(value))
    return counts if "drafts" in counts else None


def fetch_counts(endpoint: Endpoint) -> Counts | None:
    """The counters of the server's /metrics page; None where it has no such page or none of them,
    or does not answer."""
    root = endpoint.url.rstrip("/").removesuffix("/v1")
    request = urllib.request.Request(root + "/metrics", headers=endpoint.headers())
    try:
        opener = urllib.request.build_opener(NoRedirects)
        with opener.open(request, timeout=TIMEOUT_SECONDS) as response:
            return read_counts(response.read().decode(errors="replace"))
    except (OSError, http.client.HTTPException):
        return None


def restarted(before: Counts, after: Counts) -> bool:
    """Whether a counter fell in between, because the server was restarted."""
    return any(after[name] < count for name, count in before.items())


def steps_between(before: Counts, after: Counts) -> ServedSteps | None:
    """None where nothing was drafted, and where the server was restarted in between."""
    grown = {name: after[name] - before[name] for name in after}
    if restarted(before, after) or not grown["drafts"]:
        return None
    positions = sorted(int(name.split()[1]) for name in grown if name.startswith("position"))
    shares = [grown[f"position {depth}"] / grown["drafts"] for depth in positions]
    return ServedSteps(
        grown["drafts"], grown.get("draft_tokens", 0), grown.get("accepted_tokens", 0), shares
    )
