"""Where the program starts: Ctrl-C ends it quietly while it still imports its commands too."""

import gc
import os
import sys

from medusa_kit import ctrl_c, stdout
from medusa_kit.garbage import no_search


def main() -> None:
    _open_closed_streams()
    try:
        with ctrl_c.ends_at_once(), no_search():
            from medusa_kit.cli import main as run
        with ctrl_c.is_not_lost(), stdout.ends_where_it_fails():
            run()
    except KeyboardInterrupt:
        ctrl_c.taken()
        sys.stderr.write("interrupted\n")
        sys.exit(ctrl_c.INTERRUPTED)
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
