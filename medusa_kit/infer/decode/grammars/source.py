"""Grammars as llguidance takes them, and what is wrong with one. torch is not imported here, since
the server's children look at grammars too (serve/bounded/)."""

import re
from collections.abc import Callable
from functools import cache, lru_cache
from types import ModuleType
from typing import Any

from medusa_kit.errors import ConfigError
from medusa_kit.infer.decode.grammars.tokens import GrammarTokens, lark_rules
from medusa_kit.installing import extra
from medusa_kit.settings.grammar import Grammar

WRONG_REGEX = re.compile(r"regex parse error:\n {4}(.*)\n {4}( *)\^.*\nerror: (.+)")
LOOKED_AT = 3  # bytes of a grammar that is tried
NOTHING_FITS = "nothing fits it"
HINT = "what llguidance can do: https://github.com/guidance-ai/llguidance/tree/main/docs"
# Of one step, so that none takes longer than some hundredths of a second, by llguidance's own
# counts: items of its parser, and work of its lexer. Its own limits allow a second.
STEP_ITEMS, STEP_WORK = 20_000, 50_000


def parser_limits(max_work: int | None = None) -> Any:
    """The limits of making a matcher and of its steps. `max_work`: for making a lexer, if it is to
    be less than llguidance's own limit."""
    return llguidance().LLParserLimits(
        verbose_errors=False,
        initial_lexer_fuel=max_work,
        step_max_items=STEP_ITEMS,
        step_lexer_fuel=STEP_WORK,
    )


@lru_cache(32)  # a schema's parts are asked for several times in a row
def fault_of(grammar: Grammar) -> str | None:
    """Why no base could follow it; None where one could, unless it takes too much work."""
    wrong, messages = llguidance().LLMatcher.validate_grammar_with_warnings(source_of(grammar))
    return _plain(str(messages[0])) if wrong else None


def begun_fault_of(grammar: Grammar, max_work: int | None = None) -> str | None:
    """Why no base could follow a grammar, found by following it for its first bytes; None where one
    could. `max_work`: llguidance's limit for making a lexer, if it is to be lower."""
    limits = parser_limits(max_work)
    make = llguidance().LLMatcher
    matcher = make(_bytes_alone(), source_of(grammar), log_level=0, limits=limits)
    for _ in range(LOOKED_AT):
        bits = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error() or matcher.is_stopped():
            break
        allowed = [byte for byte in range(256) if bits[byte // 8] >> byte % 8 & 1]
        if not allowed:  # but an end, or nothing: llguidance has not seen that no text fits
            return None if matcher.is_accepting() else NOTHING_FITS
        # Into a text rather than past it, where there is the choice.
        matcher.consume_token(min(allowed, key=lambda byte: (byte in b' "', byte)))
    return error_of(matcher) if matcher.is_error() else None


@cache
def _bytes_alone() -> Any:
    return llguidance().LLTokenizer("byte")


def source_of(grammar: Grammar, tokens: GrammarTokens | None = None) -> str:
    """A grammar in llguidance's form; without `tokens` for a tokenizer that nothing is known of."""
    matcher = llguidance().LLMatcher
    sources: dict[str, Callable[[str], str]] = {
        "json_schema": matcher.grammar_from_json_schema,
        "regex": matcher.grammar_from_regex,
        "lark": matcher.grammar_from_lark,
    }
    text = grammar.text
    if grammar.kind == "lark":
        text = lark_rules(grammar, tokens)
    return sources[grammar.kind](text)


def error_of(matcher: Any) -> str:
    """A failed matcher's message, without the mark of what it leaves out."""
    return _plain(str(matcher.get_error()).replace("<non-verbose/>", ""))


def _plain(message: str) -> str:
    """A message without llguidance's name for the schema itself, and of one on a regular expression
    the reason and place alone."""
    if (wrong := WRONG_REGEX.search(message)) is not None:
        pattern, before, reason = wrong.groups()
        return f"{pattern!r}: {reason} at character {len(before) + 1}"
    return message.replace("json-schema:///", "").strip()


def refused(grammar: Grammar, why: str) -> ConfigError:
    nouns = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}
    return ConfigError(f"the {nouns[grammar.kind]} cannot be used: {why.strip()}", hint=HINT)


def llguidance() -> ModuleType:
    """The library. Raises ConfigError where it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise ConfigError(
            "grammars need the package llguidance, which is not installed",
            hint=extra("grammar"),
        ) from None
    return llguidance
