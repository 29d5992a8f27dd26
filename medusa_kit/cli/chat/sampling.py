"""How the commands that answer choose tokens, and how they say it. Drawing is exact, so the drafter
changes the speed and never what is said."""

from collections.abc import Mapping
from typing import Any

from medusa_kit.errors import UsageError
from medusa_kit.settings.sampling import DRAWING, SamplingParams


def check(sampling: Mapping[str, Any], greedy: bool) -> None:
    """Raises UsageError, ConfigError for what `--greedy` contradicts."""
    if not greedy:
        return
    if sampling["temperature"]:
        raise UsageError(
            f"--greedy and --temperature {sampling['temperature']:g} contradict each other",
            hint="give one of them",
        )
    SamplingParams.of({**sampling, "temperature": 0.0})


def choose(sampling: Mapping[str, Any], greedy: bool, config: Any) -> tuple[dict[str, Any], str]:
    """(settings, where they come from; empty for greedy ones). `config`: the model's own generation
    config."""
    from medusa_kit.infer.decode.accept.default_sampling import with_defaults

    given = {**sampling, "temperature": 0.0} if greedy else sampling
    chosen, own = with_defaults(given, config)
    if chosen["temperature"] == 0:
        return chosen, ""
    if not own:
        return chosen, "as given"
    given_too = any(given[name] is not None for name in DRAWING if name != "seed")
    return chosen, "the model's own" + (" where none was given" if given_too else "")


def describe(sampling: Mapping[str, Any], where: str) -> str:
    """A line for the greeting."""
    if sampling["temperature"] == 0:
        return "greedy: always the likeliest token"
    given = ((name, sampling[name]) for name in DRAWING if sampling[name] is not None)
    shown = [f"{n} {value:g}" if isinstance(value, float) else f"{n} {value}" for n, value in given]
    return f"sampling at {', '.join(shown)} ({where}); --temperature 0 takes the likeliest"
