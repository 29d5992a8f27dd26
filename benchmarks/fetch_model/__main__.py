"""The program of `make model`: fetch a model's file, so that `-m NAME` finds it.

    python -m benchmarks.fetch_model [NAME] [--file FILE]

Run again after Ctrl-C it goes on. Exits with 0 when the file is there.
"""

import argparse
import sys
from collections.abc import Sequence

from benchmarks.fetch_model.fetching import fetch
from benchmarks.fetch_model.mirror import from_mirror
from benchmarks.fetch_model.sources import Source, from_file, from_hub
from medusa_kit import console
from medusa_kit.base.own_models import FETCHED_MODELS
from medusa_kit.errors import MedusaKitError, unknown_value

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make model", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("name", nargs="?", default=next(iter(FETCHED_MODELS)))
    parser.add_argument("--file", help="a file that you have, in place of a download")
    asked = parser.parse_args(arguments)
    try:
        if (model := FETCHED_MODELS.get(asked.name)) is None:
            raise unknown_value("MODEL", asked.name, FETCHED_MODELS)
        sources: dict[str, Source] = {"Hub": from_hub, "mirror": from_mirror}
        if asked.file is not None:
            sources = {"file": from_file(asked.file, model)}
        path = fetch(model, sources)
    except MedusaKitError as error:
        _print(f"error: {error.message}", "bold red")
        _print(f"hint: {error.hint}", "cyan")
        return error.exit_code
    except KeyboardInterrupt:
        _print("interrupted; `make model` goes on from here", "yellow")
        return INTERRUPTED
    console.out.print(str(path), markup=False, highlight=False, soft_wrap=True)
    console.note(f"use it by its name: medusa-kit chat -m {model.name}")
    return 0


def _print(line: str, style: str) -> None:
    console.err.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
