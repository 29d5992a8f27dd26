"""The vocabulary of a GGUF file: tokens, their kinds, merges, special ids, flags.

Kinds of tokens, defaults of flags and ids are those of llama.cpp (src/llama-vocab.cpp).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_kit import console
from medusa_kit.base.gguf_files.header import AGAIN, read_header
from medusa_kit.base.gguf_files.parts import LISTS
from medusa_kit.base.gguf_files.pre_tokenizers import RULES, Rule, rule_of
from medusa_kit.errors import CheckpointError

GGML = "tokenizer.ggml."
PRE = GGML + "pre"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SENTENCEPIECE, GEMMA4 = "llama", "gemma4"
BPE = ("gpt2", GEMMA4)
# Kinds of vocabulary that are not read, by `tokenizer.ggml.model`.
UNREAD: Mapping[str, str] = {
    "bert": "WordPiece", "t5": "Unigram", "rwkv": "RWKV's", "plamo2": "PLaMo 2's",
    "hybriddna": "of DNA", "whitespace": "of white space", "no_vocab": "none", "none": "none",
}  # fmt: skip
SPECIAL = {  # name -> the key before _token_id
    "bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "sep": "seperator",
    "pad": "padding", "mask": "mask",
}  # fmt: skip
OF_SENTENCEPIECE = {"bos": 1, "eos": 2, "unk": 0}  # where the file names none
# Tokens that end a turn or an answer are special by their text, whatever kind the file gives them.
ENDS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>", "[e~[",
))  # fmt: skip
# Tokens of OpenAI's harmony and those that code is filled in with, likewise.
USER_DEFINED_BY_TEXT = frozenset(("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"))
FILL_IN = frozenset((
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
    "<|code_prefix|>", "<|prefix|>", "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>",
    "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>", "<|suffix|>", "<|fim_middle|>",
    "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>",
    "<|middle|>", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>",
    "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
))  # fmt: skip
CONTROL_BY_TEXT = ENDS | FILL_IN
HINT = "load the original model's folder or Hub id instead"


@dataclass(frozen=True)
class Vocabulary:
    """`ids`: of bos, eos, eot, eom, unk, sep, pad and mask, those that the file has. `rule`: None
    for SentencePiece's kind, whose pieces have `scores`."""

    file: str
    model: str
    tokens: tuple[str, ...]
    kinds: tuple[int, ...]
    scores: tuple[float, ...]
    merges: tuple[tuple[str, str], ...]
    ids: Mapping[str, int]
    rule: Rule | None
    adds: Mapping[str, bool]  # bos, eos, sep and space_prefix
    template: str | None
    strips_behind: bool  # special tokens take the white space behind them

    def token(self, name: str) -> str | None:
        """The text of bos, eos and so on."""
        return self.tokens[self.ids[name]] if name in self.ids else None


def read_vocabulary(path: Path) -> Vocabulary:
    """Read the vocabulary. `path`: of the file, or of the first part. Raises CheckpointError for a
    vocabulary that is damaged or of a kind that is not read."""
    return _Values(path.name, read_header(path, whole=LISTS).values).vocabulary()


