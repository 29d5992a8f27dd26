"""Configs and tokenizers of model folders, without transformers' class of each family.

Importing such a class brings torch's compiler and more: two seconds and 200 MB, which decoding in
C++ has no use for. So what AutoConfig and AutoTokenizer make of a folder is remembered in the cache
folder, for as long as the folder's files say the same.
"""

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from medusa_kit.base.faults.small_files import (
    check_configs,
    check_file,
    reading_tokenizer,
    small_file,
)
from medusa_kit.base.text_part import text_part_config
from medusa_kit.files import parse_json
from medusa_kit.store.records import Record, short_digest
from medusa_kit.version import __version__

CONFIGS = ("config*.json",)
# The chat template of a multimodal checkpoint's processor. Newer ones have chat_template.jinja,
# which tokenizers read too.
OF_PROCESSOR = "chat_template.json"
# What of a config changes with how it is read, and not with what it says.
CHANGING = ("transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype",
            "_attn_implementation", "use_cache")  # fmt: skip
# What of a config computes nothing: the mark of Medusa-2, which fingerprints have, and those of
# other tools; token ids and what else the encoding says; labels, and layers above the decoder that
# classify; what a forward returns; training; how answers are drawn, in configs of old.
COMPUTES_NOTHING = re.compile(
    r"""_ | medusa_kit_variant$ | unsloth_ | license$
    | .*_token_id$ | tokenizer_class$ | prefix$ | model_max_length$
    | id2label$ | label2id$ | num_labels$ | problem_type$ | finetuning_task$ | task_specific_params$
    | summary_ | classifier_
    | (use_)?return_dict$ | output_(attentions|hidden_states|router_logits)$ | torchscript$
    | .*(initializer|init_std|init_variance|dropout|pdrop|layerdrop|loss|jitter_noise)
    | label_smoothing | seq_aux$ | gradient_checkpointing | init_device$ | use_bfloat16$
    | pretraining_tp$ | chunk_size_feed_forward$
    | do_sample$ | num_beams$ | num_return_sequences$ | early_stopping$ | max_new_tokens$
    | min_length$ | (repetition|length|diversity)_penalty$ | .*no_repeat_ngram_size$
    | bad_words_ids$ | (begin_)?suppress_tokens$
    """,
    re.VERBOSE,
)
LEGACY = ("added_tokens.json", "special_tokens_map.json")
TOKENIZERS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")


def read_config(location: str, revision: str | None = None) -> Any:
    """The config that AutoConfig reads (of a multimodal checkpoint its text part's), or a
    PreTrainedConfig with the same values. Raises what AutoConfig raises; CheckpointError for small
    files that it would not come to an end with."""
    check_configs(location, revision)
    record = _record("config", location, CONFIGS)
    if isinstance(known := _remembered(record), dict):
        return _config_class(str(known["model_type"])).from_dict(
            {**known, "_name_or_path": location}
        )
    from transformers import AutoConfig

    config = text_part_config(AutoConfig.from_pretrained(location, revision=revision))
    if _is_transformers_class(config) and config.get_text_config() is config:
        _write(record, config.to_dict())
    return config


def own_config(config: Any) -> Any:
    """The same config as an object of its family's class, from which a model can be built."""
    if type(config) is not _config_class(config.model_type):
        return config
    from transformers import AutoConfig

    return AutoConfig.for_model(**config.to_dict())


def settings_of(config: Any) -> Any:
    """The settings of the model in a config, however the config was read."""
    values = json.loads(json.dumps(config.to_dict(), sort_keys=True, default=str))
    return _without(values, CHANGING.__contains__)


def computed_by(config: Any) -> dict[str, Any]:
    """What a config says of how its model computes, rotary embeddings and windows for example: all
    that is neither in the weights nor in how text is encoded."""
    settings: dict[str, Any] = _without(
        settings_of(config), lambda name: COMPUTES_NOTHING.match(name) is not None
    )
    return settings


def _without(value: Any, is_left_out: Callable[[str], bool]) -> Any:
    """A config's values, also those of configs within it."""
    if not isinstance(value, dict):
        return value
    return {
        name: _without(part, is_left_out) for name, part in value.items() if not is_left_out(name)
    }


