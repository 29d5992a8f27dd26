"""How a caller may have tokens chosen: every option of it, defined once.

The processing these settings ask for is in logits_processing.py, the choice in sampler.py. Nothing
is imported here but the standard library, since `--help` is made from it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypedDict

from medusa_kit.errors import ConfigError, did_you_mean
from medusa_kit.settings.grammar import Grammar
from medusa_kit.settings.option import Allowed, check_fields, options_of

Acceptance = Literal["exact", "typical"]
DEFAULT_EPSILON = 0.09  # the paper's, §2.3.1
ANSWER_TOKENS = 1024  # longest answer of chat, generate, the page and the server, unless given
# What narrows a draw, and the value that keeps every token.
NARROWING: Mapping[str, float | None] = {"top_k": None, "top_p": 1.0, "min_p": 0.0}
DRAWING = ("temperature", *NARROWING, "seed")  # draws of what the model says, and nothing else
NO_FIELDS = ("acceptance", "epsilon", "delta", "grammar")  # of a request to a server
OF_TOKENIZER = "ids are those of this model's tokenizer"
# Logits in float32 are divided by numbers in this range. Beyond, they become infinite or NaN, and a
# NaN is taken for the largest, so that even tokens that a grammar forbids are chosen.
MIN_MODERATE, MAX_MODERATE = 1e-20, 1e20
MODERATE = f"{MIN_MODERATE:g} to {MAX_MODERATE:g}"


def _moderate(value: Any) -> bool:
    return bool(MIN_MODERATE <= value <= MAX_MODERATE)


TEMPERATURE = Allowed(f"0, or {MODERATE}", lambda t: t == 0 or _moderate(t), "0 is greedy")
TOP_K = Allowed("an integer, 1 or more", lambda k: k >= 1, "leave it out to keep every token")
TOP_P = Allowed("above 0, at most 1", lambda p: 0 < p <= 1, "1 keeps every token")
SEED = Allowed("an integer", hint="any will do, below 0 too")
MIN_P = Allowed("0 to 1", lambda p: 0 <= p <= 1, "0 keeps every token")
REPETITION = Allowed(MODERATE, _moderate, "1 changes nothing, above 1 makes repetition less likely")
PENALTY = Allowed("-2 to 2", lambda p: -2 <= p <= 2, "0 changes nothing")
BIASES = Allowed("a mapping of token ids to numbers", hint="for instance logit_bias={50256: -100}")
TOKEN_ID = Allowed("an integer from 0", lambda token: token >= 0, OF_TOKENIZER)
BIAS = Allowed("-100 to 100", lambda bias: -100 <= bias <= 100, "-100 all but bans a token")
EPSILON = Allowed("above 0, at most 1", lambda e: 0 < e <= 1, "the paper's is 0.09")
DELTA = Allowed(
    "above 0, at most 1",
    lambda d: 0 < d <= 1,
    "the paper's is the square root of epsilon; above 1 the likeliest token could fail",
)
GRAMMAR = Allowed(
    "a Grammar",
    hint="for instance grammar=medusa_kit.Grammar.json_schema({'type': 'object'})",
)


# Editors and mypy read keywords from nothing else; a test holds these equal to SamplingParams.
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
    acceptance: Acceptance
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

    temperature: Annotated[float, "0 is greedy; above 0 samples, exactly.", TEMPERATURE] = 0.0
    top_k: Annotated[int | None, "Sample among the K likeliest tokens.", TOP_K] = None
    top_p: Annotated[float | None, "Sample within this share of probability.", TOP_P] = None
    seed: Annotated[int, "Same seed, same text in float32, whatever the tree.", SEED] = 0
    min_p: Annotated[
        float | None, "Keep tokens at least this fraction as likely as the likeliest one.", MIN_P
    ] = None
    repetition_penalty: Annotated[
        float | None,
        "Above 1 discourages tokens of prompt and answer; default: the model's own.",
        REPETITION,
    ] = None
    presence_penalty: Annotated[
        float, "Taken from the logits of tokens the answer has ({allowed}).", PENALTY
    ] = 0.0
    frequency_penalty: Annotated[
        float, "The same for each time the answer has them ({allowed}).", PENALTY
    ] = 0.0
    logit_bias: Annotated[Mapping[int, float] | None, "Added to a token's logit.", BIASES] = field(
        default=None, hash=False
    )
    acceptance: Annotated[
        Acceptance, "exact, or typical (LOSSY: takes draft tokens that are likely enough)."
    ] = "exact"
    epsilon: Annotated[
        float | None, "typical: accept draft tokens likelier than this; default: 0.09.", EPSILON
    ] = None
    delta: Annotated[
        float | None,
        "typical: and those above this times exp(-entropy); default: sqrt(epsilon).",
        DELTA,
    ] = None
    grammar: Annotated[Grammar | None, "A grammar that the answer follows.", GRAMMAR] = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.logit_bias is not None:
            biases = {
                TOKEN_ID.number("logit_bias token id", int, token): BIAS.number(
                    f"logit_bias of token {token}", float, bias
                )
                for token, bias in self.logit_bias.items()
            }
            object.__setattr__(self, "logit_bias", biases)
        self._check_meaning()

    def _check_meaning(self) -> None:
        narrowing = [name for name in NARROWING if getattr(self, name)]
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
                hint="leave them out, or add --acceptance typical, whose thresholds they are",
            )

    @classmethod
    def of(cls, options: Mapping[str, Any], others: Sequence[str] = ()) -> "SamplingParams":
        """Parameters from keywords. Raises ConfigError for an unknown one. `others`: keywords of
        the call beside them, which may be meant."""
        known = options_of(cls)
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


# What changes scores before a draw.
SCORES = tuple(name for name in options_of(SamplingParams) if name not in (*DRAWING, *NO_FIELDS))
