"""Which way of encoding text something was made with, as `1:IDS:TURNS`.

IDS     digest of the token ids of a fixed text, with and without the tokenizer's special tokens.
        Two tokenizers of one vocabulary may cut text otherwise, and then what was made with the one
        does not suit the other
TURNS   digest of what else makes a conversation: the chat template, and the tokens that begin and
        end a text

Only ids count, so a tokenizer has the same digest however and wherever it was loaded.
"""

import enum
import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any

VERSION = "1"
ENCODING = "encoding"  # the key in files

# What rules of cutting, normalising and adding differ in. A change needs another VERSION.
PROBE = (
    "",
    "Hello world, it's a test",
    " leading space",
    "   three  and two  ",
    "\n1 line\n\n2 lines\n\n\n\n4\r\n\r\n5\t\t6 \n \n   7\u00a0\u3000\u20098 \n\n",
    "1234567890123 0.5 3,141,592.65 1e-9 0x1F 007 x10 v2.0 ½² ١٢٣ 二〇",
    "I'm you'll we've it's DON'T I'M YOU'LL WE'VE IT'S Y'all'd he’s 'tis o'clock",
    'yes!\n\nno?!...\n(well);\n"so" — «a»\n***\n--- {b}[c]<d> #1 $5 %6 @7 &|~^`_=+\\/',
    "def f(x_1, *a):\n    if x_1 >= 10:\n\t\treturn {'k': [i**2 for i in a]}  # TODO\n\n\n"
    "for(int i=0;i<n;++i){a[i]+=b->c;}\nfooBarBaz HTTPServer2 https://ex.org/?q=1&r=%20",
    "😀👍🏽 👩‍👩‍👧 🇩🇪 ❤️ 日本語のテキスト。中文字符，한국어 ไทย हिन्दी Привет",
    "שלום עולם مرحبا é e\u0301 Å A\u030a n\u0303o ﬁ ㎏ Ａ１ straße İı Ǆ",
    "\x00\x01\x1b[0m\x7f\u0085\u200b\u200e\u2028\ufeff\ufffd\U000e0041",
    "a<s>b</s> <unk><pad><0x0A><bos><eos> ▁c Ġd <|im_start|>user\nHi<|im_end|>\n<|endoftext|> "
    "<|begin_of_text|><|start_header_id|>e<|end_header_id|>\n\n<|eot_id|><|end_of_text|>",
    "[INST] <<SYS>> f [/INST]<start_of_turn>model\ng<end_of_turn> <|user|>h<|end|> [CLS] [SEP] "
    "<|start|>i<|message|><|channel|><think>\nj</think><tool_call><|fim_prefix|><|eom_id|>",
)


class Encodings(enum.Enum):
    """How two ways of encoding relate."""

    SAME = "the same"
    OTHER_TURNS = "text has the same tokens; template, begin or end of text are others"
    OTHER = "text has other tokens"
    UNKNOWN = "one of them is not known"


DIFFERS = (Encodings.OTHER, Encodings.UNKNOWN)  # text has other tokens, or may have


def encoding_digest(tokenizer: Any, stop_ids: Iterable[int] | None = None) -> str | None:
    """How `tokenizer` encodes text; None without one, or where it encodes nothing.

    `stop_ids`: the tokens that end an answer; by default the tokenizer's own. It takes a few
    milliseconds, and is not remembered, since a tokenizer may be changed in place.
    """
    ids = None if tokenizer is None else [_ids_of(tokenizer, text) for text in PROBE]
    if ids is None or not any(ids):
        return None
    bos, eos = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos"))
    stops = sorted(map(int, _listed(eos) if stop_ids is None else stop_ids))
    return f"{VERSION}:{_digest(ids)}:{_digest([_template(tokenizer), _listed(bos), stops])}"


def compare(one: str | None, other: str | None) -> Encodings:
    """How two digests relate, each as it stands in a file."""
    if one is None or other is None:
        return Encodings.UNKNOWN
    (version, ids, turns), (other_version, other_ids, other_turns) = _parts(one), _parts(other)
    if version != other_version:
        return Encodings.UNKNOWN
    if ids != other_ids:
        return Encodings.OTHER
    return Encodings.SAME if turns == other_turns else Encodings.OTHER_TURNS


def _parts(digest: str) -> tuple[str, str, str]:
    version, _, remaining = str(digest).partition(":")
    ids, _, turns = remaining.partition(":")
    return version, ids, turns


def _ids_of(tokenizer: Any, text: str) -> list[list[int]] | None:
    """With special tokens and without; None where the tokenizer refuses the text."""
    try:
        return [
            [int(token) for token in tokenizer(text, **options).input_ids]
            for options in ({}, {"add_special_tokens": False})
        ]
    except Exception:  # tokenizers of their own kind raise anything
        return None


def _template(tokenizer: Any) -> Any:
    """As jinja reads it, which minds neither kinds of line ends nor the last one."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default", template)
    if not isinstance(template, str):
        return template or None
    return re.sub(r"\r\n?", "\n", template).removesuffix("\n") or None


def _listed(ids: Any) -> list[int]:
    if ids is None:
        return []
    return list(ids) if isinstance(ids, list | tuple) else [ids]


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
