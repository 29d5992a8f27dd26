"""The header Retry-After in its two forms, and without sense."""

import email.utils

import pytest
from support.clocks import own_time

from medusa_kit.base import retry_after
from medusa_kit.base.retry_after import seconds_to_wait


@pytest.mark.parametrize(
    ("header", "wait"),
    [(None, 2.5), ("", 2.5), ("soon", 2.5), ("-1", 2.5), ("٣", 2.5), ("0", 0.0), (" 7 ", 7.0),
     ("60", 60.0), ("61", None), ("9" * 400, None)],
)  # fmt: skip
def test_seconds(header: str | None, wait: float | None) -> None:
    assert seconds_to_wait(header, otherwise=2.5) == wait


def test_dates(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_700_000_000.0
    own_time(monkeypatch, retry_after, time=lambda: now)
    for after, wait in ((30, 30.0), (-30, 0.0), (3600, None)):
        date = email.utils.formatdate(now + after, usegmt=True)
        assert seconds_to_wait(date, otherwise=2.5) == wait
