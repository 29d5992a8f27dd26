"""How a caller may have tokens chosen.

The processing these settings ask for is in logits_processing.py, the choice in sampler.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, TypedDict

from medusa_kit.errors import ConfigError, did_you_mean, unknown_value
from medusa_kit.settings.grammar import Grammar

ACCEPTANCE = ("exact", "typical")
KINDS: dict[str, Callable[[Any], Any]] = {"top_k": int, "seed": int}  # of numbers; others: float
DEFAULT_EPSILON = 0.09  # the paper's, §2.3.1
ANSWER_TOKENS = 1024  # longest answer of chat, generate, the page and the server, unless given


class SamplingOptions(TypedDict, total=False):
    """The fields of SamplingParams as keywords, for those who pass them on."""

    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    acceptance: str
    epsilon: float | None
    delta: float | None
    grammar: Grammar | None


# What transformers, vLLM and OpenAI's API call these keywords, where it is not near to our word.
ELSEWHERE = {
    **dict.fromkeys(("num_return_sequences", "num_samples", "best_of"), "n"),
    **dict.fromkeys(("stop_strings", "stopping_criteria"), "stop"),
    **dict.fromkeys(("response_format", "guided_json", "structured_outputs", "schema"), "grammar"),
    **dict.fromkeys(("output_scores", "output_logits"), "logprobs"),
    **dict.fromkeys(("assistant_model", "prompt_lookup_num_tokens"), "drafter"),
    "do_sample": "temperature",
    "generator": "seed",
}


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. Raises ConfigError when a value is out of range or has no meaning."""

    temperature: float = 0.0  # 0 is greedy
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    min_p: float | None = None  # drops tokens below this share of the likeliest one's probability
    repetition_penalty: float | None = None  # over prompt and answer; None: the base's own
    presence_penalty: float = 0.0  # this and the next: OpenAI's, over generated tokens only
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)  # token id -> bias
    acceptance: str = "exact"  # typical: lossy (arXiv 2401.10774, §2.3.1)
    epsilon: float | None = None  # typical only; 0.09 unless given
    delta: float | None = None  # typical only; the square root of epsilon unless given
    grammar: Grammar | None = None  # that answers follow

    def __post_init__(self) -> None:
        for parameter in fields(self):
            value = getattr(self, parameter.name)
            if parameter.name not in RANGES or (value is None and parameter.default is None):
                continue
            fits, expected, hint = RANGES[parameter.name]
            if not (isinstance(value, Real) and fits(value)):
                raise _out_of_range(parameter.name, value, expected, hint)
            # numpy's numbers, fractions and the like as what transformers and torch take
            object.__setattr__(self, parameter.name, KINDS.get(parameter.name, float)(value))
        if not isinstance(self.logit_bias, Mapping | None):
            raise ConfigError(
                f"logit_bias {self.logit_bias!r} is of type {type(self.logit_bias).__name__}; "
                "expected a mapping of token ids to numbers",
                hint="for instance logit_bias={50256: -100}",
            )
        for token, bias in (self.logit_bias or {}).items():
            if not (isinstance(token, Integral) and int(token) >= 0):
                raise _out_of_range("logit_bias token id", token, "an integer from 0", None)
            if not (isinstance(bias, Real) and -100 <= bias <= 100):
                raise _out_of_range(
                    f"logit_bias of token {token}", bias, "-100 to 100", "-100 all but bans a token"
                )
        if not isinstance(self.grammar, Grammar | None):
            raise ConfigError(
                f"grammar {self.grammar!r} is of type {type(self.grammar).__name__}; expected a "
                "Grammar",
                hint="for instance grammar=medusa_kit.Grammar.json_schema({'type': 'object'})",
            )
        self._check_meaning()

    def _check_meaning(self) -> None:
        if self.acceptance not in ACCEPTANCE:
            raise unknown_value("acceptance", self.acceptance, ACCEPTANCE)
        narrowing = [name for name in ("top_k", "top_p", "min_p") if getattr(self, name)]
        if self.greedy and narrowing:
            raise ConfigError(
                f"{' and '.join(narrowing)} has no meaning when decoding greedily",
                hint="give a temperature above 0",
            )
        if self.greedy and self.lossy:
            raise ConfigError(
                f"typical acceptance has no meaning at temperature {self.temperature}; expected "
                "above 0",
                hint="give the temperature of the distribution that draft tokens are judged by, "
                "such as 0.7",
            )
        if not self.lossy and (self.epsilon is not None or self.delta is not None):
            raise ConfigError(
                "epsilon and delta have no meaning with exact acceptance",
                hint="they are the thresholds of acceptance 'typical'",
            )

    @classmethod
    def of(cls, options: Mapping[str, Any], others: Sequence[str] = ()) -> "SamplingParams":
        """Parameters from keywords. Raises ConfigError for an unknown one. `others`: keywords of
        the call beside them, which may be meant."""
        known = [parameter.name for parameter in fields(cls)]
        for name in options:
            if name not in known:
                raise ConfigError(
                    f"option {name!r} is unknown; sampling takes {', '.join(known)}",
                    hint="`Engine.generate` takes it, this call does not"
                    if name in others
                    else did_you_mean(ELSEWHERE.get(name, name), [*others, *known]),
                )
        return cls(**options)

    @classmethod
    def checked(cls, options: Mapping[str, Any]) -> "SamplingParams":
        """Parameters from keywords whose temperature may be None, for the model to name. The others
        are checked as with a temperature above 0. Raises ConfigError."""
        is_open = options.get("temperature") is None
        return cls.of({**options, "temperature": 1.0} if is_open else options)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def lossy(self) -> bool:
        """Whether answers leave the base model's distribution."""
        return self.acceptance == "typical"

    @property
    def thresholds(self) -> tuple[float, float]:
        """(epsilon, delta) of typical acceptance."""
        epsilon = DEFAULT_EPSILON if self.epsilon is None else self.epsilon
        return epsilon, math.sqrt(epsilon) if self.delta is None else self.delta


