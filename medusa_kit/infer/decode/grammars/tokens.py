"""A base's tokens as llguidance takes them.

A special token is no text: what is returned to the user lacks it, so it stands for nothing but
itself. Any other added token is text like the rest of the vocabulary. llguidance's own reading
takes added tokens of the form `<…>` for special ones, and lets them spell text that it forces.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from medusa_kit.errors import ConfigError
from medusa_kit.settings.grammar import Grammar, quoted

SPECIAL = b"\xff"  # llguidance's mark before a special token's name
# Of a Lark grammar: texts, comments, and expressions, which may have several lines.
PASSED_OVER = r'"(?:\\.|[^"\\\n])*"|(?:#|//)[^\n]*|/(?:\\.|[^/\\])+/'
NAMED_TOKEN = re.compile(rf"{PASSED_OVER}|(<[^<>\s]+>)")
START = re.compile(r"^start:.*", re.M)


class GrammarTokens:
    """The tokens of one tokenizer, for `vocab_size` logits. `stops`: tokens that end an answer.

    Raises ConfigError for a tokenizer whose tokens are not known as bytes.
    """

    is_tokenizer_wrapper = True  # for llguidance, as are the next two
    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, tokenizer: Any, vocab_size: int, stops: Sequence[int]) -> None:
        from llguidance.hf import from_tokenizer

        try:
            self._encoder = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(stops))
        except ValueError as error:
            raise ConfigError(
                f"grammars cannot be used with this base's tokenizer: {error}",
                hint="its tokens must be known as bytes, as those of most fast tokenizers are",
            ) from error
        self._stops, self.eos_token_id = list(stops), stops[0]
        backend = tokenizer.backend_tokenizer
        added = backend.get_added_tokens_decoder()
        self.ids = {token.content: number for number, token in added.items()}
        self.special = {number for number, token in added.items() if token.special}
        self.tokens = [self._bytes(number) for number in range(vocab_size)]
        for number in added.keys() - self.special:
            text = backend.decode([number], skip_special_tokens=False)
            self.tokens[number] = text.encode()

    def _bytes(self, token: int) -> bytes:
        known: bytes = self._encoder.decode_bytes([token])
        if self._encoder.is_special_token(token):
            return SPECIAL + known
        return b"" if known == f"<[{token}]>".encode() else known  # an id without a token

    def for_matchers(self) -> Any:
        """llguidance's tokenizer."""
        from llguidance import LLTokenizer

        return LLTokenizer(self, eos_token=self._stops)  # type: ignore[arg-type]

    def __call__(self, text: str | bytes) -> list[int]:
        """A text in tokens that are text. What the tokenizer takes for special is spelled out."""
        written = text.encode() if isinstance(text, str) else text
        tokens = list[int]()
        for token in self._encoder.tokenize_bytes(written):
            spelling = self.tokens[token]
            tokens += self._spelled(spelling[1:]) if spelling.startswith(SPECIAL) else [token]
        same = b"".join(self.tokens[token] for token in tokens) == written
        return tokens if same else self._spelled(written)  # some tokenizers change what they read

    def _spelled(self, text: bytes) -> list[int]:
        """A text in the longest tokens that spell it."""
        spelled: list[int] = self._encoder.greedy_tokenize(text.decode(errors="ignore"))
        return spelled

    def bytes_of(self, token: int) -> bytes:
        """A token's bytes; of a special one its name's."""
        return self.tokens[token].removeprefix(SPECIAL)


def lark_rules(grammar: Grammar, tokens: GrammarTokens | None) -> str:
    """A Lark grammar in terms of these tokens; None: of a tokenizer that nothing is known of."""
    ids = {} if tokens is None else tokens.ids
    special = () if tokens is None else tokens.special

    def by_number(match: re.Match[str]) -> str:
        return f"<[{ids[match[1]]}]>" if match[1] in ids else match[0]

    rules = NAMED_TOKEN.sub(by_number, grammar.text)
    if grammar.free is not None:
        rules = START.sub("start: behind", rules, count=1)
    names = {name: number for name, number in ids.items() if number in special}
    for number, tag in enumerate(grammar.tags):
        written = _in_tokens(tag, names)
        if written is not None:
            rule, until = f"tag_{number}: {written}", f"until_{number}: /(.|\\n)*/ {written}"
            rules = re.sub(rf"^tag_{number}:.*", partial(_just, rule), rules, flags=re.M)
            pattern = rf"^until_{number}\[lazy\]:.*"
            rules = re.sub(pattern, partial(_just, until), rules, flags=re.M)
    return rules


def _in_tokens(tag: str, special: Mapping[str, int]) -> str | None:
    """A tag as a Lark grammar has it, in which the names of special tokens stand for these; None:
    it has none."""
    names = sorted((name for name in special if name and name in tag), key=len, reverse=True)
    if not names:
        return None
    parts = re.split(f"({'|'.join(map(re.escape, names))})", tag)
    return " ".join(
        f"<[{special[part]}]>" if part in special else quoted(part) for part in parts if part
    )


def _just(text: str, _: re.Match[str]) -> str:
    return text
