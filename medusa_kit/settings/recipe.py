"""Training recipes: typed sections read from YAML, overrides on top, unknown keys refused.

A recipe is frozen once loaded. `dump` gives the resolved one, which the run keeps beside its heads.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from medusa_kit.errors import ConfigError, did_you_mean
from medusa_kit.paths import beside, expanded, whole, written
from medusa_kit.settings.engine import FLOAT32, OWN_MODELS, Activations
from medusa_kit.settings.joint import JointSection as JointSection
from medusa_kit.settings.joint import LoraSection as LoraSection
from medusa_kit.settings.schema import Removed, Section, apply_override, explain, read_yaml

TrainingDType = Literal["float32", "bfloat16", "float16"]
StoredDType = Literal["float32", "bfloat16", "float16", "int8"]
# A path, or a name; Python may give a Path.
PathText = Annotated[str, BeforeValidator(lambda v: str(v) if isinstance(v, PurePath) else v)]
ROOTED_WHY = (
    "'hydra' heads, which read the whole path, had more draft tokens accepted in steps as long"
)


class BaseSection(Section):
    """Which base model, and how it is loaded."""

    # Hub id or a name of the kit's own (smollm2-135m-instruct, ...); a folder or GGUF file, looked
    # up as sources are
    model: PathText
    revision: str | None = None  # branch, tag or commit on the Hub
    dtype: TrainingDType = "float32"  # its weights are loaded in
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    # Of hidden states in C++ on a CPU, of quantised weights; half the time with int8
    activations: Activations = "float32"

    @model_validator(mode="after")
    def _activations_belong_to_float32(self) -> "BaseSection":
        if self.activations != FLOAT32 and self.dtype != FLOAT32:
            raise ValueError(
                f"activations {self.activations!r} with dtype {self.dtype!r}; other activations go "
                "with dtype 'float32', in which C++ computes the rest"
            )
        return self


class HeadsSection(Section):
    """The structure of the heads."""

    removed: ClassVar[Mapping[str, Removed]] = {
        "prefix_layers": Removed(
            "a layer over the whole prefix made decoding slower",
            "leave it out; kind 'recurrent' has the best acceptance",
            kept=(0,),
        ),
        "kind": Removed(ROOTED_WHY, "use 'hydra' or 'recurrent'", values=("rooted",)),
    }
    kind: Literal["medusa", "hydra", "recurrent"] = "medusa"  # what a head reads: docs/training.md
    num_heads: int = Field(default=4, ge=1)  # that are trained
    # Of recurrent heads, so many more after these: another step of the same network, not trained.
    further_heads: int = Field(default=0, ge=0)
    num_blocks: int = Field(default=1, ge=1)  # residual blocks of a head
    mlp_size: int | None = Field(default=None, ge=1)  # of recurrent heads; the base's, unless given
    # The base's output embedding, one for each head, or some of its tokens
    projection: Literal["shared", "own", "reduced"] = "shared"
    reduced_size: int | None = Field(default=None, ge=1)  # tokens a reduced projection keeps
    save_dtype: StoredDType | None = None  # the base's, unless given; int8: see docs/formats.md

    @model_validator(mode="after")
    def _reduced_size_belongs_to_reduced(self) -> "HeadsSection":
        if (self.projection == "reduced") != (self.reduced_size is not None):
            raise ValueError(
                f"projection {self.projection!r} with reduced_size {self.reduced_size}; "
                "reduced_size goes with projection 'reduced', and only with it"
            )
        return self

    @model_validator(mode="after")
    def _some_options_belong_to_recurrent(self) -> "HeadsSection":
        for name in ("mlp_size", "further_heads"):
            if self.kind != "recurrent" and (value := getattr(self, name)):
                raise ValueError(
                    f"{name} {value} with kind {self.kind!r}; {name} goes with kind 'recurrent', "
                    "and only with it"
                )
        return self


class SourceSection(Section):
    """One source and its share of the mix. A plain name means weight 1 and no limit."""

    source: PathText  # a file, a folder or a data set
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)  # share of rows, relative
    limit: int | None = Field(default=None, ge=1)  # rows read from this source

    @model_validator(mode="before")
    @classmethod
    def _no_unknown_key(cls, raw: Any) -> Any:
        """`_suggest` knows a recipe's sections by name, and an entry of a list has none."""
        for key in raw if isinstance(raw, dict) else ():
            if key not in cls.model_fields:
                known = f"known: {', '.join(cls.model_fields)}"
                raise ValueError(
                    f"unknown key {key!r}; {did_you_mean(key, cls.model_fields, known)}"
                )
        return raw


