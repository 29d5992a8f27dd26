"""What a file was made from, as digests by name, and the one comparison of two of them.

A file carries them among what it says of itself (the header of tree.json and statistics.npz, the
settings beside answers and hidden states, the reports of bench and verify, a run's record):

base_fingerprint   the base model (fingerprint.py)
base_config        what the base's config says of how it computes, which is not in its weights
encoding           how text becomes tokens (tokenizer/encoding_digest.py)
heads              the heads' weights and config (heads/digest.py)
statistics, tree   the file that it goes with
answers, prompts_digest    token ids
base_dtype         in which the base computed hidden states

What a file does not say is unknown: earlier versions wrote fewer of them.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from medusa_kit import console
from medusa_kit.base.fingerprint import Match
from medusa_kit.base.fingerprint import compare as compare_bases
from medusa_kit.base.tokenizer.encoding_digest import ENCODING, Encodings
from medusa_kit.base.tokenizer.encoding_digest import compare as compare_encodings
from medusa_kit.errors import ConfigError, MedusaKitError

CONFIG = "base_config"
BASE, HEADS, STATISTICS, TREE = "base_fingerprint", "heads", "statistics", "tree"
ANSWERS, PROMPTS, BASE_DTYPE = "answers", "prompts_digest", "base_dtype"
# In words: where it differs, and where it is not known.
WORDS = {
    BASE: ("another base model", "which base model"),
    CONFIG: ("another config of the base", "which config of the base"),
    ENCODING: ("another encoding of text", "which encoding of text"),
    HEADS: ("other heads", "which heads"),
    STATISTICS: ("other statistics", "which statistics"),
    TREE: ("another tree", "which tree"),
    BASE_DTYPE: ("another dtype of the base", "which dtype of the base"),
}
# Whether two digests that are not equal stand for the same all the same.
ALIKE: dict[str, Callable[[Any, Any], bool]] = {
    BASE: lambda then, now: compare_bases(then, now) is not Match.OTHER,
    ENCODING: lambda then, now: compare_encodings(then, now) is not Encodings.OTHER,
}


@dataclass(frozen=True)
class Comparison:
    """`other`: (then, now) by the name of each part that differs; `unknown`: names of parts that
    the file does not say."""

    other: dict[str, tuple[Any, Any]]
    unknown: list[str]

    def in_words(self) -> str:
        """What differs."""
        what = " and ".join(WORDS[name][0] for name in self.other)
        digests = "; ".join(f"{then} ≠ {now}" for then, now in self.other.values())
        return f"{what} (then ≠ now): {digests}"


def compare(then: Mapping[str, Any], now: Mapping[str, Any]) -> Comparison:
    """What a file was made from, against what there is now; what is None now is not compared."""
    then, now = _of_config(then, now)
    known = {name: value for name, value in now.items() if value is not None}
    said = {name: then[name] for name in known if then.get(name) is not None}
    other = {
        name: (value, known[name])
        for name, value in said.items()
        if value != known[name] and not ALIKE.get(name, lambda *_: False)(value, known[name])
    }
    return Comparison(other, [name for name in known if name not in said])


def _of_config(
    then: Mapping[str, Any], now: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Of configs only what differs. Another quantisation is of another file, which says it
    otherwise; of another base its config is no matter."""
    if not (isinstance(then.get(CONFIG), Mapping) and isinstance(now.get(CONFIG), Mapping)):
        return then, now
    bases = (then.get(BASE), now.get(BASE))
    if None not in bases and compare_bases(*bases) not in (Match.SAME, Match.OLD):
        return {**then, CONFIG: {}}, {**now, CONFIG: {}}
    first, second = _differing(then[CONFIG], now[CONFIG])
    return {**then, CONFIG: first}, {**now, CONFIG: second}


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[Any, Any]:
    """What both say and where they differ: versions of transformers write down more, or less."""
    pairs = {name: (first[name], second[name]) for name in sorted(first.keys() & second.keys())}
    for name, (one, other) in pairs.items():
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            pairs[name] = _differing(one, other)
    other = {name: pair for name, pair in pairs.items() if not _same(*pair)}
    return {name: pair[0] for name, pair in other.items()}, {
        name: pair[1] for name, pair in other.items()
    }


def _same(one: Any, other: Any) -> bool:
    """Equal, numbers as float32 has them: some files keep no more of them."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)
    if isinstance(one, list) and isinstance(other, list):  # factors of a long context, for example
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def check_origin(
    what: object,
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    hint: str,
    kind: type[MedusaKitError] = ConfigError,
) -> None:
    """Raises `kind` where `what`, a file, was made from something else; at most one line says what
    could not be compared."""
    compared = compare(then, now)
    if compared.other:
        raise kind(f"{what} was made with {compared.in_words()}", hint=hint)
    tell_unknown(what, compared.unknown)


def tell_unknown(what: object, names: Sequence[str]) -> None:
    """At most one line, for a file that does not say what it was made from."""
    if names:
        listed = " and ".join(WORDS[name][1] for name in names)
        console.note(
            f"{what} does not say with {listed} it was made, so that could not be checked: an "
            "earlier version wrote it, or a person"
        )


def digest_of(value: Any) -> str:
    """The digest of what JSON can say, as token ids."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]
