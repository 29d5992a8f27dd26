"""Names of properties that could be written with escapes ("\\u0061" for "a"), and would then have
the schema of any other name. Where a schema has names beside others, no such escape is allowed."""

import json
import re
from collections.abc import Mapping
from typing import Any

ESCAPES = 'nrbtf\\"u'  # what may follow a backslash, unless a caller says otherwise
OPTION = "json_allowed_escapes"
NEEDS_ESCAPE = re.compile(r"(?<!\\)\\u00[01]")  # in JSON: what has no other way to be written


def has_open_names(schema: Any) -> bool:
    """Whether an object anywhere in a schema has names with schemas of their own, beside others."""
    if isinstance(schema, list):
        return any(map(has_open_names, schema))
    if not isinstance(schema, Mapping):
        return False
    patterns = schema.get("patternProperties")
    is_open = patterns or schema.get("additionalProperties") is not False
    named = isinstance(schema.get("properties"), Mapping) and schema["properties"]
    return bool(is_open and (named or patterns)) or any(map(has_open_names, schema.values()))


def without_name_escapes(options: Mapping[str, Any]) -> dict[str, Any]:
    allowed = options.get(OPTION, ESCAPES)
    return {**options, OPTION: allowed.replace("u", "") if isinstance(allowed, str) else allowed}


def needs_escape(value: Any) -> bool:
    """Whether a value has a character that JSON can only write as an escape by its number."""
    return NEEDS_ESCAPE.search(json.dumps(value)) is not None


def escape_fault(schema: Mapping[str, Any], options: Any) -> str | None:
    """Why the constants of a schema cannot be written where such escapes are not allowed."""
    allowed = options.get(OPTION, ESCAPES) if isinstance(options, Mapping) else ESCAPES
    constants = [schema[key] for key in ("const", "enum") if key in schema]
    if isinstance(allowed, str) and "u" not in allowed and needs_escape(constants):
        return (
            "a control character is written as an escape, which is not allowed where objects have "
            "more names than those in properties; expected additionalProperties: false"
        )
    return None
