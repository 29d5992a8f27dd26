"""Which engines load heads, by the shape of these alone, and what trains heads for another one."""

import shlex
from typing import Protocol

from medusa_kit.errors import CheckpointError, ConfigError
from medusa_kit.settings.quick import MadeFor

OWN_NAME = "medusa-kit"
ENGINES = {"vllm": "vLLM", "tgi": "TGI", "lorax": "LoRAX", "trt-llm": "TensorRT-LLM",
           "modelopt": "Model Optimizer", "mlc": "MLC-LLM", "fd-v1": "FasterDecoding",
           "fd-v2": "FasterDecoding"}  # fmt: skip


class Shape(Protocol):
    """What a config of heads and the section `heads` of a recipe both say."""

    @property
    def kind(self) -> str: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def projection(self) -> str: ...
    @property
    def reduced_size(self) -> int | None: ...


class OfBase(Shape, Protocol):
    """What a config of heads says besides."""

    @property
    def base_model_name(self) -> str: ...


def formats_for(heads: Shape) -> list[str]:
    """Other engines' formats that hold such heads, as docs/formats.md says; none for most kinds."""
    if heads.kind != "medusa":
        return []
    if heads.reduced_size is not None:
        return ["vllm"] if heads.projection == "reduced" else []
    whole = ["vllm", "tgi", "lorax", "trt-llm", "modelopt", "mlc"]
    return whole if heads.num_blocks > 1 else [*whole, "fd-v1"]


def engines_for(heads: Shape) -> str:
    """The engines in words, medusa-kit first; the others load such heads after `convert`."""
    names = [OWN_NAME, *(ENGINES[name] for name in formats_for(heads))]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def how_to_train(to: str, base_name: str | None) -> str:
    """A hint on what trains heads that the format holds. Heads for TGI go into every format."""
    engine: MadeFor = "vllm" if to == "vllm" else "tgi"
    base = shlex.quote(base_name) if base_name else "BASE"
    keys = ["heads.kind=medusa"]
    if to != "vllm":
        keys.append("heads.projection=shared")
    return (
        f"train heads that {ENGINES[to]} loads: medusa-kit train --quick --for {engine} "
        f"-m {base} --prompts PROMPTS; in a recipe {' '.join(keys)}"
    )


def check_shape(config: OfBase, to: str) -> None:
    """Raises ConfigError for kinds that other engines lack, CheckpointError for heads of some
    tokens where the format holds none."""
    hint = how_to_train(to, config.base_model_name)
    if config.kind != "medusa":
        raise ConfigError(
            f"heads of kind {config.kind!r} read tokens besides the hidden state, and no other "
            "engine supports such heads",
            hint=hint,
        )
    if config.reduced_size is not None and to != "vllm":
        raise scores_some(config.reduced_size, to, config.base_model_name)


def scores_some(count: int, to: str, base_name: str | None) -> CheckpointError:
    """The error, to be raised, for heads of `count` tokens."""
    return CheckpointError(
        f"the heads score {count} tokens of the vocabulary, and {to} can hold only heads that "
        "score all",
        hint=f"vLLM can hold them: --to vllm; or {how_to_train(to, base_name)}",
    )