def _name_or_mapping(value: Any) -> Any:
    """Plain names stay plain names, so that a dumped recipe reads as it was written."""
    if isinstance(value, str | PurePath):
        return str(value)
    if isinstance(value, SourceSection):
        return value
    if isinstance(value, dict):
        return SourceSection.model_validate(value)
    raise ValueError(f"{value!r} is no source; expected a name or {{source, weight, limit}}")


Source = Annotated[str | SourceSection, BeforeValidator(_name_or_mapping)]


class DataSection(Section):
    """Which text is trained on.

    Several sources are read one after the other; with a weight other than 1, a limit over all of
    them or mix "stop_at_first", rows are drawn from them by weight.
    """

    sources: list[Source] = Field(min_length=1)  # looked up beside the recipe, then as given
    mix: Literal["exhaust", "stop_at_first"] = "exhaust"  # go on when one source is used up?
    streaming: bool = False  # data sets row by row, never the whole of one; needs a limit
    max_length: int = Field(default=2048, ge=4)  # tokens kept of a row, at most the model's context
    eval_fraction: float = Field(default=0.02, gt=0, lt=1)  # share of rows held out
    limit: int | None = Field(default=None, ge=2)  # rows read from all sources together
    on_error: Literal["skip", "fail"] = "skip"  # a row that cannot be encoded
    # Which tokens heads learn to predict: the assistant's, or those of prompts too. Held-out rows
    # are judged by the assistant's alone.
    train_on: Literal["answers", "all"] = "answers"

    def entries(self) -> list[SourceSection]:
        """Every source with its weight and limit spelled out."""
        return [
            entry if isinstance(entry, SourceSection) else SourceSection(source=entry)
            for entry in self.sources
        ]