class _Values:
    def __init__(self, file: str, values: Mapping[str, Any]) -> None:
        self.file, self.values = file, values
        self.model = str(self.get("model"))

    def get(self, name: str, otherwise: Any = None) -> Any:
        return self.values.get(GGML + name, otherwise)

    def vocabulary(self) -> Vocabulary:
        if self.model != SENTENCEPIECE and self.model not in BPE:
            raise self._unread()
        tokens = self._texts("tokens")
        if not tokens or len(set(tokens)) < len(tokens):
            raise self._wrong("tokens that are missing or there twice")
        rule = self._rule()
        return Vocabulary(
            file=self.file,
            model=self.model,
            tokens=tokens,
            kinds=self._kinds(tokens),
            scores=self._numbers("scores", len(tokens), 0.0),
            merges=self._merges(tokens) if rule is not None else (),
            ids=self._ids(tokens),
            rule=rule,
            adds=self._adds(rule),
            template=self._template(),
            strips_behind=self._strips_behind(),
        )

    def _unread(self) -> CheckpointError:
        kind = UNREAD.get(self.model)
        description = f" ({kind})" if kind else ", which is unknown"
        return CheckpointError(
            f"{self.file} has a vocabulary of the kind {self.model!r}{description}; expected "
            f"{SENTENCEPIECE}, {' or '.join(BPE)} (tokenizer.ggml.model)",
            hint=HINT,
        )

    def _wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.file} has {what} in its vocabulary", hint=AGAIN)

    def _rule(self) -> Rule | None:
        if self.model == SENTENCEPIECE:
            return None
        name = self.values.get(PRE)
        if not isinstance(name, str | None):
            raise self._wrong(f"the rule {name!r} for splitting text (tokenizer.ggml.pre)")
        return RULES[GEMMA4] if self.model == GEMMA4 else rule_of(self.file, name)

    def _texts(self, name: str) -> tuple[str, ...]:
        texts = self.get(name, ())
        if not isinstance(texts, tuple) or not all(isinstance(text, str) for text in texts):
            raise self._wrong(f"{name} that are no list of texts")
        return tuple(text or f"[EMPTY_{index}]" for index, text in enumerate(texts))

    def _numbers(self, name: str, count: int, otherwise: Any) -> tuple[Any, ...]:
        numbers = self.get(name)
        if numbers is None:
            return (otherwise,) * count
        if not isinstance(numbers, tuple) or len(numbers) < count or isinstance(numbers[0], str):
            raise self._wrong(f"{name} that are no number for each of {count} tokens")
        return numbers[:count]

    def _kinds(self, tokens: tuple[str, ...]) -> tuple[int, ...]:
        kinds = self._numbers("token_type", len(tokens), NORMAL)
        normal_end = {"<|tool_response>", "<|plamo:eos|>"} & set(tokens)  # with an ordinary </s>

        def kind_of(text: str, kind: int) -> int:
            if kind == NORMAL and text in USER_DEFINED_BY_TEXT:
                return USER_DEFINED
            if text in CONTROL_BY_TEXT and not (text == "</s>" and normal_end):
                return CONTROL
            return kind

        return tuple(kind_of(*pair) for pair in zip(tokens, kinds, strict=True))

    def _merges(self, tokens: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
        """Pairs to merge, in order; one that is there twice counts where it stands first."""
        texts = self._texts("merges")
        if not texts and self.values.get(PRE) != "kimi-k2":
            raise self._wrong("no merges")
        splits = ((merge, merge.find(" ", 1)) for merge in texts)
        merges = tuple(dict.fromkeys((merge[:at], merge[at + 1 :]) for merge, at in splits))
        known = set(tokens)
        for left, right in merges:
            if not known.issuperset((left, right, left + right)):
                raise self._wrong(
                    f"a merge of {left!r} and {right!r}, which are no tokens, or make none,"
                )
        return merges

    def _ids(self, tokens: tuple[str, ...]) -> dict[str, int]:
        known = OF_SENTENCEPIECE if self.model == SENTENCEPIECE else {}
        ids = {name: number for name, number in known.items() if number < len(tokens)}
        for name, key in SPECIAL.items():
            token_id = self.get(f"{key}_token_id")
            if token_id is None:
                continue
            if isinstance(token_id, int) and 0 <= token_id < len(tokens):
                ids[name] = token_id
            else:  # some converters write -1 for none
                console.note(
                    f"{self.file} has {key}_token_id {token_id!r} for {len(tokens)} tokens"
                )
        return ids

    def _adds(self, rule: Rule | None) -> dict[str, bool]:
        """Which tokens are put around a text, and whether a space is put before it."""
        adds = {
            "bos": rule is None or rule.adds_bos,
            "eos": False,
            "sep": rule is not None and rule.adds_sep,
            "space_prefix": rule is None,
        }
        for name in adds:
            key = f"add_{name}" if name == "space_prefix" else f"add_{name}_token"
            if (flag := self.get(key)) is not None:
                adds[name] = bool(flag)
        if rule is RULES[GEMMA4]:
            adds["bos"] = True  # some converters forgot it
        return adds

    def _template(self) -> str | None:
        template = self.values.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None

    def _strips_behind(self) -> bool:
        """Whether special tokens take white space, as Phi-3's do; the file has no field for it."""
        name = str(self.values.get("general.name", "")).lower()
        phi3 = self.values.get("general.architecture") == "phi3" and self.model == SENTENCEPIECE
        return phi3 or "phi-3" in name or "phi3" in name
