"""Training recipes: typed sections read from YAML, overrides on top, unknown keys refused.

A recipe is frozen once loaded; `dump` gives the resolved one, which the run keeps beside its heads.
Only options that do something exist.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel as PydanticModel
from pydantic import ConfigDict, Field, ValidationError, model_validator

from medusa_kit.errors import ConfigError, nearest


class Section(PydanticModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BaseSection(Section):
    """Which base model, and how it is loaded."""

    model: str  # Hub id, folder, GGUF file, smollm2-135m-instruct or debug-tiny
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"


class HeadsSection(Section):
    """What the heads are made of."""

    kind: Literal["medusa", "rooted", "hydra"] = "medusa"  # what a head reads; see heads/kinds.py
    num_heads: int = Field(default=4, ge=1)
    num_blocks: int = Field(default=1, ge=1)
    projection: Literal["shared", "own", "reduced"] = "shared"
    reduced_size: int | None = Field(default=None, ge=1)  # tokens a reduced projection keeps
    save_dtype: Literal["float32", "bfloat16", "float16"] | None = None  # the base's, unless given

    @model_validator(mode="after")
    def _reduced_size_belongs_to_reduced(self) -> "HeadsSection":
        if (self.projection == "reduced") != (self.reduced_size is not None):
            raise ValueError(
                f"projection {self.projection!r} with reduced_size {self.reduced_size}; "
                "reduced_size goes with projection 'reduced', and only with it"
            )
        return self


class DataSection(Section):
    """Which text is trained on."""

    sources: list[str] = Field(min_length=1)  # files, looked up beside the recipe, then as given
    max_length: int = Field(default=2048, ge=4)  # tokens a row keeps, at most the model's context
    eval_fraction: float = Field(default=0.02, gt=0, lt=1)  # share of rows held out
    limit: int | None = Field(default=None, ge=2)  # rows read over all sources
    on_error: Literal["skip", "fail"] = "skip"  # a row that cannot be encoded


class TrainSection(Section):
    """The optimisation. Positions, not rows, make a batch."""

    epochs: int = Field(default=1, ge=1)
    micro_batch_positions: int = Field(default=4096, ge=1)
    accumulation: int = Field(default=1, ge=1)  # micro-batches an update
    learning_rate: float = Field(default=1e-3, gt=0)
    warmup_ratio: float = Field(default=0.05, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    head_decay: float = Field(default=0.8, gt=0, le=1)  # head k (from 1) weighs head_decay ** k
    loss: Literal["cross_entropy", "soft"] = "cross_entropy"  # see train/loss.py
    soft_share: float | None = Field(default=None, gt=0, le=1)  # of the loss; with loss "soft"
    soft_top: int | None = Field(default=None, ge=1)  # likeliest tokens of the base kept; 32
    grad_clip: float = Field(default=1.0, gt=0)
    chunk_positions: int = Field(default=1024, ge=1)  # rows of logits that exist at once
    features: Literal["memory", "live"] = "memory"  # hidden states once, or every epoch
    feature_batch_tokens: int = Field(default=8192, ge=1)  # padded tokens a forward of the base
    log_every: int = Field(default=10, ge=1)
    eval_every: int = Field(default=200, ge=1)
    save_every: int = Field(default=200, ge=1)

    @model_validator(mode="after")
    def _soft_share_belongs_to_soft(self) -> "TrainSection":
        if (self.loss == "soft") != (self.soft_share is not None):
            raise ValueError(
                f"loss {self.loss!r} with soft_share {self.soft_share}; soft_share goes with loss "
                "'soft', and only with it"
            )
        if self.soft_top is not None and self.loss != "soft":
            raise ValueError(f"soft_top {self.soft_top} goes with loss 'soft', and only with it")
        return self


class DeepspeedSection(Section):
    enabled: bool = True
    zero_stage: Literal[0] = 0


class LoggingSection(Section):
    wandb: bool = False
    project: str = "medusa-kit"


class TrainRecipe(Section):
    """Everything a training run depends on."""

    stage: Literal["medusa1"] = "medusa1"
    output_dir: str
    seed: int = Field(default=0, ge=0)
    base: BaseSection
    heads: HeadsSection = HeadsSection()
    data: DataSection
    train: TrainSection = TrainSection()
    deepspeed: DeepspeedSection = DeepspeedSection()
    logging: LoggingSection = LoggingSection()


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> TrainRecipe:
    """The recipe at `path` with `section.key=value` overrides, values read as YAML.

    Raises ConfigError: no such file, no YAML, an unknown key, a value of the wrong type.
    """
    path = Path(path)
    raw = _read(path)
    for override in overrides:
        _apply(raw, override)
    try:
        recipe = TrainRecipe.model_validate(raw)
    except ValidationError as error:
        raise _explain(error, path) from error
    return _resolve_sources(recipe, path.parent)


def dump(recipe: TrainRecipe) -> str:
    """The recipe as YAML, defaults spelled out. Loads back to an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(), sort_keys=False)


