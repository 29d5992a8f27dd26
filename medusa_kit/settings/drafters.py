"""Drafters by name, and the options of each, the same in YAML, on the command line and from Python.

Unknown names and options are refused; the error names the nearest that exists.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field, ValidationError, model_validator

from medusa_kit.errors import ConfigError
from medusa_kit.settings.engine import allowed, check_value
from medusa_kit.settings.schema import Removed, Section, explain

SourceName = Literal["medusa", "suffix", "prompt-lookup", "recycling", "draft-model", "mtp"]
SOURCES = get_args(SourceName)  # of auto; each is also a drafter by itself
NO_GAIN = "it made no measured pair of models faster than its default"


class NoOptions(Section):
    """Drafters without options, as `none`, and `medusa`, whose tree comes from tree.json."""


class PromptLookupOptions(Section):
    """Copies what followed the last occurrence of the same words in prompt or answer."""

    max_ngram: int = Field(default=3, ge=1)  # tokens that must agree, tried first
    min_ngram: int = Field(default=1, ge=1)  # and tried last
    num_tokens: int = Field(default=7, ge=1)  # copied after the root

    @model_validator(mode="after")
    def _ordered(self) -> "PromptLookupOptions":
        if self.min_ngram > self.max_ngram:
            raise ValueError(
                f"min_ngram {self.min_ngram} is above max_ngram {self.max_ngram}; "
                "expected at most that"
            )
        return self


class SuffixOptions(Section):
    """The longest earlier matches of the text's end, several of them as a tree."""

    num_nodes: int = Field(default=8, ge=2)  # root included
    max_match: int = Field(default=32, ge=1)  # tokens of agreement that still count
    store: str | None = None  # file with past answers, read at the start and extended
    store_tokens: int = Field(default=1_000_000, ge=1)  # beyond, the oldest answers are dropped


class RecyclingOptions(Section):
    """Token recycling (arXiv 2408.08696): a table of the top next tokens, kept up to date."""

    num_nodes: int = Field(default=8, ge=2)
    width: int = Field(default=8, ge=1)  # top tokens remembered after each token


class StagedOptions(Section):
    """The drafter that drafts for the draft model."""

    drafter: Literal["prompt-lookup", "suffix", "recycling", "draft-model", "mtp"] = "suffix"
    draft_model: str | None = None  # with drafter draft-model
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _model_with_its_drafter(self) -> "StagedOptions":
        if (self.drafter == "draft-model") != (self.draft_model is not None):
            raise ValueError(
                f"drafter {self.drafter!r} with draft_model {self.draft_model!r}; expected a "
                "draft_model with drafter draft-model and with no other"
            )
        return self


class DraftModelOptions(Section):
    """A smaller causal LM."""

    removed: ClassVar[Mapping[str, Removed]] = {
        "sampling": Removed(
            "rejection accepted no more draft tokens than matched draws do, and a seed's text then "
            "depended on the drafter",
            "leave it out: a draft model's draws are matched",
            kept=("matched",),
        ),
        "lengths": Removed(NO_GAIN, "leave it out: drafts stop by threshold", kept=("threshold",)),
        "length": Removed(NO_GAIN, "use max_length, the most tokens of a draft"),
        "adapt": Removed(NO_GAIN, "leave it out: the threshold follows acceptance", kept=(True,)),
        "width": Removed(NO_GAIN, "leave it out: a draft is a chain", kept=(1,)),
        "tokenizer": Removed(
            NO_GAIN, "leave it out: drafts are exchanged as text", values=("intersection",)
        ),
    }
    max_length: int = Field(default=10, ge=1)  # tokens of a draft
    threshold: float = Field(default=0.4, ge=0, lt=1)  # of the draft's chance so far, at the start
    num_nodes: int = Field(default=16, ge=2)  # in the base's tokens, root included
    tokenizer: Literal["auto", "same", "text"] = "auto"
    staged: StagedOptions | None = None


class MtpOptions(Section):
    """The base's own layers for multi-token prediction."""

    num_tokens: int = Field(default=3, ge=1)  # drafted after the root


class AutoOptions(Section):
    """Takes what pays at each position of what there is, as measured while decoding."""

    # Suffix, recycling, heads where there are any, a draft model where one is named, the base's own
    # MTP layers where it has any, unless given.
    sources: list[SourceName] | None = None
    max_nodes: int = Field(default=16, ge=2)
    options: dict[SourceName, dict[str, Any]] = Field(default_factory=dict)  # by source

    @model_validator(mode="after")
    def _options_of_sources(self) -> "AutoOptions":
        others = [name for name in self.options if name not in (self.sources or SOURCES)]
        if others:
            raise ValueError(
                f"options of {others[0]}, which is none of the sources {self.sources}; expected "
                "options of these"
            )
        return self


OPTIONS: dict[str, type[Section]] = {
    "auto": AutoOptions,
    "draft-model": DraftModelOptions,
    "prompt-lookup": PromptLookupOptions,
    "suffix": SuffixOptions,
    "recycling": RecyclingOptions,
    "mtp": MtpOptions,
}
DRAFTERS = allowed("drafter")
BROUGHT_ALONG = ("mtp",)  # by layers of the base's own checkpoint, which few have
READ_HEADS = ("medusa", "auto")  # where there are any
READ_DRAFT_MODEL = ("draft-model", "auto")  # where one is named


def default_drafter(has_heads: bool, has_draft_model: bool) -> str:
    """The drafter of an engine built in code without one; `load` and the commands take auto."""
    if has_heads:
        return "medusa"
    return "draft-model" if has_draft_model else "none"


def drafter_options(name: str, options: Mapping[str, Any] | Section | None = None) -> Any:
    """Checked options of drafter `name`. Raises ConfigError: unknown name or key, wrong value."""
    check_value("drafter", name)
    kind = OPTIONS.get(name, NoOptions)
    if isinstance(options, Section):
        options = options.model_dump()
    check_value("drafter_options", options)
    try:
        return kind.model_validate(dict(options or {}))
    except ValidationError as error:
        raise explain(error, f"drafter {name}", kind, "there is no option") from error


def drafts_without_heads(drafter: str | None, has_draft_model: bool, fallback: str | None) -> bool:
    """Whether something other than heads was asked for, to draft where they do not fit."""
    if fallback is not None or drafter == "auto":
        return True
    return has_draft_model and drafter != "medusa"


def check_drafting(
    name: str | None,
    options: Mapping[str, Any] | None,
    has_draft_model: bool,
    fallback: str | None = None,
) -> None:
    """Refuse, before anything is loaded, what no engine could draft with.

    Raises ConfigError: an unknown drafter or option, options of no drafter, no draft model.
    """
    if name is not None:
        drafter_options(name, options)
    elif options:
        raise ConfigError(
            f"drafter options ({', '.join(options)}) without a drafter; expected one by name",
            hint=f"name one of {', '.join(DRAFTERS)}",
        )
    check_value("fallback", fallback)
    if "draft-model" in (name, fallback) and not has_draft_model:
        raise ConfigError(
            "drafter draft-model needs a smaller model, and none is named",
            hint="name it with --draft-model MODEL; in Python and engine files it is draft_model",
        )
