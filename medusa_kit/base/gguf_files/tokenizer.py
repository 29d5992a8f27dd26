"""The tokenizer of a GGUF file, built of its vocabulary.

transformers' own conversion splits by GPT-2's rule wherever a family has no class of its own, cuts
up special tokens that it does not know, and adds tokens of its families' to the file's.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from medusa_kit.base.gguf_files.pre_tokenizers import DIGIT, GPT2, Rule
from medusa_kit.base.gguf_files.vocabulary import (
    BYTE,
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    read_vocabulary,
)
from medusa_kit.files import parse_json

SPACE = "▁"  # stands for a space in tokens that are text
NAMES = ("bos", "eos", "unk", "sep", "pad", "mask")
OWN_CODE = "tokenization.TokenizersBackend"  # there is none: transformers' class is taken
ADDED = (CONTROL, UNKNOWN, USER_DEFINED)  # kinds of tokens that are found by their text
NOT_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")  # of Phi-3's


def read_tokenizer(path: Path) -> Any:
    """Build the tokenizer, with the ids and texts of the file and no more.

    `path`: of the file, or of the first part.

    Raises CheckpointError for a vocabulary that is damaged or of a kind that is not read.
    """
    from transformers import PreTrainedTokenizerFast

    vocabulary = read_vocabulary(path)
    inner = _merged(vocabulary)
    _add_special(inner, vocabulary)
    _add_around(inner, vocabulary)
    special = {f"{name}_token": vocabulary.token(name) for name in NAMES if name in vocabulary.ids}
    inner.__deepcopy__ = lambda _: inner  # the class would copy it as text, which takes a while
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        clean_up_tokenization_spaces=False,
        **special,
    )
    del inner.__deepcopy__
    tokenizer.chat_template = vocabulary.template
    return tokenizer


def save_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Write the tokenizer beside the model's config, so that AutoTokenizer reads the same. Raises
    OSError.

    For some families AutoTokenizer takes their own class whatever a folder says, which splits by
    its own rule and adds tokens. It does not where it takes the class for the folder's own. Added
    tokens lie in tokenizer.json too, which it would read a second time for them, in Python.
    """
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = parse_json(path.read_bytes())
    config["auto_map"] = {"AutoTokenizer": [None, OWN_CODE]}
    added = sorted(tokenizer.added_tokens_decoder.items())
    config["added_tokens_decoder"] = {str(number): _fields(token) for number, token in added}
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def _fields(token: Any) -> dict[str, Any]:
    """Of an added token."""
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {"content": token.content, **{name: getattr(token, name) for name in flags}}


def _merged(vocabulary: Vocabulary) -> Any:
    from tokenizers import Tokenizer, models

    rule, in_bytes = vocabulary.rule, vocabulary.rule is not None and vocabulary.rule.in_bytes
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    merges = list(_by_score(vocabulary, ids)) if rule is None else list(vocabulary.merges)
    if rule is not None and rule.lines_are_words:
        merges += sorted(_of_lines(ids) - set(merges), key=lambda pair: len(pair[0] + pair[1]))
    unknown = vocabulary.token("unk") if rule is None else None
    inner = Tokenizer(
        models.BPE(
            ids,
            merges,
            unk_token=unknown,
            fuse_unk=unknown is not None,
            byte_fallback=not in_bytes,
            ignore_merges=rule is not None and rule.whole_words,
        )
    )
    if rule is not None:
        inner.pre_tokenizer = _pre_tokenizer(rule)
    _set_spaces(inner, vocabulary, in_bytes)
    return inner


def _by_score(vocabulary: Vocabulary, ids: dict[str, int]) -> Iterator[tuple[str, str]]:
    """SentencePiece's merges: any two pieces that make a third, the one of the best score first."""
    best = sorted(range(len(ids)), key=lambda number: -vocabulary.scores[number])
    for number in best:
        token = vocabulary.tokens[number]
        if vocabulary.kinds[number] == BYTE:
            continue
        yield from _halves(token, ids)