def differences(ours: TrainRecipe, theirs: TrainRecipe) -> list[str]:
    """`section.key: ours ≠ theirs` for every value that differs."""
    other = dict(_flatten(theirs.model_dump()))
    return [
        f"{key}: {value!r} ≠ {other[key]!r}"
        for key, value in _flatten(ours.model_dump())
        if value != other[key]
    ]


def _flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"no recipe at {path}", hint="name a YAML file; see recipes/")
    try:
        raw = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds {type(raw).__name__}; expected sections with keys")
    return raw


def _apply(raw: dict[str, Any], override: str) -> None:
    """Put one `section.key=value` into the raw recipe."""
    name, equals, text = override.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(
            f"override {override!r} is not of the form section.key=value",
            hint="for example train.epochs=2",
        )
    section = raw
    for part in parts[:-1]:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise ConfigError(f"override {override!r}: {part!r} is a value, not a section")
    try:
        section[parts[-1]] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is no YAML: {error}") from error


def _explain(error: ValidationError, path: Path) -> ConfigError:
    """Our words for what pydantic found; the hint belongs to the first unknown key."""
    problems, hint = [], None
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            problems.append(f"unknown key {name!r}")
            hint = hint or _suggest(name)
        elif item["type"] == "missing":
            problems.append(f"{name!r} is missing")
        elif item["type"] == "value_error":
            problems.append(f"{name}: {item['ctx']['error']}")
        else:
            expected = item["msg"].replace("Input should be", "expected")
            problems.append(f"{name} = {item['input']!r}: {expected}")
    return ConfigError(f"{path}: {'; '.join(problems)}", hint=hint)


def _suggest(name: str) -> str:
    """The nearest key of the same section, else of the whole recipe, else the section's keys."""
    section, _, key = name.rpartition(".")
    known = list(_known_keys(TrainRecipe))
    siblings = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == section]
    if close := nearest(key, siblings):
        return f"did you mean {section + '.' if section else ''}{close}?"
    elsewhere = {k.rpartition(".")[2]: k for k in known}
    if close := nearest(key, elsewhere):
        return f"did you mean {elsewhere[close]}?"
    return f"known keys: {', '.join(siblings)}"


def _known_keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _known_keys(field.annotation, f"{prefix}{name}.")


def _resolve_sources(recipe: TrainRecipe, folder: Path) -> TrainRecipe:
    """Relative paths that exist beside the recipe, else in the working folder, made absolute."""
    sources = []
    for source in recipe.data.sources:
        places = [folder / source, Path(source)]
        found = next((place for place in places if place.exists()), None)
        sources.append(source if found is None else str(found.resolve()))
    data = recipe.data.model_copy(update={"sources": sources})
    return recipe.model_copy(update={"data": data})