class TrainSection(Section):
    """The optimisation. Positions, not rows, make a batch."""

    removed: ClassVar[Mapping[str, Removed]] = {
        "fused_loss": Removed(
            "no gain by a library was ever measured, and none computes the default loss, 'soft'",
            "leave it out; every loss is computed by chunks of chunk_positions",
            kept=("auto", "never"),
        ),
        "head_weights": Removed(
            "learned weights gave fewer tokens a step than head_decay, or at most as many",
            "leave it out; head k weighs head_decay ** k",
            kept=("decay",),
        ),
        "loss": Removed(
            "'lk', by the same overlap, gave fewer tokens a step than 'soft' at every tree size",
            "use 'soft', the default, or 'lk'",
            values=("tv",),
        ),
    }
    # Heads of an earlier run to go on from, a folder (looked up as sources are) or Hub id.
    # Recurrent ones may be fewer.
    heads_from: PathText | None = None
    epochs: int = Field(default=1, ge=1)  # times that the text is read
    micro_batch_positions: int = Field(default=4096, ge=1)  # tokens to learn from, in a forward
    accumulation: int = Field(default=1, ge=1)  # micro-batches an update
    # muon: for the matrices of the heads' layers; without deepspeed
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = Field(default=1e-3, gt=0)  # the highest; it falls to 0 at the end
    warmup_ratio: float = Field(default=0.05, ge=0, lt=1)  # share of updates in which it rises
    weight_decay: float = Field(default=0.0, ge=0)
    head_decay: float = Field(default=0.8, gt=0, le=1)  # head k (from 1) weighs head_decay ** k
    loss: Literal["cross_entropy", "soft", "lk"] = "soft"  # docs/training.md compares them
    # Share of the base's distribution in the target; not with cross_entropy. 0.5 for soft, else 1.
    soft_share: float | None = Field(default=None, gt=0, le=1)
    # Likeliest tokens of the base kept for it (32; with Medusa-2 joint.distill_top), or all of the
    # heads' columns: computed from the hidden states in each epoch, so that nothing is kept beside.
    soft_top: Annotated[int, Field(ge=1)] | Literal["all"] | None = None
    # Also train on paths that end in another token that the base thinks likely there, for a second
    # forward of the base. With soft_top "all".
    runners_up: bool = False
    grad_clip: float = Field(default=1.0, gt=0)  # largest norm of the gradients
    # Moving average of the weights, judged and kept in their place: how much of it stays at an
    # update, for example 0.999. In the first updates less stays: (1 + update) / (10 + update).
    average: float | None = Field(default=None, gt=0, lt=1)
    # Of the heads' matrix products; weights, losses and the optimiser stay in float32.
    precision: Literal["float32", "bfloat16"] = "float32"
    chunk_positions: int = Field(default=1024, ge=1)  # rows of logits that exist at once
    # Hidden states of the frozen base: computed once and kept in memory or on disk, or every epoch.
    # Medusa-2 moves the base, so there they are always live.
    features: Literal["memory", "disk", "live"] | None = None
    cache_dir: PathText | None = None  # with features "disk"; shared by runs on the same base
    cache_dtype: TrainingDType = "bfloat16"  # of hidden states that are kept
    feature_batch_tokens: int = Field(default=8192, ge=1)  # padded tokens a forward of the base
    packing: bool = False  # rows one after another in a forward, instead of side by side
    log_every: int = Field(default=10, ge=1)  # updates
    eval_every: int = Field(default=200, ge=1)  # updates between looks at held-out rows
    save_every: int = Field(default=200, ge=1)  # updates between checkpoints
    keep: Literal["best", "last"] = "best"  # by simulated acceptance length on held-out rows

    @model_validator(mode="after")
    def _soft_options_belong_to_soft_losses(self) -> "TrainSection":
        if self.loss == "cross_entropy":
            for name in ("soft_share", "soft_top"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"loss {self.loss!r} with {name} {getattr(self, name)}; {name} goes with "
                        "the losses 'soft' and 'lk', and only with them"
                    )
        if self.soft_top == "all" and self.loss != "soft":
            raise ValueError(f"loss {self.loss!r} with soft_top 'all'; that goes with loss 'soft'")
        return self

    @model_validator(mode="after")
    def _cache_dir_belongs_to_disk(self) -> "TrainSection":
        if self.cache_dir is not None and self.features != "disk":
            raise ValueError(
                f"features {self.features!r} with cache_dir {self.cache_dir!r}; cache_dir goes "
                "with features 'disk', and only with it"
            )
        return self


class OffloadSection(Section):
    """What is kept in the host's memory."""

    optimizer: bool = False
    parameters: bool = False  # with zero_stage 3


class DeepspeedSection(Section):
    """How the optimiser is spread over processes (ZeRO, arXiv 1910.02054)."""

    enabled: bool = True  # else torch alone, in one process
    zero_stage: Literal[0, 1, 2, 3] = 0
    offload: OffloadSection = OffloadSection()  # to the host's memory
    persistence_threshold: int = Field(default=100_000, ge=0)  # stage 3: smaller ones stay whole

    @model_validator(mode="after")
    def _offload_needs_a_stage(self) -> "DeepspeedSection":
        if self.offload.optimizer and self.zero_stage == 0:
            raise ValueError("offload.optimizer with zero_stage 0; it needs stage 1, 2 or 3")
        if self.offload.parameters and self.zero_stage != 3:
            raise ValueError(f"offload.parameters with zero_stage {self.zero_stage}; it needs 3")
        return self


