"""How a chat chooses tokens: as the person says, else as the model's own settings say, else at
temperature 0.7. Drawing is exact, so the drafter changes the speed and never what is said."""

from collections.abc import Mapping
from typing import Any

from medusa_kit.errors import UsageError

USUAL = 0.7  # the temperature where neither the person nor the model names one
SHOWN = ("temperature", "top_k", "top_p", "min_p", "seed")


def check(sampling: Mapping[str, Any], greedy: bool) -> None:
    """Raises UsageError, ConfigError for what `--greedy` contradicts."""
    from medusa_kit.settings.sampling import SamplingParams

    if not greedy:
        return
    if sampling["temperature"]:
        raise UsageError(
            f"--greedy and --temperature {sampling['temperature']:g} contradict each other",
            hint="give one of them",
        )
    SamplingParams.of({**sampling, "temperature": 0.0})


def checkable(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, with a temperature in the place of one that only the model will name."""
    named = sampling["temperature"] is not None
    return dict(sampling) if named else {**sampling, "temperature": USUAL}


def choose(sampling: Mapping[str, Any], greedy: bool, config: Any) -> tuple[dict[str, Any], str]:
    """(settings, where they come from). `config`: the model's own generation config."""
    from medusa_kit.infer.accept.generation_settings import own_sampling

    if greedy or sampling["temperature"] == 0:
        return {**sampling, "temperature": 0.0}, ""
    own = own_sampling(config)
    undecided = {name for name in SHOWN if sampling[name] is None}
    taken = {name: value for name, value in own.items() if name in undecided}
    if "temperature" in undecided and "temperature" not in taken:
        return {**sampling, "temperature": USUAL}, "the kit's default"
    where = "the model's own" if taken else "as given"
    if taken and len(taken) < len(own):
        where += " where none was given"
    return {**sampling, **taken}, where


def describe(sampling: Mapping[str, Any], where: str) -> str:
    """A line for the greeting."""
    if sampling["temperature"] == 0:
        return "greedy: always the likeliest token"
    shown = [f"{name} {sampling[name]:g}" for name in SHOWN if sampling[name] is not None]
    return f"sampling at {', '.join(shown)} ({where}); --greedy takes the likeliest"


def draws_guesses(drafter_options: Mapping[str, Any]) -> bool:
    """Whether guesses themselves are drawn. The words of a seed then depend on the drafter; their
    distribution does not."""
    if drafter_options.get("sampling") == "rejection":
        return True
    inner = (value for value in drafter_options.values() if isinstance(value, Mapping))
    return any(draws_guesses(value) for value in inner)
