"""The schema of one argument as a document of its own, with the definitions that it refers to."""

from collections.abc import Iterator, Mapping
from typing import Any

from medusa_kit.infer.decode.grammars.joined_patterns import steps_of
from medusa_kit.infer.decode.grammars.schemas import OF_NAMES, OPTIONS

DEFINITIONS = ("$defs", "definitions")
SHARED = ("$schema", OPTIONS)  # of the whole schema, that hold for each argument too
DATA = ("enum", "const", "default", "examples")  # keywords whose values are no schemas


def document_of(part: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any] | None:
    """The schema `part` of an argument, whose references are to `whole`. None where it refers to
    anything but definitions, which has no place in a document of its own."""
    needed = dict[str, dict[str, Any]]()
    waiting: list[Any] = [part]
    while waiting:
        for reference in _references(waiting.pop()):
            kind, name = (*(steps_of(reference) if reference.startswith("#/") else ()), "", "")[:2]
            definitions = whole.get(kind) if kind in DEFINITIONS else None
            if not isinstance(definitions, Mapping) or name not in definitions:
                return None
            if name not in (known := needed.setdefault(kind, {})):
                known[name] = definitions[name]
                waiting.append(definitions[name])
    own = {key: value for key, value in part.items() if key not in DEFINITIONS}
    return {**{key: whole[key] for key in SHARED if key in whole}, **needed, **own}


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, list):
        for one in schema:
            yield from _references(one)
    elif isinstance(schema, Mapping):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for key, one in schema.items():
            if key in OF_NAMES and isinstance(one, Mapping):
                yield from _references([*one.values()])
            elif key not in DATA:
                yield from _references(one)
