"""When Python looks for garbage: not while it imports, and not over all of torch at the end."""

import gc
import subprocess
import sys
from contextlib import suppress

import pytest

from medusa_kit.garbage import no_search


@pytest.mark.parametrize("on", [True, False])
def test_the_search_is_off_for_a_while(on: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if on else gc.disable)()
        with suppress(ValueError), no_search():
            assert not gc.isenabled()
            raise ValueError("an import fails")
        assert gc.isenabled() == on
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("arguments", [["--version"], ["generate"]])
def test_the_end_leaves_objects_alone(arguments: list[str]) -> None:
    code = (
        "import gc, sys\n"
        "from medusa_kit.__main__ import main\n"
        f"sys.argv = ['medusa-kit', *{arguments}]\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        "    print(gc.get_freeze_count() > 0, gc.isenabled())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.endswith("True True\n"), done.stderr
