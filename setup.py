"""Wheels for Linux on x86-64 have the C++ kernels built in; everything else is in pyproject.toml.

MEDUSA_KIT_WHEEL says whether: `kernels` (an error where they cannot be compiled), `pure` (never) or
nothing (where a compiler is found). Editable installs and sdists have none; what is not built in is
built at first use.
"""

import importlib.util
import os
import platform
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

FOLDER = Path("medusa_kit", "infer", "cpu")
SWITCH = "MEDUSA_KIT_WHEEL"
WANTED = os.environ.get(SWITCH, "")
if WANTED not in ("", "kernels", "pure"):
    sys.exit(f"{SWITCH} is {WANTED!r}; expected kernels, pure or nothing")
specification = importlib.util.spec_from_file_location("levels", FOLDER / "binding" / "levels.py")
levels = importlib.util.module_from_spec(specification)
specification.loader.exec_module(levels)


class BuildWithKernels(build_py):
    """Also compiles the kernels, and leaves the wheel's platform in `distribution.kernels_for`."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for stale in Path(self.build_lib, FOLDER).glob("kernels_*"):  # of an earlier build
            stale.unlink()
        here = platform.system() == "Linux" and platform.machine() == "x86_64"
        if WANTED == "kernels" or (here and not WANTED):
            self.add_kernels()

    def add_kernels(self) -> None:
        try:
            library = levels.compile_levels(Path(self.build_lib, FOLDER))
        except (OSError, RuntimeError) as error:
            if WANTED == "kernels":
                raise
            print(f"without C++ kernels, which are built at first use: {error}", file=sys.stderr)
        else:
            self.distribution.kernels_for = levels.platform_tag(library)


class WheelOfPlatform(bdist_wheel):
    """Named after the platform of the kernels. They need no particular Python."""

    def get_tag(self) -> tuple[str, str, str]:
        platform_of_kernels = getattr(self.distribution, "kernels_for", None)
        if platform_of_kernels is None:
            return super().get_tag()
        self.root_is_pure = False
        return "py3", "none", platform_of_kernels


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelOfPlatform})
