"""Finds a base model's files by the name a person gives, and reads them with transformers."""

import os
from collections.abc import Iterable
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

import torch

from medusa_kit import console
from medusa_kit.base import adapters, families
from medusa_kit.base import gguf as embedded
from medusa_kit.base.faults.small_files import CONFIG
from medusa_kit.base.gguf_files.parts import read_headers
from medusa_kit.base.names import check_name, model_path, near_hint, not_here
from medusa_kit.base.own_models import own_gguf
from medusa_kit.base.placement import load_dtype
from medusa_kit.base.quantization import installing, is_known, method_of
from medusa_kit.base.remembered_configs import own_config, read_config, read_tokenizer
from medusa_kit.base.text_part import WHOLE_KEY, causal_model, load_causal
from medusa_kit.errors import (
    CheckpointError,
    IncompatibleBaseError,
    MedusaKitError,
)
from medusa_kit.locks import building_models
from medusa_kit.paths import expanded, whole
from medusa_kit.settings.engine import DEBUG_NAME, OWN_MODELS

# Kinds of tensors in GGUF files that are not quantised.
GGUF_NUMBERS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCKS = torch.bfloat16  # in which the others are held
NO_TOKENIZER = "holds no tokenizer: prompts and answers are token ids"


def resolve(name: str, weights: bool = True) -> tuple[str, str]:
    """(source, location) of the base of this name; the location is a folder or a Hub id, as
    `from_pretrained` takes it. Without `weights` a GGUF file is not dequantised for it."""
    folder_of = embedded.dequantised_folder if weights else embedded.described_folder
    if name == DEBUG_NAME:
        return "debug", name
    if (own := own_gguf(name)) is not None:
        return "embedded", str(folder_of(own))
    check_name(name)
    path = model_path(name)
    if path.suffix == ".gguf":
        return "gguf", str(folder_of(path))
    if path.is_dir():
        if adapters.is_adapter_folder(path):
            return "adapter", str(path)
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path} has no config.json", hint="name a model folder")
        return "folder", str(path)
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file, but not a GGUF file by its name",
            hint="name a model's folder, its Hub id or a file NAME.gguf",
        )
    return "hub", name


LOCAL = ("folder", "gguf", "adapter")  # sources of bases that lie on this machine


def whole_name(name: str, source: str) -> str:
    """A base's name as it is kept: a path whole, since a relative one means something else from
    another folder, and one of two parts would pass for a Hub id."""
    return str(whole(name)) if source in LOCAL else name


def lasting_name(name: str, source: str) -> str:
    """The same for files, without links. A model in memory was often loaded from a folder."""
    path = expanded(name)
    local = source in LOCAL and path.exists()
    in_memory = source == "memory" and (path / "config.json").is_file()
    return str(path.resolve()) if local or in_memory else name


def gguf_source(name: str) -> Path | None:
    """The GGUF file that a base of this name was dequantised from, if it was."""
    if (own := own_gguf(name)) is not None:
        return own
    path = model_path(name)
    return path if path.suffix == ".gguf" and path.is_file() else None


def stored_quantised(name: str, revision: str | None = None) -> str | None:
    """How a base's files are quantised, without reading weights; None where they do not say.

    Unreadable files give None too; loading reports them.
    """
    if name == DEBUG_NAME:
        return None
    if name in OWN_MODELS:
        return "a quantised GGUF file"
    try:
        if (path := gguf_source(name)) is not None:
            return _gguf_kinds(path)
        source, location = resolve(name, weights=False)
        if source == "adapter":
            info = adapters.read_info(Path(location))
            return stored_quantised(info["base_model"], info["revision"])
        config = read_config(location, revision)
    except Exception:  # as in `from_pretrained`
        return None
    return _method(config)


def stored_config(name: str, revision: str | None = None) -> Any | None:
    """The config of a base's text model, without reading weights; None where it cannot be read,
    which loading reports."""
    try:
        source, location = resolve(name, weights=False)
        if source == "debug":
            return embedded.debug_model()[0].config
        if source == "adapter":
            info = adapters.read_info(Path(location))
            return stored_config(info["base_model"], info["revision"])
        return read_config(location, revision).get_text_config()
    except Exception:  # as in `from_pretrained`
        return None