def _halves(token: str, ids: dict[str, int]) -> list[tuple[str, str]]:
    """The pairs of tokens that make this one."""
    pairs = ((token[:at], token[at:]) for at in range(1, len(token)))
    return [(left, right) for left, right in pairs if left in ids and right in ids]


def _of_lines(ids: dict[str, int]) -> set[tuple[str, str]]:
    """Merges by which every run of line ends that is a token becomes one."""
    runs = [token for token in ids if token.strip("\n") == ""]
    return {pair for token in runs for pair in _halves(token, ids)}


def _pre_tokenizer(rule: Rule) -> Any:
    """The splits of a rule. GPT-2's rule and single digits are built into the library, where they
    take half the time."""
    from tokenizers import Regex, pre_tokenizers

    splits, ends = rule.splits, rule.in_bytes and rule.splits[-1] == GPT2
    parts: list[Any] = [
        pre_tokenizers.Digits(individual_digits=True)
        if split == DIGIT
        else pre_tokenizers.Split(Regex(split), "isolated")
        for split in (splits[:-1] if ends else splits)
    ]
    if rule.in_bytes:
        parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=ends))
    return pre_tokenizers.Sequence(parts)


def _set_spaces(inner: Any, vocabulary: Vocabulary, in_bytes: bool) -> None:
    """Set how spaces are written in tokens, and how tokens become text."""
    from tokenizers import decoders, normalizers

    if in_bytes:
        spelled, letters = _spelled(vocabulary), decoders.ByteLevel()
        inner.decoder = decoders.Sequence([*spelled, letters]) if spelled else letters
        return
    prefix = vocabulary.adds["space_prefix"]
    marks = vocabulary.rule is None or vocabulary.rule.marks_spaces
    before = [normalizers.Prepend(SPACE)] if prefix else []
    if marks:
        inner.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
    back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence(
        [*back[0 if marks else 1 :], *([decoders.Strip(" ", 1, 0)] if prefix else [])]
    )


def _spelled(vocabulary: Vocabulary) -> list[Any]:
    """Decoders for added tokens of letters that stand for bytes, such as ü, which would be read as
    these bytes."""
    from tokenizers import Regex, decoders, pre_tokenizers

    letters = set(pre_tokenizers.ByteLevel.alphabet())
    in_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [
        decoders.Replace(
            Regex(rf"\A{re.escape(token)}\z"), in_letters.pre_tokenize_str(token)[0][0]
        )
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        if kind in ADDED and not token.isascii() and letters >= set(token)
    ]


def _add_special(inner: Any, vocabulary: Vocabulary) -> None:
    """Add the tokens that are found in a text before it is split, by their literal text."""
    from tokenizers import AddedToken

    def added(token: str, kind: int) -> AddedToken:
        strips = vocabulary.strips_behind and token not in NOT_STRIPPING
        special = kind in (CONTROL, UNKNOWN)
        return AddedToken(token, special=special, normalized=False, rstrip=strips)

    pairs = zip(vocabulary.tokens, vocabulary.kinds, strict=True)
    inner.add_tokens([added(token, kind) for token, kind in pairs if kind in ADDED])


def _add_around(inner: Any, vocabulary: Vocabulary) -> None:
    """Set the tokens that a text is put between, if any."""
    from tokenizers import processors

    before = "bos" if vocabulary.adds["bos"] and "bos" in vocabulary.ids else None
    ends = [name for name in ("eos", "sep") if vocabulary.adds[name] and name in vocabulary.ids]
    around = [name for name in (before, *ends[:1]) if name is not None]
    if not around:
        return
    pieces = [*([before] if before else []), "$A", *ends[:1]]
    inner.post_processor = processors.TemplateProcessing(
        single=pieces,
        pair=[*pieces, *(piece.replace("$A", "$B") for piece in pieces)],
        special_tokens=[
            {"id": name, "ids": [vocabulary.ids[name]], "tokens": [str(vocabulary.token(name))]}
            for name in around
        ],
    )
