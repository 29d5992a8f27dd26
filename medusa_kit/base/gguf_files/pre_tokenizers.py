"""How text is split before merges, by the name in a GGUF file's `tokenizer.ggml.pre`.

Names, and what belongs to each, are llama.cpp's (src/llama-vocab.cpp). A rule is written as the
model's own tokenizer.json has it where llama.cpp quotes that, else as llama.cpp has it; NOTICE says
so, and docs/models.md where the two differ.

What llama.cpp says of spaces before signs (clean_spaces) is left out: transformers removes none
from byte-level text, whatever the original says, since text would not come back as it was.

The regular expressions are Oniguruma's. They are applied one after another: each splits the pieces
that the one before has left, and what matches is a piece as well as what lies between.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from medusa_kit import console
from medusa_kit.errors import CheckpointError, nearest

NEAREST = "nearest"
VARIABLE = "MEDUSA_KIT_PRE_TOKENIZER"  # a rule's name, or `nearest`, where a file's is unknown
MISSING = "default"  # what a file without a name gets

ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACE = r"\s+(?!\S)|\s+"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
KANA = "[一-龥぀-ゟ゠-ヿ]+"
SIGNS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
DIGIT, THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"

GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{SPACE}"
LINES = r"[^\n]+|[\n]+"
# DeepSeek's: capital and small letters, by ranges.
LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-"
    "\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-"
    "\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15"
    "\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d"
    "\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183"
    "\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-"
    "\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb"
    "\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
ASIAN = "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+"


def _words(numbers: str, letters: str = r"\p{L}", endings: str = ENDINGS, marks: str = "") -> str:
    """Llama 3's kind: a word takes the character before it, signs the line ends behind them.
    `marks`: what signs do not have beside white space, letters and numbers."""
    letter = letters if len(letters) == 5 else f"[{letters}]"
    before = f"{endings}|" if endings else ""
    return (
        rf"{before}[^\r\n\p{{L}}\p{{N}}]?{letter}+|{numbers}| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*"
        rf"|\s*[\r\n]+|{SPACE}"
    )


def _cased(numbers: str, signs_end: str = r"[\r\n/]*", endings: str = "", but: str = "") -> str:
    """GPT-4o's kind: words are split where a small letter precedes a capital one. `but`: letters
    that words do not have."""
    optional = f"(?:{endings})?" if endings else ""
    upper, lower, before = f"[{UPPER}{but}]", f"[{LOWER}{but}]", r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{before}{upper}*{lower}+{optional}|{before}{upper}+{lower}*{optional}|{numbers}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+{signs_end}|\s*[\r\n]+|{SPACE}"
    )


def _signs_first(signs_end: str = r"[\r\n]*", lines: str = r"\s*[\r\n]+") -> str:
    """DeepSeek V3's kind."""
    return (
        rf"{SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
        rf"| ?[\p{{P}}\p{{S}}]+{signs_end}|{lines}|{SPACE}"
    )


@dataclass(frozen=True)
class Rule:
    """`splits`: the regular expressions. `whole_words`: a word that is a token is not built by
    merges. `adds_bos`, `adds_sep`: unless the file says otherwise. `in_bytes`:
    tokens are written in GPT-2's letters for bytes; else as text, with `▁` for a space where
    `marks_spaces`."""

    splits: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False
    adds_sep: bool = False
    in_bytes: bool = True
    marks_spaces: bool = False
    lines_are_words: bool = False  # runs of line ends that are tokens are not built by merges


LLAMA3, QWEN2, GPT4O = _words(THREE_DIGITS), _words(DIGIT), _cased(THREE_DIGITS, endings=ENDINGS)
LARGE_SPACES = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
V3 = (THREE_DIGITS, KANA, _signs_first())
WORD_OR_SIGN = " ?[^(\\s|.,!?…。，、।۔،)]+"  # BLOOM's
HAN = r"[\p{Han}]+"
NOT_HAN = _cased(THREE_DIGITS, r"[\r\n]*", ENDINGS, r"&&[^\p{Han}]")
EXAONE_WORD = r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"

_GPT2, _DIGITS = Rule((GPT2,)), Rule((DIGIT, GPT2))
_LLAMA3 = Rule((LLAMA3,), whole_words=True, adds_bos=True)
_QWEN2 = Rule((QWEN2,))
_CHATGLM = Rule((LLAMA3,))
_GPT4O = Rule((GPT4O,))
_BLOOM = Rule((WORD_OR_SIGN,))
_V3 = Rule(V3)
_AYA = Rule((r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O))
_GEMMA4 = Rule(
    (LINES,), adds_bos=True, in_bytes=False, marks_spaces=True, lines_are_words=True
)  # fmt: skip
_BAILING = Rule(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        rf"|\s*[\r\n]|{SPACE}",
    ),
)
PUNCTUATION = r"[\p{P}\$\+<=>\^~\|"  # and these symbols

