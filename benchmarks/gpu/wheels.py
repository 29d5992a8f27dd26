"""Collects what a machine with a GPU and no network may lack, to be carried there in a folder.

    python benchmarks/gpu/wheels.py build/wheels        here, with a network
    PYTHONPATH=build/wheels python -m benchmarks.gpu 1 --output DIR        there

The packages are unpacked, for Linux on x86-64 and the Python that --python names.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

NAMES = ("pydantic", "annotated-types", "typing-inspection")  # besides pydantic's own core
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="its version there (default: 3.12)")
    asked = parser.parse_args()
    collect(asked.folder, asked.python)


def collect(folder: Path, python: str) -> None:
    """Exits where pip fails, which then says why."""
    for_there = ["--python-version", python, "--implementation", "cp",
                 "--platform", "manylinux2014_x86_64", "--only-binary=:all:"]  # fmt: skip
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--no-deps",
               "--target", str(folder), *for_there]  # fmt: skip
    wanted = pinned(CONSTRAINTS.read_text(encoding="utf-8"))
    if subprocess.run([*command, *wanted], check=False).returncode:
        sys.exit(f"pip could not get {', '.join(wanted)} for Python {python}")
    # pydantic needs one version of its core, which its metadata names.
    (metadata,) = folder.glob("pydantic-*.dist-info/METADATA")
    core = core_of(metadata.read_text(encoding="utf-8"))
    if subprocess.run([*command, core], check=False).returncode:
        sys.exit(f"pip could not get {core} for Python {python}")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {', '.join([*wanted, core])}, {size / 1e6:.1f} MB, for Python {python}")


def pinned(constraints: str) -> list[str]:
    """The packages, at the versions that the constraints name."""
    lines = dict.fromkeys(NAMES)
    for line in constraints.splitlines():
        name, _, version = line.partition("==")
        if name in lines and version:
            lines[name] = version.strip()
    return [f"{name}=={version}" if version else name for name, version in lines.items()]


def core_of(metadata: str) -> str:
    """The requirement of pydantic-core in pydantic's metadata."""
    found = re.search(r"^Requires-Dist: (pydantic-core==\S+)", metadata, re.MULTILINE)
    if found is None:
        sys.exit("pydantic's metadata names no version of pydantic-core")
    return found[1]


if __name__ == "__main__":
    main()
