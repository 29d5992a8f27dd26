"""A wheel's library with several levels: how it is made, which level is taken, and what follows
where it does not fit.

Compiling the kernels for all takes a minute, so small stand-ins have their names; `make test-wheel`
compiles the kernels and decodes with each level.
"""

import ctypes
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from medusa_kit.errors import ConfigError
from medusa_kit.infer.cpu.binding import kernels, levels

COMPILER = os.environ.get("CXX") or "c++"
pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64"
    or platform.system() != "Linux"
    or not all(map(shutil.which, (COMPILER, "objcopy"))),
    reason="levels are of x86-64, and need a compiler here",
)
FUNCTION = 'extern "C" __attribute__((visibility("default"))) '
# Equal names in every object file, of which a linker would keep one.
HERE = (
    "__attribute__((noinline)) inline int here() { return "
    + "".join(f"\n#if {name}\n 1 +\n#endif\n"
              for name in ("__AVX2__", "__AVXVNNI__", "__AVX512F__", "__AVX512VNNI__"))
    + "0; }\n"
)  # fmt: skip
SMALL = (
    f"#include <vector>\n{HERE}int another_file();\n{FUNCTION} int mk_features() {{\n"
    "std::vector<int> all(3, here()); return all[2] == another_file() ? all[2] : -1; }\n"
)
SMALL_PRODUCTS = f"{HERE}int another_file() {{ return here(); }}\n"
FEATURES = {"plain": 0, "avx2": 1, "avx-vnni": 2, "avx512": 2, "avx512-vnni": 3}


def copy_small_sources(folder: Path) -> None:
    for name in (*levels.SOURCES, "levels.cpp"):
        shutil.copy(levels.FOLDER / name, folder)
    for name in levels.COMPILED:
        (folder / name).write_text("")
    (folder / "decoder.cpp").write_text(SMALL)
    (folder / "products_1.cpp").write_text(SMALL_PRODUCTS)


@pytest.fixture
def small_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    copy_small_sources(folder)
    monkeypatch.setattr(levels, "FOLDER", folder)
    return folder


@pytest.fixture(scope="module")
def small_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        copy_small_sources(sources := tmp_path_factory.mktemp("sources"))
        patch.setattr(levels, "FOLDER", sources)
        folder = tmp_path_factory.mktemp("library")
        library = levels.compile_levels(folder)
        assert library == levels.packaged_library(folder)
    return library


def test_each_level_keeps_its_own_functions(small_library: Path) -> None:
    opened = ctypes.CDLL(str(small_library))
    runnable = [level for level in levels.X86 if opened.mk_runs(level.encode())]
    assert "plain" in runnable
    for level in runnable:
        assert getattr(opened, "mk_features" + levels.suffix_of(level))() == FEATURES[level]
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", small_library], capture_output=True, text=True, check=True
    )
    names = {line.split()[-1] for line in listed.stdout.splitlines()}
    own = {"mk_features" + levels.suffix_of(level) for level in levels.X86}
    assert names == {*own, "mk_runs", "mk_best_level"}


def test_the_library_and_this_package_agree_on_what_runs_here(small_library: Path) -> None:
    opened = ctypes.CDLL(str(small_library))
    for level in levels.X86:
        try:
            kernels.machine_flags(level)
            runs = True
        except ConfigError:
            runs = False
        assert bool(opened.mk_runs(level.encode())) == runs, level
    assert not opened.mk_runs(b"avx3")
    opened.mk_best_level.restype = ctypes.c_char_p
    assert opened.mk_runs(opened.mk_best_level())


def test_a_library_of_other_sources_is_not_taken(small_sources: Path) -> None:
    before = levels.packaged_library(small_sources)
    (small_sources / "heads.h").write_text("// changed\n")
    assert levels.packaged_library(small_sources) != before


def test_what_does_not_compile_leaves_nothing(small_sources: Path, tmp_path: Path) -> None:
    (small_sources / "decoder.cpp").write_text("no C++\n")
    with pytest.raises(RuntimeError, match=r"failed: .*decoder\.cpp"):
        levels.compile_levels(tmp_path)
    assert not list(tmp_path.glob("kernels_*"))


def test_the_platform_is_the_newest_glibc_that_is_needed(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    library.write_bytes(b"\0GLIBC_2.2.5\0GLIBC_2.9\0GLIBC_2.34\0GLIBC_2.14\0")
    assert levels.platform_tag(library) == "manylinux_2_34_x86_64"


STAND_IN = (
    "#include <cstring>\n"
    f'{FUNCTION} const char* mk_best_level() {{ return "avx2"; }}\n'
    f'{FUNCTION} int mk_runs(const char* name) {{ return !strcmp(name, "avx2"); }}\n'
) + "".join(
    f'{FUNCTION} const char* {name}_{level}() {{ return "{level}"; }}\n'
    for name in kernels.FUNCTIONS
    for level in ("avx2", "plain")
)


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel's library on a processor that has AVX2 at most."""
    source, path = tmp_path / "small.cpp", tmp_path / "kernels.so"
    source.write_text(STAND_IN)
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", path, source], check=True)

    def build(flags: tuple[str, ...]) -> Path:
        raise OSError("no compiler here")

    monkeypatch.setattr(kernels, "packaged_library", lambda: path)
    monkeypatch.setattr(kernels, "build", build)
    monkeypatch.delenv(kernels.ISA_SWITCH, raising=False)
    return path


def load_anew() -> Any:
    return kernels.load_library.__wrapped__()


def test_the_best_level_is_taken_without_a_compiler(packaged: Path) -> None:
    assert load_anew().mk_isa() == b"avx2"


def test_a_level_that_the_processor_lacks_is_refused(
    packaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kernels.ISA_SWITCH, "plain")
    with pytest.raises(ConfigError, match="MEDUSA_KIT_ISA is 'plain', which this processor lacks"):
        load_anew()


def test_a_library_that_does_not_open_or_is_not_there_is_built(
    packaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packaged.unlink()
    assert load_anew() is None
    assert "could not be built (no compiler here)" in capsys.readouterr().err
    packaged.write_bytes(b"no library")
    assert load_anew() is None
    said = capsys.readouterr().err
    assert "so the C++ kernels are built" in said
    assert "could not be built (no compiler here)" in said
