"""`medusa-kit cache`: all that the kit keeps is shown and can be removed, and nothing else."""

import json
import os
import platform
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from medusa_kit.store import clearing, records
from medusa_kit.store.builds import Origin, make_file_once, make_folder_once
from medusa_kit.store.records import Record, content_digest, short_digest

Run = Callable[..., tuple[int, str, str]]
KERNELS, MODEL = "medusa_kit_0123456789ab", "qwen2.5-coder-0.5b-instruct"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    for name in ("_told", "_digests", "_not_writable"):
        monkeypatch.setattr(records, name, type(getattr(records, name))())
    monkeypatch.setattr(records, "SETTLED_SECONDS", -60)
    return tmp_path / "cache"


def keep(model: Path, cache: Path) -> None:
    """What a load of this model would keep, of every kind."""
    model.mkdir(exist_ok=True)
    weights = model / "model.safetensors"
    weights.write_bytes(b"weights of " + os.fsencode(model))
    origin = Origin(model, [content_digest(weights)])
    name = short_digest(str(model))
    packed = cache / "packed" / f"{model.name}-{name}" / "weights.packed"
    for path, digest in (
        (packed, "weights.sha256"),
        (cache.parent / "extensions" / KERNELS / f"{KERNELS}.so", "sha256"),
    ):
        make_file_once(path, digest, "making it", lambda p: touch(p, 300_000), Path.read_bytes,
                       origin if path == packed else None)  # fmt: skip
    described = cache / f"{model.name}-{name}-t3-01234567-described"
    make_folder_once(described, "making it", lambda p: touch(p / "config.json"), origin)
    Record("checks", name, {"path": str(model)}, model).write(found=1)
    touch(cache / "models" / MODEL / f"{MODEL}-q4_k_m.gguf", 500_000)


def touch(path: Path, size: int = 10) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))


def rows(out: str) -> list[list[str]]:
    """Kind, source and of, of each row."""
    lines = [line.split() for line in out.splitlines()[1:-1]]
    return sorted([line[0], line[4], line[5]] for line in lines)


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_all_that_is_kept_is_shown_and_removed(run: Run, cache: Path, tmp_path: Path) -> None:
    keep(tmp_path / "model", cache)
    code, out, _ = run("cache")
    model = str(tmp_path / "model")
    assert code == 0
    assert rows(out) == [
        ["gguf", "there", model], ["kernels", "–", "–"],
        ["models", "there", str(cache / "models" / MODEL)],
        ["packed", "there", model], ["records", "there", model],
    ]  # fmt: skip
    assert out.splitlines()[-1].endswith(str(cache))
    assert "1 MB" in out.splitlines()[-1]
    code, out, err = run("cache", "--clear", "all")
    assert (code, rows(out)) == (0, [])
    assert "removed" in err
    assert not files_in(cache) | files_in(tmp_path / "extensions")
    assert run("cache")[0] == 0


def test_an_empty_cache_is_a_table_without_rows(run: Run, cache: Path) -> None:
    code, out, _ = run("cache", "--clear", "gone")
    assert (code, len(out.splitlines())) == (0, 2)
    assert not cache.exists(), "looking at it does not make it"


@pytest.mark.parametrize("kind", ["gguf", "kernels", "models", "packed", "records"])
def test_a_kind_is_removed_and_others_stay(
    run: Run, cache: Path, tmp_path: Path, kind: str
) -> None:
    keep(tmp_path / "model", cache)
    before = {row[0] for row in rows(run("cache")[1])}
    assert {row[0] for row in rows(run("cache", "--clear", kind)[1])} == before - {kind}


def test_what_was_made_of_files_that_are_gone_is_removed(
    run: Run, cache: Path, tmp_path: Path
) -> None:
    for name in ("stays", "goes"):
        keep(tmp_path / name, cache)
    shutil.rmtree(tmp_path / "goes")
    assert ["packed", "gone", str(tmp_path / "goes")] in rows(run("cache")[1])
    left = rows(run("cache", "--clear", "gone")[1])
    assert not [row for row in left if row[1] == "gone"]
    stay = [row[0] for row in left if row[1] == "there"]
    assert stay == ["gguf", "models", "packed", "records"]


def test_nobody_knows_whether_another_machines_files_are_gone(
    run: Run, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path / "model", cache)
    shutil.rmtree(tmp_path / "model")
    before = rows(run("cache")[1])
    monkeypatch.setattr(platform, "node", lambda: "another")
    left = rows(run("cache", "--clear", "gone")[1])
    assert len(left) == len(before)
    assert {row[1] for row in left if row[0] != "models"} == {"–"}