# Logits in float32 are divided by these numbers. Beyond, they become infinite or NaN, and a NaN is
# taken for the largest, so that even tokens that a grammar forbids are chosen.
MIN_MODERATE, MAX_MODERATE = 1e-20, 1e20
MODERATE = f"{MIN_MODERATE:g} to {MAX_MODERATE:g}"


def _moderate(value: Any) -> bool:
    return bool(MIN_MODERATE <= value <= MAX_MODERATE)


# What each number may be: (test, words, hint). None passes where it is the default.
RANGES: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "temperature": (lambda t: t == 0 or _moderate(t), f"0, or {MODERATE}", "0 is greedy"),
    "top_k": (lambda k: isinstance(k, Integral) and int(k) >= 1, "an integer, 1 or more",
              "leave it out to keep every token"),
    "top_p": (lambda p: 0 < p <= 1, "above 0, at most 1", "1 keeps every token"),
    "seed": (lambda seed: isinstance(seed, Integral), "an integer", "any will do, below 0 too"),
    "min_p": (lambda p: 0 <= p <= 1, "0 to 1", "0 keeps every token"),
    "repetition_penalty": (_moderate, MODERATE,
                           "1 changes nothing, above 1 makes repetition less likely"),
    "presence_penalty": (lambda p: -2 <= p <= 2, "-2 to 2", "0 changes nothing"),
    "frequency_penalty": (lambda p: -2 <= p <= 2, "-2 to 2", "0 changes nothing"),
    "epsilon": (lambda e: 0 < e <= 1, "above 0, at most 1", "the paper's is 0.09"),
    "delta": (lambda d: 0 < d <= 1, "above 0, at most 1",
              "the paper's is the square root of epsilon; above 1 the likeliest token could fail"),
}  # fmt: skip


def _out_of_range(name: str, value: Any, expected: str, hint: str | None) -> ConfigError:
    return ConfigError(f"{name} {value!r} is out of range; expected {expected}", hint=hint)
