"""Where the program starts: Ctrl-C ends it quietly while it still imports its commands too."""

import gc
import os
import sys

from medusa_kit.ctrl_c import ends_at_once
from medusa_kit.garbage import no_search

INTERRUPTED = 130


def main() -> None:
    _open_closed_streams()
    try:
        with ends_at_once(), no_search():
            from medusa_kit.cli import main as run
        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(INTERRUPTED)
    finally:
        # At exit Python would look through all objects for cycles: half a second for torch's.
        gc.freeze()


def _open_closed_streams() -> None:
    """Python has None for a standard stream that was closed (`>&-`), which few libraries expect,
    and its number would go to the next file or connection, to which C code then prints."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, "r+" if number else "r")  # noqa: SIM115, PTH123 - pathlib: slow
            setattr(sys, name, stream)
            if stream.fileno() != number:
                os.dup2(stream.fileno(), number)


if __name__ == "__main__":
    main()
