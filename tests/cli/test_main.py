"""Where the program starts."""

import subprocess
import sys


def test_closed_streams_are_no_obstacle() -> None:
    """In a process of its own, which begins as the program does; what is opened later must not get
    the number of stdout, to which C code prints."""
    code = (
        "import os, sys; os.close(0); os.close(1); sys.stdin = sys.stdout = None\n"
        "sys.argv = ['medusa-kit', '--version']\n"
        "from medusa_kit.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert sys.stdout.fileno() == 1 and os.open(os.devnull, os.O_RDONLY) > 2"
    )
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_while_modules_are_imported_is_not_lost() -> None:
    """In a process of its own, in which imported code swallows the exception as torch's does."""
    code = (
        "import os, signal\n"
        "from medusa_kit.ctrl_c import ends_at_once\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with ends_at_once():\n"
        "    try: os.kill(os.getpid(), signal.SIGINT)\n"
        "    except KeyboardInterrupt: pass\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