def test_what_is_not_the_kits_stays(run: Run, cache: Path, tmp_path: Path) -> None:
    """Files of one's own, folders that have one too many, links and what they point to."""
    elsewhere = tmp_path / "elsewhere"
    packed = elsewhere / "x-0123456789abcdee"
    touch(packed / "weights.packed")
    touch(elsewhere / "checks" / "0123456789abcdef.json")
    own = [cache / "notes.txt", cache / "huggingface" / "blob", cache / "digests" / "mine.json",
           cache / "packed" / "x-0123456789abcdef" / "weights.packed",
           cache / "packed" / "x-0123456789abcdef" / "mine.txt",
           cache / "x-0123456789abcdef" / "thesis.txt", cache / "packed" / ".mine.tmp",
           tmp_path / "extensions" / "fused_adam" / "fused_adam.so"]  # fmt: skip
    for path in own:
        touch(path)
    (cache / "packed" / packed.name).symlink_to(packed)
    (cache / "checks").symlink_to(elsewhere / "checks")
    before, there = files_in(cache), files_in(elsewhere)
    code, out, _ = run("cache", "--clear", "all")
    assert code == 0
    assert "x-0123456789abcdef" not in out
    assert files_in(cache) == before
    assert files_in(elsewhere) == there
    assert (cache / "packed" / packed.name).is_symlink()


def test_a_cache_folder_that_is_a_link_is_cleared(run: Run, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    cache.symlink_to(tmp_path / "disk")
    keep(tmp_path / "model", cache)
    assert files_in(tmp_path / "disk")
    run("cache", "--clear", "all")
    assert not files_in(tmp_path / "disk")
    assert cache.is_symlink()


def test_what_another_process_makes_stays(run: Run, cache: Path, tmp_path: Path) -> None:
    keep(tmp_path / "model", cache)
    (packed,) = (path for path in (cache / "packed").iterdir() if path.is_dir())
    touch(packed.with_name(f".{packed.name}.01234567.tmp") / "weights.packed")
    with FileLock(packed.with_name(f".{packed.name}.lock")):
        code, _, err = run("cache", "--clear", "all")
        assert code == 1
        assert "another process is making it" in err
        assert (packed / "weights.packed").is_file()
        assert len(list(packed.parent.glob(".*.tmp"))) == 1
    assert run("cache", "--clear", "all")[0] == 0
    assert not files_in(cache), "what a killed process left too"


def test_what_cannot_be_removed_is_told_and_the_rest_goes(
    run: Run, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path / "model", cache)

    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(clearing, "remove_folder", refuse)
    code, out, err = run("cache", "--clear", "all")
    assert code == 1
    assert err.count("Permission denied") == 4
    assert "records" not in {row[0] for row in rows(out)}


def test_names_are_one_line_each_whatever_they_hold(run: Run, cache: Path, tmp_path: Path) -> None:
    for name in (b"two\nlines", b"\x1b[31mred", b"no\xfftext"):
        keep(tmp_path / os.fsdecode(name), cache)
    code, out, _ = run("cache")
    assert code == 0
    assert "\x1b" not in out
    assert len([line for line in out.splitlines() if line.startswith("packed")]) == 3


def test_a_folder_that_this_user_may_not_see_is_as_good_as_empty(
    run: Run, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path / "model", cache)
    real = os.lstat

    def hidden(path: str | Path, **options: int) -> os.stat_result:
        if Path(path) == tmp_path / "extensions":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, **options)

    monkeypatch.setattr(os, "lstat", hidden)
    monkeypatch.setattr(Path, "is_symlink", lambda path: stat.S_ISLNK(os.lstat(path).st_mode))
    code, out, _ = run("cache", "--clear", "packed")
    assert (code, {row[0] for row in rows(out)} & {"packed", "kernels"}) == (0, set())


def test_links_between_equal_files_count_once(run: Run, cache: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        keep(tmp_path / name, cache)
    first, second = (cache / "packed").glob("*/weights.packed")
    assert first.samefile(second)
    lines = run("cache", "--clear", "kernels")[1].splitlines()
    assert [line.split()[1] for line in lines if line.startswith("packed")] == ["300", "300"]
    run("cache", "--clear", "models")
    assert "302 kB" in run("cache")[1].splitlines()[-1]


@pytest.mark.parametrize("damage", [b"", b"\xff", b"[]", b'{"place": 3}', b'{"place": ["a"]}'])
def test_a_damaged_origin_is_not_known(
    run: Run, cache: Path, tmp_path: Path, damage: bytes
) -> None:
    keep(tmp_path / "model", cache)
    for path in cache.rglob("*.json"):
        if path.name != "config.json":
            path.write_bytes(damage)
    code, out, _ = run("cache")
    assert (code, {row[1] for row in rows(out) if row[0] != "models"}) == (0, {"–"})
    assert run("cache", "--clear", "all")[0] == 0
    assert not files_in(cache)


def test_no_library_of_models_is_imported(cache: Path, tmp_path: Path) -> None:
    keep(tmp_path / "model", cache)
    code = (
        "import sys; sys.argv = ['medusa-kit', 'cache']; from medusa_kit.cli import app;"
        "app(standalone_mode=False);"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "[]"), done.stderr


def test_reading_a_thing_is_its_last_use(cache: Path, tmp_path: Path) -> None:
    keep(tmp_path / "model", cache)
    (check,) = (cache / "checks").iterdir()
    (packed,) = (path for path in (cache / "packed").iterdir() if path.is_dir())
    for path in (check, packed):
        os.utime(path, (0, 0))
    assert json.loads(check.read_text())["found"] == 1, "looking into it is none"
    assert check.stat().st_mtime == 0
    name = short_digest(str(tmp_path / "model"))
    assert Record("checks", name, {"path": str(tmp_path / "model")}).read()
    keep(tmp_path / "model", cache)
    assert packed.stat().st_mtime > 0 < check.stat().st_mtime
