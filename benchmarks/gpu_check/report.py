"""The report of a part of the check."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Report:
    """A table, the same as data, and the limits that were missed."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    data: Sequence[Mapping[str, Any]]
    misses: Sequence[str]
