"""What a part of the check reports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Report:
    """A table for people, the same as data, and what missed a limit."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    data: Sequence[Mapping[str, Any]]
    misses: Sequence[str]