def check_readable(name: str, revision: str | None = None) -> None:
    """Raises CheckpointError for a base whose config cannot be found or read."""
    source, location = resolve(name, weights=False)
    if source == "adapter":
        info = adapters.read_info(Path(location))
        check_readable(info["base_model"], info["revision"])
    elif source != "debug":  # its name must not be looked up on the Hub
        try:
            read_config(location, revision)
        except MedusaKitError:
            raise
        except Exception as error:  # as in `from_pretrained`
            raise _cannot_load(location, None, error, CONFIG) from error


def stored_generation_config(name: str, revision: str | None = None) -> Any | None:
    """The generation config beside a base's weights; None where none can be read."""
    from transformers import GenerationConfig

    try:
        source, location = resolve(name, weights=False)
        if source == "debug":  # its name must not be looked up on the Hub
            return None
        if source == "adapter":
            info = adapters.read_info(Path(location))
            return stored_generation_config(info["base_model"], info["revision"])
        return GenerationConfig.from_pretrained(location, revision=revision)
    except Exception:  # many bases have none
        return None


def config_and_folder(location: str, source: str, revision: str | None) -> tuple[Any, Path]:
    """(config, the folder that it lies in) of a checkpoint on this machine. Raises what reading
    raises; CheckpointError for one that is not all here."""
    folder = Path(location)
    if source == "hub":
        from transformers.utils import cached_file

        folder = Path(cached_file(location, "config.json", revision=revision)).parent
        if not any(_is_tokenizer_file(path.name) for path in folder.iterdir()):
            raise CheckpointError(f"{folder} holds no tokenizer")
    return read_config(str(folder)), folder


def generation_config_of(folder: Path, config: Any) -> Any:
    """The generation config that transformers gives a model which it loads from `folder` with
    `config`."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(folder)
    except OSError:
        if hasattr(config, WHOLE_KEY):  # what the file says is nested there
            return GenerationConfig.from_model_config(config)
        return GenerationConfig.from_pretrained(
            folder, config_file_name="config.json", _from_model_config=True
        )


def built_sizes(config: Any) -> dict[str, int] | None:
    """Hidden and vocabulary size of a model with this config, which is built on the meta device to
    save memory and time. None where that fails."""
    try:
        with torch.device("meta"):
            model = causal_model(own_config(config))
        weight_VD = model.get_output_embeddings().weight
    except Exception:  # families differ in what they do on the meta device
        return None
    return {"hidden size": weight_VD.shape[1], "vocabulary size": weight_VD.shape[0]}


def _method(config: Any) -> str | None:
    quantization = getattr(config, "quantization_config", None)
    return None if quantization is None else method_of(quantization)


def _gguf_kinds(path: Path) -> str | None:
    return ", ".join(sorted(_kinds(path) - GGUF_NUMBERS.keys())) or None


def _kinds(path: Path) -> set[str]:
    """The types of blocks of a GGUF file's matrices."""
    tensors = [tensor for _, tensor in read_headers(path).tensors.values()]
    return {tensor.kind for tensor in tensors if len(tensor.shape) > 1}


def dtype_of_gguf(path: Path) -> torch.dtype:
    """The dtype to load a GGUF file in where none is asked for: its own if it is not quantised.
    Else bfloat16: blocks have few bits, and float32 would take twice its memory and time."""
    kinds = _kinds(path)
    return GGUF_NUMBERS.get(next(iter(kinds)), BLOCKS) if len(kinds) == 1 else BLOCKS


