"""What each argument of a function may be, for forms that write arguments one by one."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from medusa_kit.errors import ConfigError
from medusa_kit.infer.decode.grammars.joined_patterns import part_of
from medusa_kit.serve.calls.argument_documents import document_of
from medusa_kit.serve.calls.argument_form import TEXT, TYPES, ArgumentForm, Value, type_of

MAX_DEPTH = 8  # of references and alternatives; below, anything is possible
ALTERNATIVES = ("anyOf", "oneOf", "allOf")
# What a schema may say of all arguments together, which is not followed.
TOGETHER = (*ALTERNATIVES, "not", "if", "const", "enum", "patternProperties", "propertyNames",
            "minProperties", "maxProperties", "dependentRequired", "dependentSchemas",
            "dependencies")  # fmt: skip
BESIDE = ("properties", "required", "additionalProperties")  # a reference, which alone is followed
OF_ANY = frozenset({"const", "enum", "not", "if", "minLength", "maxLength", "pattern", "format"})
OF_OTHERS = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "items",
     "prefixItems", "additionalItems", "contains", "minItems", "maxItems", "uniqueItems",
     "properties", "required", "additionalProperties", *TOGETHER[7:]}
)  # fmt: skip
WRITTEN = "the model writes arguments one by one"
HINT = "describe each argument by its own schema below properties, with a plain name"
ANY_JSON: Mapping[str, Any] = {}  # in place of a schema that refers to other arguments


class Argument(NamedTuple):
    """`value`: how it is written. `choices`: the texts that it may be, None: any. `schema`: of its
    JSON, a document of its own. `plain`: types of which it may be any value."""

    name: str
    required: bool
    value: Value
    choices: tuple[str, ...] | None
    schema: Mapping[str, Any]
    plain: tuple[str, ...]


class Arguments(NamedTuple):
    """`named`: in the order in which they are written. `further`: others that may come, of any
    name. `notes`: what of the schema is not followed."""

    named: tuple[Argument, ...]
    further: Argument | None
    notes: tuple[str, ...] = ()

    @property
    def values(self) -> dict[str, Value]:
        """How arguments are written, by their names; those without one by ""."""
        further = {} if self.further is None else {"": self.further.value}
        return {one.name: one.value for one in self.named} | further


def entries_of(
    tools: Sequence[Mapping[str, Any]], schemas: Mapping[str, Mapping[str, Any]], form: ArgumentForm
) -> dict[str, Arguments]:
    """The arguments of the functions that may be called. `schemas`: theirs, as far as they can be
    followed. Raises ConfigError as `arguments_of` does."""
    functions = [(number, tool["function"]) for number, tool in enumerate(tools)]
    return {
        (name := one["name"]): arguments_of(
            f"tools[{number}].function.parameters", schemas[name], form, one.get("strict") is True
        )
        for number, one in functions
        if one["name"] in schemas
    }


def arguments_of(
    field: str, schema: Mapping[str, Any], form: ArgumentForm, strict: bool
) -> Arguments:
    """The arguments of a function with this schema. Raises ConfigError, naming the place in
    `field`, for a name that cannot be written, and where `strict` for what cannot be followed."""
    whole, left_out = schema, list[str]()
    for _ in range(MAX_DEPTH):
        beside = BESIDE if "$ref" in schema else ()
        left_out += [f"{field}: {key}" for key in (*TOGETHER, *beside) if key in schema]
        if "$ref" not in schema:
            break
        schema = part_of(whole, schema["$ref"])
    required, properties = schema.get("required", ()), schema.get("properties", {})
    parts = {**properties, **{name: True for name in required if name not in properties}}
    named = [
        _argument(name, part, name in required, whole, form)
        for name, part in parts.items()
        if part is not False
    ]
    rest = schema.get("additionalProperties", True)
    further = None if rest is False else _argument("", rest, False, whole, form)
    for one in named:
        _check_name(f"{field}.properties.{one.name}", one.name, form)
    for one in (*named, *filter(None, [further])):
        at = f"{field}.properties.{one.name}" if one.name else f"{field}.additionalProperties"
        left_out += [f"{at}: $ref"] if one.schema is ANY_JSON else []
    if strict and left_out:
        raise ConfigError(f"{left_out[0]} cannot be followed where {WRITTEN}", hint=HINT)
    return Arguments(
        tuple(named), further, tuple(f"{one} is not enforced" for one in dict.fromkeys(left_out))
    )


def _check_name(field: str, name: str, form: ArgumentForm) -> None:
    end = form.key_end.strip()[0]
    if end in name or not name or name != " ".join(name.split()):
        raise ConfigError(
            f"{field}: the name {name!r} cannot be written where {WRITTEN}", hint=HINT
        )


def _argument(
    name: str, part: Any, required: bool, whole: Mapping[str, Any], form: ArgumentForm
) -> Argument:
    part = part if isinstance(part, Mapping) else {}
    parts, types = list(_parts(part, whole)), _types(part, whole)
    others = tuple(kind for kind in TYPES[1:] if kind in types)
    choices = None if others else _choices(parts, form)
    bounds = OF_ANY if form.typed else OF_ANY | OF_OTHERS
    # What has to fit more than its type is JSON, of which a grammar can be made.
    free = choices is not None or all(bounds.isdisjoint(one) for one in parts)
    document = document_of(part, whole)
    schema = ANY_JSON if document is None else document
    plain = others if all(OF_ANY.isdisjoint(one) for one in parts) else ()
    value = Value(free and TEXT in types, others)
    return Argument(name, required, value, choices, schema, plain)


def _parts(part: Any, whole: Mapping[str, Any], depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """All schemas that a value may have to fit: those that one refers to, and alternatives."""
    if not isinstance(part, Mapping) or depth > MAX_DEPTH:
        return
    yield part
    inner = [one for key in ALTERNATIVES for one in part.get(key, ())]
    if "$ref" in part:
        inner.append(part_of(whole, part["$ref"]))
    for one in inner:
        yield from _parts(one, whole, depth + 1)


def _types(part: Any, whole: Mapping[str, Any], depth: int = 0) -> set[str]:
    """The types that a value may have."""
    types = set(TYPES)
    if not isinstance(part, Mapping) or depth > MAX_DEPTH:
        return types
    if (named := part.get("type")) is not None:
        given = [named] if isinstance(named, str) else named
        types &= {"number" if one == "integer" else one for one in given}
    if "enum" in part or "const" in part:
        types &= {type_of(one) for one in part.get("enum", [part.get("const")])}
    if "$ref" in part:
        types &= _types(part_of(whole, part["$ref"]), whole, depth + 1)
    for key in ALTERNATIVES:
        inner = [_types(one, whole, depth + 1) for one in part.get(key, ())]
        if inner:
            types &= set[str].intersection(*inner) if key == "allOf" else set[str].union(*inner)
    return types or set(TYPES)  # where nothing fits, that has been said


def _choices(parts: list[Mapping[str, Any]], form: ArgumentForm) -> tuple[str, ...] | None:
    """The texts of an enum or a constant; None where a text has to fit more, or cannot stand as it
    is."""
    said = [one for one in parts if not (OF_ANY | OF_OTHERS).isdisjoint(one)]
    if len(said) != 1 or said[0].keys() & (OF_ANY | OF_OTHERS) not in ({"enum"}, {"const"}):
        return None
    texts = [one for one in said[0].get("enum", [said[0].get("const")]) if isinstance(one, str)]
    ends = {form.closing[0], form.mark[0]}  # else two texts could not be told apart
    return tuple(texts) if all(one and ends.isdisjoint(one) for one in texts) else None