class LoggingSection(Section):
    """Where curves go, beside the run's own files."""

    wandb: bool = False
    offline: bool = False  # wandb writes to output_dir/wandb, to be synced later
    project: str = "medusa-kit"


class TrainRecipe(Section):
    """Everything a training run depends on."""

    stage: Literal["medusa1", "medusa2"] = "medusa1"  # heads alone, or the base as well
    output_dir: PathText  # the run: heads, checkpoints, curves
    seed: int = Field(default=0, ge=0, lt=2**63)  # of first weights and the order of rows
    base: BaseSection
    heads: HeadsSection = HeadsSection()
    data: DataSection
    train: TrainSection = TrainSection()
    joint: JointSection | None = None  # stage medusa2
    deepspeed: DeepspeedSection = DeepspeedSection()
    logging: LoggingSection = LoggingSection()

    @model_validator(mode="after")
    def _stages_have_their_own_options(self) -> "TrainRecipe":
        features = self.train.features
        if self.stage == "medusa2" and features not in (None, "live"):
            raise ValueError(
                f"stage 'medusa2' with train.features {features!r}; the base moves, so its hidden "
                "states are always live"
            )
        if self.stage == "medusa2" and self.base.dtype == "float16":
            raise ValueError("stage 'medusa2' with base.dtype 'float16'; use bfloat16 or float32")
        by_torch = "train.runners_up" if self.train.runners_up else f"stage {self.stage!r}"
        if self.base.activations != FLOAT32 and by_torch != "stage 'medusa1'":
            raise ValueError(
                f"base.activations {self.base.activations!r} with {by_torch}: torch computes its "
                "hidden states; use float32"
            )
        if self.train.soft_top == "all" and self.stage == "medusa2":
            raise ValueError("stage 'medusa2' with train.soft_top 'all'; give a number")
        if self.train.soft_top == "all" and self.heads.projection == "own":
            raise ValueError("heads.projection 'own' with train.soft_top 'all'; give a number")
        if self.stage == "medusa2" and self.data.train_on == "all":
            raise ValueError(
                "stage 'medusa2' with data.train_on 'all': the base would learn to write prompts; "
                "use 'answers'"
            )
        if self.stage == "medusa1" and self.joint is not None:
            raise ValueError("stage 'medusa1' with a section joint; joint goes with 'medusa2'")
        return self

    @model_validator(mode="after")
    def _deepspeed_runs_adamw(self) -> "TrainRecipe":
        if self.train.optimizer != "adamw" and self.deepspeed.enabled:
            raise ValueError(
                f"train.optimizer {self.train.optimizer!r} with deepspeed.enabled, which runs "
                "'adamw'; add deepspeed.enabled=false"
            )
        return self

    @model_validator(mode="after")
    def _runners_up_end_paths(self) -> "TrainRecipe":
        heads, train = self.heads, self.train
        spread = self.deepspeed.enabled and self.deepspeed.zero_stage == 3
        needed = {
            "stage 'medusa1'": self.stage == "medusa1",
            "train.soft_top 'all'": train.soft_top == "all",
            "heads.kind 'recurrent' or 'hydra'": heads.kind != "medusa",
            "rows side by side (train.packing false)": not train.packing,
            "deepspeed.zero_stage 0, 1 or 2": not spread,
        }
        missing = [name for name, holds in needed.items() if not holds]
        if train.runners_up and missing:
            raise ValueError(f"train.runners_up true; it needs {', '.join(missing)}")
        return self

    @model_validator(mode="after")
    def _an_average_needs_whole_weights(self) -> "TrainRecipe":
        spread = self.deepspeed.enabled and self.deepspeed.zero_stage == 3
        if self.train.average is not None and spread:
            raise ValueError(
                f"train.average {self.train.average} with deepspeed.zero_stage 3, which leaves no "
                "process the whole weights; use zero_stage 0, 1 or 2, or leave average out"
            )
        return self

    @property
    def joint_options(self) -> JointSection:
        """The section `joint`; its defaults where the recipe has none."""
        return self.joint or JointSection()

    @property
    def trains_whole_base(self) -> bool:
        return self.stage == "medusa2" and self.joint_options.moves == "full"


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> TrainRecipe:
    """The recipe at `path` with `section.key=value` overrides, values read as YAML.

    Raises ConfigError: no such file, no YAML, an unknown key, a value of the wrong type.
    """
    path = expanded(path)
    return _looked_up(read_recipe(path, overrides), path.parent)


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> TrainRecipe:
    """The same, its paths as they were written."""
    raw = read_yaml(path, "recipe")
    for override in overrides:
        apply_override(raw, override)
    return _checked(raw, str(path))


