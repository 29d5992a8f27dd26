"""Commands as they are typed."""

import sys
from collections.abc import Callable

import pytest

from medusa_kit import cli

Run = Callable[..., tuple[int, str, str]]


def typed_command(
    patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *before: str
) -> Run:
    """Runs a command through `main`: (exit code, stdout, stderr). `before`: its first words."""

    def call(*arguments: object) -> tuple[int, str, str]:
        patch.setattr(sys, "argv", ["medusa-kit", *before, *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        return (code, *capsys.readouterr())

    return call
