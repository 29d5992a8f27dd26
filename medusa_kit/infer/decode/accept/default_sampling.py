"""How tokens are chosen where a request leaves it open: one rule for `chat`, `generate`, the page
and the server.

Greedy, unless the model's own generation config asks for sampling, or the request itself does.
"""

from collections.abc import Mapping
from typing import Any

from medusa_kit.infer.decode.accept.generation_settings import own_sampling
from medusa_kit.settings.sampling import NARROWING

DRAWN = 1.0  # the temperature of a request that asks for a draw and names none: the model's chances


def with_defaults(
    given: Mapping[str, Any], config: Any, several: bool = False
) -> tuple[dict[str, Any], bool]:
    """(`given` with a temperature, whether some of it is from the model's config).

    `given`: keywords of SamplingParams; None is open. `config`: the model's own generation config.
    `several`: several answers to one prompt are asked for, which would be the same if greedy.
    """
    if given.get("temperature") == 0:
        return dict(given), False
    model_options = own_sampling(config)
    taken = {name: value for name, value in model_options.items() if given.get(name) is None}
    if given.get("temperature") is not None or model_options:
        return {**given, **taken}, bool(taken)
    if several or _asks_for_a_draw(given):
        return {**given, "temperature": DRAWN}, False
    return {**given, **dict.fromkeys(NARROWING), "temperature": 0.0}, False


def _asks_for_a_draw(given: Mapping[str, Any]) -> bool:
    narrows = any(given.get(name) not in (None, all_) for name, all_ in NARROWING.items())
    return narrows or given.get("acceptance") == "typical"
