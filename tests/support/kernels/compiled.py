"""Programs and libraries of the kernels that tests compile, kept by what they were made of, where
the product keeps its own: a minute of a core each, which no other test or run pays again.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from medusa_kit.errors import ConfigError
from medusa_kit.files import file_digest
from medusa_kit.infer.cpu.binding import kernels, levels
from medusa_kit.store.builds import make_once
from medusa_kit.store.records import extensions_folder

ARM_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
ARM_LACKING = [tool for tool in (ARM_COMPILER, EMULATOR) if shutil.which(tool) is None]
ARM_FLAGS = {"neon-dot": "-march=armv8.2-a+dotprod", "plain": "-march=armv8-a"}
QUICK_BUILD = "-O1"  # in half the time, with the same sums
SOURCE = Path(__file__).with_name("products_of_file.cpp")
IN_WHEEL = Path(kernels.__file__).parents[3] / "build" / "lib" / "medusa_kit" / "infer" / "cpu"


def in_wheel(isa: str) -> Path | None:
    """The library with this level that `make wheel` has built of exactly these sources, if it has.
    None where it would be compiled otherwise here: `make sanitize` adds flags."""
    path = levels.packaged_library(IN_WHEEL)
    if path.exists() and kernels.machine_flags(isa) == (levels.X86.get(isa),):
        return path
    return None


def library_for(isa: str) -> Any:
    """The kernels for an instruction set, if this processor has it; else the test is skipped."""
    try:
        flags = kernels.machine_flags(isa)
    except ConfigError as error:
        pytest.skip(str(error))
    path = in_wheel(isa)
    if path is not None:
        return kernels.declare(ctypes.CDLL(str(path)), levels.suffix_of(isa))
    return kernels.declare(kernels.build((*flags, QUICK_BUILD)))


def level_as_tests_have_it(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    """The product loads this level from where `library_for` does."""
    if (path := in_wheel(isa)) is not None:
        monkeypatch.setattr(kernels, "packaged_library", lambda: path)
    build = kernels.build
    monkeypatch.setattr(kernels, "build", lambda flags: build((*flags, QUICK_BUILD)))


def products_on_arm(isa: str, written: Path) -> torch.Tensor:
    """What the kernels for a processor of ARM_FLAGS make of a file as SOURCE reads it."""
    program, out = program_of(SOURCE, arm_command(isa)), written.with_suffix(".out")
    command = [EMULATOR, "-cpu", "max", program, written, out]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == isa
    return torch.from_numpy(np.fromfile(out, dtype=np.float32))


def arm_command(isa: str) -> list[str]:
    flags = [flag for flag in levels.FLAGS if flag != "-O3"]
    return [ARM_COMPILER, *flags, "-O1", "-static", ARM_FLAGS[isa], f"-I{levels.FOLDER}"]


def program_of(source: Path, command: Sequence[str]) -> Path:
    """`source`, which includes decoder.cpp, compiled by `command` with the kernels' other files.

    Raises CalledProcessError.
    """
    version = subprocess.run([command[0], "--version"], capture_output=True, check=True).stdout
    made_of = *command, version, file_digest(source), kernels._processor()  # -march=native
    digest = levels.digest_of_sources(*made_of)
    folder = extensions_folder() / f"{source.stem}_{digest}"
    program = folder / "program"

    def make(temporary: Path) -> None:
        temporary.mkdir()
        others = [str(levels.FOLDER / name) for name in levels.COMPILED if name != "decoder.cpp"]
        built = [*command, str(source), *others, "-o", str(temporary / program.name)]
        subprocess.run(built, capture_output=True, text=True, check=True)

    make_once(folder, f"compiling {source.name}", Path.is_dir, make)
    return program
