"""Grammars as callers give them: refused, or made into what answers follow."""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from medusa_kit.errors import ConfigError
from medusa_kit.files import GivenTwiceError, parse_json, parse_written_json
from medusa_kit.infer.decode.grammars.schemas import usable
from medusa_kit.infer.decode.grammars.source import fault_of, refused
from medusa_kit.infer.decode.grammars.tokens import PASSED_OVER
from medusa_kit.settings.grammar import KEEP_ONE, Grammar

SCHEMA = re.compile(rf"{PASSED_OVER}|(%json\s*)")  # what a JSON schema follows


def check_grammar(grammar: Grammar | None) -> None:
    """Raises ConfigError for a grammar that no base could follow."""
    if grammar is not None and (fault := fault_of(exactly(grammar))) is not None:
        raise refused(grammar, fault)


@lru_cache(32)
def exactly(grammar: Grammar) -> Grammar:
    """The grammar that answers follow. Raises ConfigError, naming the place, for what of a JSON
    schema, which a Lark grammar may have parts of, cannot be followed exactly."""
    if grammar.exact or grammar.kind == "regex":
        return grammar
    try:
        if grammar.kind == "lark":
            return grammar._replace(text=_with_exact_parts(grammar.text), exact=True)
        schema = _exact("schema", parse_json(grammar.text))
    except RecursionError:
        raise ConfigError("the JSON schema is nested too deeply") from None
    return Grammar.json_schema(schema)._replace(exact=True)


def _with_exact_parts(rules: str) -> str:
    written, kept = "", 0
    while match := SCHEMA.search(rules, kept):
        written += rules[kept : match.end()]
        kept = match.end()
        if match[1] is None:
            continue
        line = rules.count("\n", 0, match.start()) + 1
        try:
            end = json.JSONDecoder().raw_decode(rules, kept)[1]
            schema = parse_written_json(rules[kept:end])
        except GivenTwiceError as error:
            raise ConfigError(f"schema in line {line}: {error}", hint=KEEP_ONE) from None
        except ValueError:  # llguidance says what is wrong
            continue
        written += json.dumps(_exact(f"schema in line {line}", schema), ensure_ascii=False)
        kept = end
    return written + rules[kept:]


def _exact(field: str, schema: Any) -> Any:
    return usable(field, schema, strict=True).schema if isinstance(schema, Mapping) else schema
