"""Adapters on a base model (LoRA, arXiv 2106.09685), through peft: added, switched off, merged.

An adapter folder holds peft's files (`adapter_config.json`, `adapter_model.safetensors`) and a
`medusa_kit.json` that says which base it belongs to.
"""

import contextlib
import hashlib
import importlib.util
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

from medusa_kit import console
from medusa_kit.base.faults.json_kinds import odd_values
from medusa_kit.errors import (
    CheckpointError,
    ConfigError,
    IncompatibleBaseError,
    did_you_mean,
    in_one_line,
)
from medusa_kit.files import parse_json
from medusa_kit.installing import extra
from medusa_kit.settings.recipe import LoraSection

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
OWN_NAME = "medusa_kit.json"


class AdapterInfo(TypedDict):
    """medusa_kit.json: the base that the adapter was trained on."""

    base_model: str
    revision: str | None
    base_fingerprint: str


def put_on(model: Any, options: LoraSection) -> None:
    """Add new adapters to `model`; only they are trainable from here on.

    They are in float32 at least, whatever the model's own dtype: small updates vanish in 16 bits.
    peft computes their products in their dtype and gives what a layer gives in the layer's.

    Raises ConfigError where peft is missing or a target matches no module (near names are given).
    """
    _require_peft()
    import torch
    from peft import LoraConfig

    left_out = _read_by_kernels(model) if options.targets == "all-linear" else []
    if options.targets != "all-linear":
        _check_targets(model, options.targets)
    model.add_adapter(
        LoraConfig(
            r=options.rank,
            lora_alpha=options.alpha,
            lora_dropout=options.dropout,
            target_modules=options.targets,
            exclude_modules=left_out or None,
            task_type="CAUSAL_LM",
        )
    )
    for parameter in model.parameters():
        if parameter.requires_grad:
            precise = torch.promote_types(parameter.dtype, torch.float32)
            parameter.data = parameter.data.to(precise)


@contextlib.contextmanager
def switched_off(model: Any) -> Iterator[None]:
    """Within this context `model` computes without its adapters, as the original model."""
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


def save_adapter(model: Any, folder: Path, info: AdapterInfo) -> None:
    """Write the adapters on `model`, and `info` about the base they belong to."""
    model.save_pretrained(folder)
    path = folder / CONFIG_NAME
    config = json.loads(path.read_text())
    config["base_model_name_or_path"] = info["base_model"]
    path.write_text(json.dumps(config, indent=2) + "\n")
    (folder / OWN_NAME).write_text(json.dumps(info, indent=2) + "\n")


def is_adapter_folder(path: Path) -> bool:
    return (path / CONFIG_NAME).is_file() and not (path / "config.json").is_file()


def read_info(folder: Path) -> AdapterInfo:
    """Which base an adapter folder belongs to. Raises CheckpointError."""
    try:
        raw = parse_json((folder / OWN_NAME).read_text())
        for key, value, expected in odd_values(OWN_NAME, raw):
            raise ValueError(f"{key} is {value!r}, expected {expected}")
        return {key: raw[key] for key in AdapterInfo.__annotations__}  # type: ignore[return-value]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder} holds an adapter, but no readable {OWN_NAME}: {_in_words(error)}",
            hint="adapters from `medusa-kit train` have one; merge others into their base first",
        ) from error


def _in_words(error: Exception) -> str:
    return f"it lacks {error}" if isinstance(error, KeyError) else in_one_line(error)


def check_base(info: AdapterInfo, found: str, folder: Path) -> None:
    """Raises IncompatibleBaseError where `found`, a base's fingerprint, is not the adapter's."""
    from medusa_kit.base import fingerprint

    match = fingerprint.compare(info["base_fingerprint"], found)
    if match not in fingerprint.SAME_MODEL:
        raise IncompatibleBaseError(
            f"the adapter in {folder} belongs to a base with fingerprint "
            f"{info['base_fingerprint']}; {info['base_model']!r} has {found}",
            hint="load it with the base it was trained on",
        )
    if match is fingerprint.Match.OLD:
        console.note(f"the adapter in {folder}: {fingerprint.OLD_NOTE}")


def merge_into(model: Any, folder: Path) -> Any:
    """`model` with the adapter in `folder` merged into its weights. Raises CheckpointError."""
    _require_peft()
    from peft import PeftModel

    _check_weights(folder / WEIGHTS_NAME)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # about old names
            return PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    except Exception as error:  # from OSError to safetensors' own kinds
        raise CheckpointError(
            f"the adapter in {folder} cannot be merged into its base: {error}",
            hint="the folder is incomplete or damaged, or belongs to another base: copy it again",
        ) from error


def _check_weights(path: Path) -> None:
    """Raises CheckpointError for NaN and infinite numbers; peft says what else is wrong."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from medusa_kit.base.faults.finite import check_numbers

    with contextlib.suppress(SafetensorError, OSError):
        check_numbers(path, load_file(path))


def variant_of(folder: Path) -> str:
    """A digest of the adapter, which tells the merged model from its base."""
    return hashlib.sha256((folder / WEIGHTS_NAME).read_bytes()).hexdigest()[:16]


def require_4bit(device: str) -> None:
    """Raises ConfigError where a 4-bit base cannot be loaded."""
    import torch

    problem = None
    if importlib.util.find_spec("bitsandbytes") is None:
        problem = "the package bitsandbytes is not installed"
    elif not torch.cuda.is_available() or device == "cpu":
        problem = "it needs a CUDA device"
    if problem:
        raise ConfigError(
            f"joint.moves 'qlora' loads the base in 4 bits with bitsandbytes: {problem}",
            hint="joint.moves=lora works anywhere",
        )


def _require_peft() -> None:
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "adapters need the package peft, which is not installed",
            hint=f"{extra('train')}, or train with joint.moves=full",
        )


def _read_by_kernels(model: Any) -> list[str]:
    """Linear layers whose weights kernels of Mamba read without calling the layer, where an adapter
    would do nothing; peft refuses them in some families."""
    return [
        f"{name}.out_proj"
        for name, module in model.named_modules()
        if all(hasattr(module, part) for part in ("A_log", "D", "out_proj"))
    ]


def _check_targets(model: Any, targets: list[str]) -> None:
    """Refuses a target that matches nothing; peft ignores it as long as another one matches."""
    import torch

    by_kernels = _read_by_kernels(model)
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    ends = {name.rpartition(".")[2] for name in linear}
    for target in targets:
        if model.get_output_embeddings() is dict(model.named_modules()).get(target):
            raise ConfigError(
                f"joint.lora.targets: {target!r} is the output embedding, which heads read",
                hint="leave it out; adapters belong on the layers below it",
            )
        if any(name == target or name.endswith(f".{target}") for name in by_kernels):
            raise ConfigError(
                f"joint.lora.targets: {target!r} is a layer whose weights Mamba's kernels read "
                "themselves, past any adapter",
                hint="leave it out, or take all-linear, which does",
            )
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            there = f"there are: {', '.join(sorted(ends))}"
            close = did_you_mean(target, ends)
            raise ConfigError(
                f"joint.lora.targets: {target!r} matches no linear layer of this model",
                hint=f"{close} {there}" if close else there,
            )
