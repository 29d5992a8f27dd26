"""Paths as people write them."""

from pathlib import Path

import pytest

from medusa_kit.errors import ConfigError
from medusa_kit.paths import beside, expanded, whole


@pytest.mark.parametrize("name", ["9" * 5000, "a/" + "b" * 256, "~/" + "é" * 128, "\udcff" * 256])
def test_a_name_too_long_for_a_file_is_one_line(name: str) -> None:
    for resolve in (expanded, whole, beside):
        with pytest.raises(ConfigError, match="is too long for a file") as error:
            resolve(name)
        assert len(error.value.message) < 400


def test_a_name_with_a_zero_is_refused() -> None:
    for resolve in (expanded, whole, beside):
        with pytest.raises(ConfigError, match=r"'a\\x00b' holds a character of zero"):
            resolve("a\0b")


def test_a_name_as_long_as_files_may_have_is_taken(tmp_path: Path) -> None:
    (tmp_path / ("a" * 255)).touch()
    assert expanded(tmp_path / ("a" * 255)).is_file()
