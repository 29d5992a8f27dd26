"""Grammars as callers give them: refused, or made into what answers follow."""

from functools import lru_cache

from medusa_kit.errors import ConfigError
from medusa_kit.files import parse_json
from medusa_kit.infer.decode.grammars.schemas import usable
from medusa_kit.infer.decode.grammars.source import fault_of, refused
from medusa_kit.settings.grammar import Grammar


def check_grammar(grammar: Grammar | None) -> None:
    """Raises ConfigError for a grammar that no base could follow."""
    if grammar is not None and (fault := fault_of(exactly(grammar))) is not None:
        raise refused(grammar, fault)


@lru_cache(32)
def exactly(grammar: Grammar) -> Grammar:
    """The grammar that answers follow. Raises ConfigError, naming the place, for what of a JSON
    schema cannot be followed exactly."""
    if grammar.kind != "json_schema" or grammar.exact:
        return grammar
    try:
        schema = usable("schema", parse_json(grammar.text), strict=True).schema
    except RecursionError:
        raise ConfigError("the JSON schema is nested too deeply") from None
    return Grammar.json_schema(schema)._replace(exact=True)
