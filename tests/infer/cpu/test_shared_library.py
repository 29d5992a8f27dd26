"""The C++ library on disk: after a killed or damaged build nothing hangs or opens half a file.

Compiling is done by a stand-in inside torch's own loader, except where the compiler is killed.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.callers import all_at_once
from torch.utils import cpp_extension

from medusa_kit.infer.cpu.binding import kernels

COMPILER = shutil.which(os.environ.get("CXX", "c++"))
pytestmark = pytest.mark.skipif(
    COMPILER is None or not cpp_extension.is_ninja_available(), reason="no C++ compiler or no ninja"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small library in place of the kernels."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "small.cpp").write_text('extern "C" int answer() { return 42; }\n')
    path = folder / "small.so"
    assert COMPILER is not None
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", path, folder / "small.cpp"], check=True)
    return path


@pytest.fixture
def compiled(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_packaged: None
) -> list[Path]:
    """Folders in which the stand-in compiled."""
    done: list[Path] = []

    def compile_library(name: str, build_directory: str, **_: Any) -> None:
        done.append(Path(build_directory))
        shutil.copy(library, Path(build_directory) / f"{name}.so")

    def wait(baton: Any) -> None:
        raise TimeoutError(f"waiting for {baton.lock_file_path}")

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    monkeypatch.setattr(cpp_extension, "_write_ninja_file_and_build_library", compile_library)
    monkeypatch.setattr(cpp_extension, "FileBaton", type("Baton", (cpp_extension.FileBaton,),
                                                         {"wait": wait}))  # fmt: skip
    monkeypatch.setattr(cpp_extension, "JIT_EXTENSION_VERSIONER",
                        type(cpp_extension.JIT_EXTENSION_VERSIONER)())  # fmt: skip
    monkeypatch.setattr(kernels, "declare", lambda opened: opened)
    return done


def load_anew() -> Any:
    """As in a new process."""
    return kernels.load_library.__wrapped__()


def the_library(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "built").glob("medusa_kit_*/*.so")
    return path


def test_a_library_is_built_once(compiled: list[Path], tmp_path: Path) -> None:
    for _ in range(3):
        assert load_anew().answer() == 42
    assert len(compiled) == 1
    (folder,) = (path for path in (tmp_path / "built").iterdir() if path.is_dir())
    assert folder == the_library(tmp_path).parent


# Cut off in the middle as by a killed linker or a full disk, emptied, one bit of it changed, gone.
DAMAGES = {
    "cut off": lambda whole: whole[: len(whole) // 2],
    "empty": lambda whole: b"",
    "changed": lambda whole: whole[:700] + bytes([whole[700] ^ 1]) + whole[701:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_never_opened(
    compiled: list[Path],
    library: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: str,
) -> None:
    """Opening it would end the process (SIGBUS), so a stand-in for opening reads it."""
    load_anew()
    path = the_library(tmp_path)
    path.unlink()  # this process has it mapped, and its end would touch what is cut off
    path.write_bytes(DAMAGES[damage](library.read_bytes()))
    opened: list[bytes] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda path: opened.append(Path(path).read_bytes()))
    load_anew()
    assert set(opened) == {library.read_bytes()}
    assert len(compiled) == 2
    assert the_library(tmp_path).read_bytes() == library.read_bytes()


def test_a_damaged_digest_is_made_anew(compiled: list[Path], tmp_path: Path) -> None:
    load_anew()
    (the_library(tmp_path).parent / "sha256").write_bytes(b"\xff\xfe")
    assert load_anew() is not None
    assert len(compiled) == 2


def test_a_stale_lock_of_torchs_loader_holds_nobody_up(
    compiled: list[Path], tmp_path: Path
) -> None:
    load_anew()
    folder = the_library(tmp_path).parent
    for path in folder.iterdir():
        path.unlink()
    (folder / "lock").touch()
    assert load_anew().answer() == 42
    assert len(compiled) == 2


KILLED = """
import os
os.environ["VICTIM"] = str(os.getpid())
from medusa_kit.infer.cpu.binding import kernels
kernels.load_library()
"""
DEADLY_COMPILER = """#!/bin/sh
for argument; do
    if [ "$argument" = -c ]; then kill -9 $VICTIM; exit 1; fi
done
exec {compiler} "$@"
"""


@pytest.mark.slow
def test_a_killed_build_leaves_nothing_that_is_waited_for(
    compiled: list[Path], tmp_path: Path
) -> None:
    script = tmp_path / "c++"
    script.write_text(DEADLY_COMPILER.format(compiler=COMPILER))
    script.chmod(0o755)
    environment = {**os.environ, "CXX": str(script)}
    killed = subprocess.run([sys.executable, "-c", KILLED], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    left = list((tmp_path / "built").iterdir())
    assert left, "it was killed while it compiled"
    assert load_anew().answer() == 42
    assert len(compiled) == 1
    assert not list((tmp_path / "built").glob("*.tmp"))


def test_a_library_that_does_not_open_is_built_once_more_and_then_left(
    compiled: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    load_anew()
    own, final = ctypes.CDLL, the_library(tmp_path)

    def open_elsewhere(path: str) -> Any:
        if Path(path) == final:
            raise OSError("version `GLIBC_9.99' not found")
        return own(path)

    monkeypatch.setattr(ctypes, "CDLL", open_elsewhere)
    capsys.readouterr()
    assert load_anew() is None
    assert len(compiled) == 2
    said = capsys.readouterr().err
    assert "is made again" in said
    assert said.count("GLIBC_9.99") == 2
    assert "steps run through torch" in said


def test_threads_that_load_at_once_build_once(compiled: list[Path]) -> None:
    found = all_at_once(lambda _: load_anew(), 4)
    assert [library.answer() for library in found] == [42] * 4
    assert len(compiled) == 1