@functools.cache
def _config_class(model_type: str) -> Any:
    """The class of remembered configs of a family: transformers reads its type from the class."""
    from transformers import PreTrainedConfig

    return type("RememberedConfig", (PreTrainedConfig,), {"model_type": model_type})


def read_tokenizer(location: str, revision: str | None = None) -> Any:
    """The tokenizer that AutoTokenizer reads, with the chat template of the processor where it has
    none. Raises what AutoTokenizer raises; CheckpointError where one of its files is to blame."""
    tokenizer = _read_tokenizer(location, revision)
    if getattr(tokenizer, "chat_template", None):
        return tokenizer
    if (path := small_file(location, OF_PROCESSOR, revision)) is not None:
        check_file(path)
        tokenizer.chat_template = parse_json(path.read_bytes()).get("chat_template")
    return tokenizer


def _read_tokenizer(location: str, revision: str | None) -> Any:
    import transformers

    record = _record("tokenizer-parts", location, TOKENIZERS)
    known = _remembered(record)
    if isinstance(known, dict) and known.keys() >= {"class", "added"}:
        return _tokenizer_of_class(str(known["class"]), location, known["added"])
    with reading_tokenizer(location, revision):
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(location, revision=revision)
    name = type(tokenizer).__name__
    if _is_transformers_class(tokenizer) and getattr(transformers, name, None) is type(tokenizer):
        added = _added_tokens(Path(location))
        with contextlib.suppress(Exception):  # where it cannot be made so, it is not remembered so
            if added is not None and not _same_tokenizers(
                _tokenizer_of_class(name, location, added), tokenizer
            ):
                added = None
        _write(record, {"class": name, "added": added})
    return tokenizer


def _tokenizer_of_class(name: str, location: str, added: dict[str, Any] | None) -> Any:
    """A tokenizer of this class. `added`: tokens that lie in tokenizer.json, for which transformers
    would read it once more, in Python: a tenth of a second and 40 MB."""
    import transformers

    arguments = {} if added is None else {"added_tokens_decoder": added}
    return getattr(transformers, name).from_pretrained(location, **arguments)


def _added_tokens(folder: Path) -> dict[str, Any] | None:
    """The added tokens as transformers takes them from tokenizer.json; None where it takes some
    elsewhere."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        settings = parse_json((folder / "tokenizer_config.json").read_bytes())
        elsewhere = any((folder / name).exists() for name in LEGACY)
        if "added_tokens_decoder" not in settings and not elsewhere:
            tokens = parse_json((folder / "tokenizer.json").read_bytes())["added_tokens"]
            return {str(token.pop("id")): token for token in tokens}
    return None


def _same_tokenizers(first: Any, second: Any) -> bool:
    """Whether two tokenizers of a class are the same in all that they were made of."""
    return bool(
        repr(sorted(first.init_kwargs.items())) == repr(sorted(second.init_kwargs.items()))
        and repr(first.added_tokens_decoder) == repr(second.added_tokens_decoder)
        and first.special_tokens_map == second.special_tokens_map
        and first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()
    )


def _is_transformers_class(loaded: Any) -> bool:
    """Whether its class is one of transformers', not of the folder's own code."""
    return type(loaded).__module__.startswith("transformers.")


def _record(kind: str, location: str, patterns: tuple[str, ...]) -> Record | None:
    """The record of one thing of a folder. `patterns`: of the names of the files that it follows
    from. None for a location without such files, such as a Hub id, and for unreadable files."""
    folder = Path(location)
    files = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    with contextlib.suppress(OSError):
        if files:
            depends_on = _depends_on(folder, files)
            # Of two environments that share a cache folder each keeps its own.
            of_folder = [depends_on[key] for key in ("path", "transformers", "version")]
            name = f"{short_digest(json.dumps(of_folder))}-{kind}"
            return Record("described", name, {"depends_on": depends_on}, folder)
    return None


def _remembered(record: Record | None) -> Any | None:
    values = None if record is None else record.read()
    return None if values is None else values.get("known")


def _write(record: Record | None, known: Any) -> None:
    with contextlib.suppress(TypeError):  # values of a config that JSON has no form for
        if record is not None:
            record.write(known=known)


def _depends_on(folder: Path, files: list[Path]) -> dict[str, Any]:
    import transformers

    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    versions = {"transformers": transformers.__version__, "version": __version__}
    return {"path": str(folder.resolve())} | versions | digests
