"""Ctrl-C reaches who waits for it, whatever swallows it on its way. Each case runs in a process of
its own, as the program does."""

import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import ctypes, os, signal, sys, weakref
from medusa_kit import ctrl_c
signal.signal(signal.SIGINT, signal.default_int_handler)

def type_it():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(9): pass

def swallow():
    try: type_it()
    except: pass
"""
END = """
try:
    with ctrl_c.is_not_lost():
        case()
        for _ in range(9): pass
        print('went on', 'typed' if ctrl_c.was_typed() else 'lost')
        ctrl_c.taken()
except KeyboardInterrupt:
    ctrl_c.taken()
    print('reached')
except RuntimeError:
    print('another error', ctrl_c.was_typed())
    ctrl_c.taken()
"""
CASES = {
    "caught by all": ("def case(): swallow()", "reached"),
    "caught again and again": (
        "def case():\n"
        "    for _ in range(3):\n"
        "        try: swallow() if not ctrl_c.was_typed() else [None for _ in range(9)]\n"
        "        except: pass\n",
        "reached",
    ),
    "in __del__": (
        "class One:\n    def __del__(self): type_it()\ndef case(): One()",
        "reached",
    ),
    "called back by a weak reference": (
        "class One: pass\n"
        "def case():\n"
        "    one = One(); ref = weakref.ref(one, lambda _: type_it()); del one\n",
        "reached",
    ),
    "called back by C": (
        "back = ctypes.CFUNCTYPE(None)\ndef case(): back(type_it)()",
        "reached",
    ),
    "in a generator that is dropped": (
        "def generator():\n"
        "    try: yield\n"
        "    finally: type_it()\n"
        "def case():\n"
        "    one = generator(); next(one); del one\n",
        "reached",
    ),
    "made another error of": (
        "def case():\n"
        "    try: type_it()\n"
        "    except BaseException as error: raise RuntimeError from error\n",
        "another error True",
    ),
    "made another error of, which is caught": (
        "def case():\n"
        "    try:\n"
        "        try: type_it()\n"
        "        except BaseException as error: raise RuntimeError from error\n"
        "    except RuntimeError: pass\n",
        "reached",
    ),
    "kept for ever": (
        "kept = []\n"
        "def case():\n"
        "    try: type_it()\n"
        "    except BaseException as error: kept.append(error)\n",
        "went on typed",
    ),
    "nothing was typed": ("def case(): pass", "went on lost"),
}


def run(code: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("case", CASES)
def test_it_is_not_lost(case: str) -> None:
    code, said = CASES[case]
    assert run(f"{BEGIN}\n{code}\n{END}") == (0, f"{said}\n", "")


def test_a_second_one_ends_at_once() -> None:
    code = (
        "kept = []\n"
        "def case():\n"
        "    try: type_it()\n"
        "    except BaseException as error: kept.append(error)\n"
        "    type_it()\n"
    )
    assert run(f"{BEGIN}\n{code}\n{END}") == (130, "", "interrupted\n")


def test_what_swallows_it_again_and_again_is_ended() -> None:
    code = (
        "def deep(levels):\n"
        "    try:\n"
        "        deep(levels - 1) if levels else type_it()\n"
        "        for _ in range(9): pass\n"
        "    except: pass\n"
        "def case(): deep(100)\n"
    )
    assert run(f"{BEGIN}\n{code}\n{END}") == (130, "", "interrupted\n")


def test_after_one_that_was_taken_the_next_is_another() -> None:
    code = (
        "def case():\n"
        "    for _ in range(3):\n"
        "        try: type_it()\n"
        "        except KeyboardInterrupt: ctrl_c.taken()\n"
        "    swallow()\n"
    )
    assert run(f"{BEGIN}\n{code}\n{END}") == (0, "reached\n", "")


SWALLOWS = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(9): pass
except:
    pass
"""


@pytest.mark.parametrize("error", ["", "raise ImportError('half imported')"])
def test_a_module_that_swallows_it(error: str, tmp_path: Path) -> None:
    """Imported late, within a command."""
    (tmp_path / "swallows.py").write_text(SWALLOWS + error)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "sys.argv = ['medusa-kit', 'generate', 'hi', '-m', 'debug-tiny']\n"
        "from medusa_kit import __main__\n"
        "import medusa_kit.cli as cli\n"
        "def late():\n"
        "    import swallows\n"
        "    print('went on')\n"
        "cli.app = late\n"
        "__main__.main()"
    )
    assert run(code) == (130, "", "interrupted\n")