_GROUPS: Mapping[str, Rule] = {
    MISSING: Rule((f"{PUNCTUATION}]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert "
    "mpt olmo jais exaone4": _GPT2,
    "trillion granite-docling": Rule((GPT2,)),
    "jina-v1-en jina-v2-code roberta-bpe": Rule((GPT2,), adds_sep=True),
    "starcoder refact codeshell exaone minerva-7b mellum2": _DIGITS,
    "command-r smollm": Rule((DIGIT, GPT2)),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": _LLAMA3,
    "dbrx smaug-bpe chatglm-bpe": _CHATGLM,
    "glm4 glm5": Rule((LLAMA3,), whole_words=True),
    "jais-2": Rule((_words(THREE_DIGITS).replace(SPACE, rf"{LARGE_SPACES}|\s{{1,2}}(?!\S)|\s"),)),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 hunyuan solar-open grok-2": _QWEN2,
    "stablelm2 megrez": Rule((QWEN2,)),
    "qwen35": Rule((_words(DIGIT, r"\p{L}\p{M}", marks=r"\p{M}"),)),
    "ufakzeka": Rule((_words(DIGIT, endings=""),)),
    "laguna": Rule((LINES, QWEN2)),
    "minicpm5": Rule((THREE_DIGITS, _words(r"\p{N}+")), whole_words=True),
    "seed-coder": Rule(
        (QWEN2.replace(r"| ?[^\s\p{L}\p{N}]+[\r\n]*", r"| ?[^\s\p{L}\p{N}\r\n]+"),),
    ),
    "exaone-moe": Rule(
        (
            rf"{ENDINGS}|{EXAONE_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{SPACE}",
        ),
    ),
    "bailingmoe bailingmoe2 llada-moe": _BAILING,
    "gpt-4o llama4 kanana2 talkie minimax-m2": _GPT4O,
    "granite-embed-multi-97m": Rule((GPT4O,), whole_words=True),
    "tiny_aya cohere2moe": _AYA,
    "tekken": Rule((_cased(DIGIT),), whole_words=True, adds_bos=True),
    "youtu": Rule(
        (
            "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
            _cased(DIGIT, endings=ENDINGS),
        ),
        whole_words=True,
    ),
    "kimi-k2": Rule((f"{HAN}|{NOT_HAN}",)),
    "deepseek-llm": Rule(
        (
            "[\r\n]", rf"\s?[{LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$",
            "[一-龥ࠀ-一가-퟿]+", r"\p{N}+",
        ),
    ),
    "deepseek-coder": Rule(
        ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", DIGIT),
    ),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": _V3,
    "spark2_5": Rule(
        (THREE_DIGITS, KANA, _signs_first("", r"[\r\n]"), DIGIT),
    ),
    # llama.cpp's digits take the text before them along.
    "afmoe": Rule(
        (r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", ASIAN, _signs_first()),
    ),
    "falcon": Rule((f"{PUNCTUATION}`]+", GPT2, "[0-9][0-9][0-9]")),
    "bloom gpt3-finnish": _BLOOM,
    "poro-chat": Rule((WORD_OR_SIGN,)),
    "viking": Rule((WORD_OR_SIGN, DIGIT)),
    "superbpe": Rule((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "chameleon": Rule(
        (
            "<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )",
            DIGIT, r"[\p{P}!-/:-@\[-`{-~]", GPT2,
        ),
        adds_bos=True,
    ),
    "gemma4 granite-embed-multi-311m": _GEMMA4,
    "sarvam-moe": Rule((LINES,), in_bytes=False, marks_spaces=True),
    "whitespace": Rule((r"\S+",), in_bytes=False),
}  # fmt: skip
RULES: Mapping[str, Rule] = {
    name: rule for names, rule in _GROUPS.items() for name in names.split()
}


def rule_of(file: str, name: str | None) -> Rule:
    """`name`: the file's, None where it has none. Raises CheckpointError for a name that is not
    known, unless $MEDUSA_KIT_PRE_TOKENIZER says which rule to take."""
    if not name:
        return RULES[MISSING]
    if (taken := in_place_of(name)) is None:
        return RULES[name]
    if taken in RULES:
        console.warn(
            f"{file} splits text by the rule {name!r}, which is not known; {taken!r} is taken in "
            f"its place ({VARIABLE}), so text may be encoded wrongly"
        )
        return RULES[taken]
    if taken:
        raise CheckpointError(
            f"{VARIABLE} {taken!r}: expected {NEAREST} or one of {', '.join(sorted(RULES))}",
            hint="leave it out where a file's own rule is known",
        )
    raise CheckpointError(
        f"{file} splits text by the rule {name!r} (tokenizer.ggml.pre), which is not known",
        hint=f"{VARIABLE}={NEAREST} takes {_nearest(name)!r} in its place, {VARIABLE}=NAME any "
        "other, with which text may be encoded wrongly; a newer medusa-kit may know it",
    )


def in_place_of(name: str) -> str | None:
    """The rule that $MEDUSA_KIT_PRE_TOKENIZER names in place of one that is not known, empty where
    it names none; None where the rule is known."""
    if not name or name in RULES:
        return None
    requested = os.environ.get(VARIABLE, "")
    return _nearest(name) if requested == NEAREST else requested


def _nearest(name: str) -> str:
    return nearest(name, RULES, cutoff=0.0) or MISSING