def _checked(raw: dict[str, Any], where: str) -> TrainRecipe:
    try:
        return TrainRecipe.model_validate(raw)
    except ValidationError as error:
        raise explain(error, where, TrainRecipe) from error


def dump(recipe: TrainRecipe) -> str:
    """The recipe as YAML, defaults spelled out. Loads back to an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(), sort_keys=False)


def differences(first: TrainRecipe, second: TrainRecipe) -> list[str]:
    """`section.key: first ≠ second` for every value that differs."""
    other = dict(_flatten(second.model_dump()))
    return [
        f"{key}: {value!r} ≠ {other[key]!r}"
        for key, value in _flatten(first.model_dump())
        if value != other[key]
    ]


def _flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def resolved(recipe: TrainRecipe) -> TrainRecipe:
    """The recipe with whole paths, which mean the same from anywhere: a run keeps these, wherever
    its recipe was made. Raises ConfigError, also for values that were put past the checks
    (`model_copy`)."""
    recipe = _looked_up(_checked(recipe.model_dump(warnings=False), "the recipe"))
    return _with_written(recipe, whole)


def _looked_up(recipe: TrainRecipe, *folders: Path) -> TrainRecipe:
    """Models, heads and sources as whole paths where they are in one of `folders` or else in the
    working folder; what is nowhere stays a name. Of what is written `~` and `..`
    alone are resolved."""
    base, train, data = recipe.base, recipe.train, recipe.data
    if base.model not in OWN_MODELS:
        base = base.model_copy(update={"model": beside(base.model, *folders)})
    if train.heads_from is not None:
        train = train.model_copy(update={"heads_from": beside(train.heads_from, *folders)})
    data = data.model_copy(update={"sources": [_found(one, folders) for one in data.sources]})
    _refuse_endless_streams(data)
    recipe = recipe.model_copy(update={"base": base, "train": train, "data": data})
    return _with_written(recipe, written)


def _with_written(recipe: TrainRecipe, resolve: Callable[[str], Path]) -> TrainRecipe:
    """The recipe with `resolve` applied to the folders that a run writes into."""
    train = recipe.train
    if train.cache_dir is not None:
        train = train.model_copy(update={"cache_dir": str(resolve(train.cache_dir))})
    output = str(resolve(recipe.output_dir))
    return recipe.model_copy(update={"output_dir": output, "train": train})


def _found(entry: str | SourceSection, folders: Sequence[Path]) -> str | SourceSection:
    if isinstance(entry, str):
        return beside(entry, *folders)
    return entry.model_copy(update={"source": beside(entry.source, *folders)})


def _refuse_endless_streams(data: DataSection) -> None:
    """Checked before a base model is loaded. Only data sets need a limit, since files end. A
    missing file is named when it is read."""
    if not data.streaming or data.limit is not None:
        return
    for entry in data.entries():
        path = Path(entry.source)
        is_file = path.is_file() or path.suffix in (".jsonl", ".json", ".txt")
        if entry.limit is None and not is_file:
            raise ConfigError(
                f"data.streaming reads {entry.source!r} without a limit, so it might never end",
                hint="set data.limit, or give the source as {source: NAME, limit: ROWS}",
            )
