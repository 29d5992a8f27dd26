"""What kinds of values a model's small files hold, by the file and the key.

Libraries take some values of other kinds without a word, and name neither file nor key for others.
Keys that are not here may hold anything; null is right where it stands for what is not set.
"""

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """`expected`: in words."""

    expected: str
    fits: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**32


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, dict) and isinstance(value.get("content"), str)
    )


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _is_template(value: Any) -> bool:
    named = isinstance(value, dict) and all(isinstance(value.get(k), str) for k in NAMED_TEMPLATE)
    return isinstance(value, str) or named


def _or_null(kind: Kind) -> Kind:
    return Kind(kind.expected, lambda value: value is None or kind.fits(value))


NAMED_TEMPLATE = ("name", "template")
TEXT = Kind("text", lambda value: isinstance(value, str))
NUMBER = Kind("a number", _is_number)
SWITCH = Kind("true or false", lambda value: isinstance(value, bool) or value in (0, 1))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
LIST = Kind("a list", lambda value: isinstance(value, list))
LISTED = Kind("a list or an object", lambda value: isinstance(value, list | dict))
SIDE = Kind("'left' or 'right'", lambda value: value in ("left", "right"))
TEXTS = Kind("a list of texts", _list_of(TEXT.fits))
IDS = Kind("a list of token ids", _list_of(_is_id))
ID = Kind("a token id", _is_id)
TOKEN = Kind("text, or an object with its content", _is_token)
TOKENS = Kind("a list of tokens", _list_of(_is_token))
NAMED_TOKENS = Kind(
    "a list of tokens, or an object of named ones",
    lambda value: (
        TOKENS.fits(value) or (isinstance(value, dict) and all(map(_is_token, value.values())))
    ),
)
OBJECTS = Kind(
    "an object of objects",
    lambda value: isinstance(value, dict) and all(isinstance(one, dict) for one in value.values()),
)
TEMPLATES = Kind(
    "text, or a list of objects with name and template",
    lambda value: isinstance(value, str) or _list_of(_is_template)(value),
)
NAMED_TEMPLATES = Kind(
    "text, or an object of texts",
    lambda value: (
        isinstance(value, str) or (isinstance(value, dict) and all(map(TEXT.fits, value.values())))
    ),
)
STOPS = Kind("text or a list of texts", lambda value: TEXT.fits(value) or TEXTS.fits(value))
TOKEN_ID = Kind(
    "token ids",
    lambda value: all(
        isinstance(one, int | None) for one in (value if isinstance(value, list) else [value])
    ),
)

Kinds = Mapping[str, Kind]
NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
SPECIAL: Kinds = {
    **{f"{name}_token": _or_null(TOKEN) for name in NAMES},
    "additional_special_tokens": _or_null(TOKENS),
}
NUMBERS = ("max_length", "max_new_tokens", "min_length", "min_new_tokens", "temperature", "top_k",
           "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty",
           "length_penalty", "no_repeat_ngram_size", "num_beams", "max_time",
           "guidance_scale")  # fmt: skip
SWITCHES = ("add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces",
            "legacy", "split_special_tokens")  # fmt: skip
ADDED_SWITCHES = ("single_word", "lstrip", "rstrip", "normalized", "special")
# Keys of what is nested are written with those above them; * is every key of an object, and every
# place of a list.
OF_FILE: Mapping[str, Kinds] = {
    "generation_config.json": {
        "*_token_id": TOKEN_ID,
        **{name: _or_null(NUMBER) for name in NUMBERS},
        "do_sample": _or_null(SWITCH),
        "suppress_tokens": _or_null(IDS),
        "begin_suppress_tokens": _or_null(IDS),
        "bad_words_ids": _or_null(LIST),
        "sequence_bias": _or_null(LISTED),
        "stop_strings": _or_null(STOPS),
        "cache_implementation": _or_null(TEXT),
        "watermarking_config": _or_null(OBJECT),
    },
    "tokenizer_config.json": {
        **SPECIAL,
        **{name: _or_null(SWITCH) for name in SWITCHES},
        "extra_special_tokens": _or_null(NAMED_TOKENS),
        "added_tokens_decoder": OBJECTS,
        "tokenizer_class": _or_null(TEXT),
        "model_max_length": _or_null(NUMBER),
        "padding_side": SIDE,
        "truncation_side": SIDE,
        "model_input_names": TEXTS,
        "auto_map": LISTED,
        "chat_template": _or_null(TEMPLATES),
    },
    "tokenizer.json": {
        "version": TEXT,
        **dict.fromkeys(
            ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"),
            _or_null(OBJECT),
        ),
        "model": OBJECT,
        "model.type": _or_null(TEXT),
        "model.vocab": LISTED,
        "model.merges": LIST,
        "added_tokens": LIST,
        "added_tokens.*": OBJECT,
        "added_tokens.*.id": ID,
        "added_tokens.*.content": TEXT,
        **{f"added_tokens.*.{name}": SWITCH for name in ADDED_SWITCHES},
    },
    "special_tokens_map.json": SPECIAL,
    "added_tokens.json": {"*": ID},
    "medusa_kit.json": {"base_model": TEXT, "revision": _or_null(TEXT), "base_fingerprint": TEXT},
    "chat_template.json": {"chat_template": _or_null(NAMED_TEMPLATES)},
}


def odd_values(file_name: str, content: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """(key, value, what was expected) of each value of another kind."""
    if not isinstance(content, dict):
        yield "it", content, "an object"
    for pattern, kind in OF_FILE.get(file_name, {}).items():
        for key, value in _at(content, pattern.split(".")):
            if not kind.fits(value):
                yield key, value, kind.expected


def _at(content: Any, pattern: list[str]) -> Iterator[tuple[str, Any]]:
    """Each value at this pattern of keys, with its keys."""
    if isinstance(content, list):
        content = {str(index): value for index, value in enumerate(content)}
    for key, value in content.items() if isinstance(content, dict) else ():
        if not fnmatch(key, pattern[0]):
            continue
        if len(pattern) == 1:
            yield key, value
        else:
            yield from ((f"{key}.{rest}", one) for rest, one in _at(value, pattern[1:]))
