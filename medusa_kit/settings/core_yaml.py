"""YAML as version 1.2 reads it (its core schema), with each key given once.

PyYAML reads version 1.1, in which `no`, `on`, `1:30` and `010` are not what they look like. Here
they are text, and so is every number that is written in another way than Python writes it: only
where a number is expected `number_of` makes one of it. So text never turns into another value.
"""

import math
import re
from typing import Any

import yaml

from medusa_kit.shown import shown

TAG = "tag:yaml.org,2002:"
WORDS = {"null": None, "true": True, "false": False}
CONSTANT = "|".join((*(f"{w}|{w.title()}|{w.upper()}" for w in WORDS), "~", ""))
INFINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
PLAIN = r"0|-?[1-9][0-9]{0,17}|-?(0|[1-9][0-9]{0,9})\.([0-9]{0,3}[1-9]|0)"  # as in Python
DECIMAL = re.compile(r"[-+]?[0-9]{1,400}")
BASED = re.compile(r"0x[0-9a-fA-F]{1,16}|0o[0-7]{1,21}")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")


class GivenTwiceError(yaml.YAMLError):
    pass


def load(text: str) -> Any:
    """What YAML text holds. Raises yaml.YAMLError."""
    return yaml.load(text, _CoreLoader)


def number_of(value: Any) -> Any:
    """The number that a text is in YAML; any other value as it is."""
    if not isinstance(value, str):
        return value
    if DECIMAL.fullmatch(value):
        return int(value)
    if BASED.fullmatch(value):
        return int(value, 0)
    if INFINITE.fullmatch(value):
        return float(value.replace(".", "", 1))
    number = float(value) if FLOAT.fullmatch(value) else math.inf
    return number if math.isfinite(number) else value


class _CoreLoader(yaml.SafeLoader):
    """PyYAML's own keeps the last of several values of a key, without a word."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise GivenTwiceError(
                        f"the key {key.value!r} is given twice, in lines {lines[key.value]} and "
                        f"{line}"
                    )
                lines[key.value] = line
        return node


def _constant(loader: _CoreLoader, node: Any) -> Any:
    text = str(loader.construct_scalar(node))
    if not re.fullmatch(CONSTANT, text):
        raise _no_value(text, "null, true or false", node)
    return WORDS.get(text.lower())


def _number(loader: _CoreLoader, node: Any) -> Any:
    text = str(loader.construct_scalar(node))
    if isinstance(number := number_of(text), str):
        raise _no_value(text, "a number", node)
    return number


def _no_value(text: str, expected: str, node: Any) -> yaml.YAMLError:
    reason = f"{shown(text)} is not {expected}"
    return yaml.constructor.ConstructorError(None, None, reason, node.start_mark)


def _resolve(tag: str, pattern: str) -> None:
    _CoreLoader.add_implicit_resolver(f"{TAG}{tag}", re.compile(rf"(?:{pattern})\Z"), None)


_CoreLoader.yaml_implicit_resolvers = {}
_resolve("merge", "<<")  # of version 1.1, and in use
_resolve("bool", CONSTANT)
_resolve("float", PLAIN)
for _tag, _constructor in (
    ("null", _constant),
    ("bool", _constant),
    ("int", _number),
    ("float", _number),
):
    _CoreLoader.add_constructor(f"{TAG}{_tag}", _constructor)
