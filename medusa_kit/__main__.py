"""Where the program starts: Ctrl-C ends it quietly while it still imports its commands too."""

import sys

INTERRUPTED = 130


def main() -> None:
    try:
        from medusa_kit.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
