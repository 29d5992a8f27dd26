"""The C++ sources, their flags, and one library with all levels of x86-64, as wheels have it.

The files of COMPILED are compiled once for each level. All symbols of a level then get its name as
a suffix, also those of inline functions and of the standard library's templates: the linker would
keep one of equal names, and a processor without AVX-512 could be given its instructions.

Imports the standard library only: setup.py runs this file where nothing is installed.
"""

import hashlib
import os
import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

# Each by itself, side by side where there are cores.
COMPILED = ("decoder.cpp", "products_2.cpp", "products_3.cpp", "products_1.cpp", "packing.cpp")
SOURCES = (
    "simd.h", "pool.h", "matrix.h", "integers.h", "dots_avx512.h", "dots_avx2.h", "dots_neon.h",
    "matmul.h", "products.h", "draw.h", "rows.h", "norms.h", "shares.h", "recurrent.h", "heads.h",
    "copying.h", "trees.h", "step.h", "attention_parts.h", "attention.h", "blocks.h",
    *COMPILED,
)  # fmt: skip
FLAGS = ("-O3", "-std=c++17", "-pthread", "-ffp-contract=off", "-fvisibility=hidden", "-Wno-psabi")
X86 = {  # names as mk_isa reports them, and as levels.cpp has them
    "plain": "-march=x86-64",
    "avx2": "-march=haswell",
    "avx-vnni": "-march=alderlake",
    "avx512": "-march=skylake-avx512",
    "avx512-vnni": "-march=cascadelake",
}
LINKED = ("-shared", "-pthread", "-s", "-static-libstdc++", "-Wl,--gc-sections")
EXPORTED = "{ global: mk_*; local: *; };"
FOLDER = Path(__file__).parents[1]  # of the sources


def digest_of_sources(*more: object) -> str:
    """Twelve digits of all that a library is made of, and of `more`."""
    digest = hashlib.sha256(repr((FLAGS, *more)).encode())
    for name in SOURCES:
        digest.update((FOLDER / name).read_bytes())
    return digest.hexdigest()[:12]


def packaged_library(folder: Path = FOLDER) -> Path:
    """Where a wheel has the library with all levels, if it has one of exactly these sources."""
    dispatch_source = (FOLDER / "levels.cpp").read_text(encoding="utf-8")
    return folder / f"kernels_{digest_of_sources(X86, LINKED, dispatch_source)}.so"


def suffix_of(level: str) -> str:
    return "_" + level.replace("-", "_")


def compile_levels(folder: Path) -> Path:
    """Writes the library into `folder`, by the compiler that CXX names and the binutils beside it.

    Raises OSError where there is none, and RuntimeError with the output of what failed.
    """
    library = packaged_library(folder)
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(os.cpu_count()) as threads:
        temporary_folder = Path(temporary)
        parts = list(product(X86, COMPILED))
        # `list` raises what one of them raised.
        list(threads.map(lambda part: _compile(part[0], part[1], temporary_folder), parts))
        objects = [_join(level, temporary_folder) for level in X86]
        dispatch = temporary_folder / "levels.o"
        _run(_compiler(), *FLAGS, "-fPIC", "-c", FOLDER / "levels.cpp", "-o", dispatch)
        exported = temporary_folder / "exported"
        exported.write_text(EXPORTED, encoding="utf-8")
        script = f"-Wl,--version-script={exported}"
        unfinished = library.with_suffix(".tmp")
        _run(_compiler(), *objects, dispatch, *LINKED, script, "-o", unfinished)
    unfinished.replace(library)
    return library


def platform_tag(library: Path) -> str:
    """The platform of a wheel with this library: manylinux with the glibc that it needs. No other
    library's version matters, since C++'s own is linked statically."""
    versions = re.findall(rb"GLIBC_(\d+)\.(\d+)", library.read_bytes())
    if not versions:
        return "linux_x86_64"
    major, minor = max((int(major), int(minor)) for major, minor in versions)
    return f"manylinux_{major}_{minor}_x86_64"


def _compile(level: str, name: str, folder: Path) -> None:
    object_file = folder / f"{level}-{name}.o"
    _run(_compiler(), *FLAGS, "-fPIC", X86[level], "-c", FOLDER / name, "-o", object_file)


def _join(level: str, folder: Path) -> Path:
    """One object file of a level's, whose symbols have the level's name as a suffix."""
    object_file, renamed = folder / f"{level}.o", folder / f"{level}.names"
    parts = [folder / f"{level}-{name}.o" for name in COMPILED]
    _run(_compiler(), "-r", "-nostdlib", *parts, "-o", object_file)
    names = {line.split()[-1] for line in _run("nm", "--defined-only", object_file).splitlines()}
    pairs = (f"{name} {name}{suffix_of(level)}\n" for name in sorted(names))
    renamed.write_text("".join(pairs), encoding="utf-8")
    _run("objcopy", f"--redefine-syms={renamed}", object_file)
    return object_file


def _compiler() -> str:
    return os.environ.get("CXX") or "c++"


def _run(*command: str | Path) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout
