"""The command line. Each command has a module that parses, calls one function and reports.

torch and transformers are imported inside commands, so that `--help` is instant.
"""

import sys
from typing import Annotated

import typer

from medusa_kit import ctrl_c
from medusa_kit.cli import (
    bench,
    cache,
    convert,
    data,
    doctor,
    generate,
    hub,
    serve,
    train,
    tree_search,
    verify,
)
from medusa_kit.cli.chat_command import chat as chat_command
from medusa_kit.cli.parser import command
from medusa_kit.console import err
from medusa_kit.errors import MedusaKitError
from medusa_kit.version import __version__

app = command.app(
    name="medusa-kit",
    help="Make a language model you already have answer faster. In float32 greedy answers stay the "
    "same; in 16 bits rounding may change a token.",
    pretty_exceptions_enable=False,
)
app.command("chat", cls=command.Command)(chat_command)
app.command("generate", cls=command.Command)(generate.generate)
app.command("serve", cls=command.Command)(serve.serve)
app.command("train", cls=command.Command)(train.train)
app.add_typer(data.app, name="data")
app.command("tree-search", cls=command.Command)(tree_search.tree_search)
app.command("verify", cls=command.Command)(verify.verify)
app.command("bench", cls=command.Command)(bench.bench)
app.command("doctor", cls=command.Command)(doctor.doctor)
app.command("cache", cls=command.Command)(cache.cache)
app.command("convert", cls=command.Command)(convert.convert)
app.command("push", cls=command.Command)(hub.push)
app.command("pull", cls=command.Command)(hub.pull)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line. Our own errors become a message and an exit code, and so does Ctrl-C,
    whatever other error or end a library has made of it."""
    try:
        app()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or ctrl_c.was_typed():
            ctrl_c.taken()
            err.print("interrupted", style="yellow")
            sys.exit(ctrl_c.INTERRUPTED)
        if not isinstance(error, MedusaKitError):
            raise
        _print(f"error: {error.message}", "bold red")
        if error.hint:
            _print(f"hint: {error.hint}", "cyan")
        sys.exit(error.exit_code)


def _print(line: str, style: str) -> None:
    err.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