def from_pretrained(
    location: str,
    dtype: torch.dtype | str,
    revision: str | None,
    attention: str | None,
    four_bit: bool,
) -> tuple[Any, Any]:
    """(model, tokenizer or None). `dtype`: as of `placement.load_dtype`. `attention`: transformers'
    name for it, None for the class's default.

    Raises IncompatibleBaseError, before any weight is read, for what the config rules out;
    CheckpointError.
    """
    from transformers import BitsAndBytesConfig

    console.stage("reading the model")
    options: dict[str, Any] = {}
    method = "bitsandbytes" if four_bit else None
    part: str | None = CONFIG
    try:
        config, part = read_config(location, revision), None
        dtype = load_dtype(dtype, config)
        if four_bit:  # NF4 (QLoRA, arXiv 2305.14314)
            compute_dtype = torch.float32 if isinstance(dtype, str) else dtype
            options["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute_dtype
            )
        families.refuse_impossible(config, location)
        method = method or _method(config)
        _refuse_unknown(method, location)
        with building_models:
            model, loading_info = load_causal(
                location, config, dtype=dtype, revision=revision, attn_implementation=attention,
                **options,
            )  # fmt: skip
        if method is None:
            _check_nothing_missing(loading_info["missing_keys"], location)
        part = "tokenizer files"
        tokenizer = tokenizer_of(location, revision)
    except MedusaKitError:
        raise
    except Exception as error:  # from OSError to safetensors' own kinds
        raise _cannot_load(location, method, error, part) from error
    return model, tokenizer


def _check_nothing_missing(names: Iterable[str], location: str) -> None:
    """Raises CheckpointError for missing tensors: transformers would fill them with random
    numbers."""
    if missing := sorted(names):
        raise CheckpointError(
            f"{location!r} lacks {len(missing)} tensors of the model, among them {missing[0]!r}",
            hint="config.json may be another model's, or a file of weights may be missing",
        )


def not_found(location: str, error: Exception) -> CheckpointError | None:
    """The error to raise where `error` says that neither this machine nor the Hub has anything of
    that name; None for other errors. A path that was mistyped looks like a Hub id."""
    if Path(location).exists() or not isinstance(error, OSError):
        return None
    message = str(error)
    if "is not a local folder" in message:
        explanation = "nor a model of that name on the Hub that you may see"
    elif "couldn't connect" in message:
        return not_here(location)
    else:
        return None
    return CheckpointError(
        f"there is no folder {location!r} here, {explanation}",
        hint=near_hint(location, "check the path; a Hub id needs network and perhaps a login"),
    )


def _cannot_load(
    location: str, method: str | None, error: Exception, part: str | None
) -> CheckpointError:
    """`part`: what of it was being read, besides weights."""
    if (missing := not_found(location, error)) is not None:
        return missing
    return CheckpointError(
        f"cannot load a base model from {location!r}{f', reading its {part}' if part else ''}: "
        f"{error}",
        hint=installing(method, error)
        or "a Hub id needs network and perhaps a login; a folder needs config.json, "
        "safetensors and tokenizer files that are whole",
    )


def tokenizer_of(location: str, revision: str | None = None, quiet: bool = False) -> Any | None:
    """The tokenizer; None for a folder without tokenizer files: token ids can be used without."""
    folder = Path(location)
    if folder.is_dir() and not any(_is_tokenizer_file(path.name) for path in folder.iterdir()):
        if not quiet:
            console.note(f"{location} {NO_TOKENIZER}")
        return None
    return read_tokenizer(location, revision)


def _is_tokenizer_file(name: str) -> bool:
    """Whether a file of a model's folder is, by its name, part of a tokenizer."""
    parts = ("tokenizer", "vocab", "merges", "spiece", "tekken", "sentencepiece")
    return name.endswith((".model", ".tiktoken")) or any(part in name for part in parts)


def _refuse_unknown(method: str | None, location: str) -> None:
    """Raises IncompatibleBaseError for a method of quantisation that transformers does not know: it
    would read the model as unquantised and invent the missing weights."""
    if method is not None and not is_known(method):
        raise IncompatibleBaseError(
            f"{location!r} is quantised by {method!r}, a method that transformers does not know",
            hint="try a newer transformers, or use the model in full precision",
        )


def quiet_transformers() -> None:
    """Silence its progress bars and warnings about loading, which would mix with our own lines."""
    if not torch.cuda.is_available():
        # transformers imports DeepSpeed where installed, and it warns about this on stdout.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # It warns at every product of eight-bit layers that their inputs are cast to float16.
    getLogger("bitsandbytes.autograd._functions").setLevel(ERROR)
