"""macOS and Windows, as far as they can be told apart from Linux here: a base loads and decodes."""

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

import medusa_kit
from medusa_kit.base.model import BaseModel
from medusa_kit.errors import ConfigError
from medusa_kit.infer import mkl_linear as packed_linear
from medusa_kit.infer.cpu.binding import kernels

SYSTEMS = {"Darwin": "arm64", "Windows": "AMD64"}


@pytest.fixture
def no_library() -> Iterator[None]:
    """The C++ library is looked for anew, and again by the next test."""
    kernels.load_library.cache_clear()
    yield
    kernels.load_library.cache_clear()


@pytest.fixture(params=SYSTEMS)
def system(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    no_library: None,
    chat_base: BaseModel,
    tmp_path: Path,
) -> str:
    """That system's answers: nothing of Linux, and no compiler that torch can drive.

    `chat_base`: what transformers imports late is imported before.
    """
    name: str = request.param
    read_text = Path.read_text

    def without_proc(path: Path, *args: Any, **options: Any) -> str:
        if path.is_relative_to("/proc"):
            raise FileNotFoundError(path)
        return read_text(path, *args, **options)

    def sysconf(asked: str) -> int:
        raise ValueError("unrecognized configuration name")

    def no_compiler(*args: Any, **options: Any) -> None:
        assert name != "Windows", "MSVC would fail in a hundred lines"
        raise RuntimeError("Command '['which', 'c++']' returned non-zero exit status 1.")

    monkeypatch.delenv(kernels.ISA_SWITCH, raising=False)
    monkeypatch.setattr(platform, "system", lambda: name)
    monkeypatch.setattr(platform, "machine", lambda: SYSTEMS[name])
    monkeypatch.setattr(Path, "read_text", without_proc)
    monkeypatch.setattr(cpp_extension, "load", no_compiler)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "kernels"))
    if name == "Windows":
        monkeypatch.delattr(os, "sysconf")
    else:
        monkeypatch.setattr(os, "sysconf", sysconf)
    return name


def test_a_base_loads_and_decodes(
    system: str, chat_base: BaseModel, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = medusa_kit.load("debug-tiny", heads="untrained", drafter="medusa", device="cpu")
    ids = [40, 41, 42]
    result = engine.generate(ids, max_new_tokens=12)
    ids_1T = torch.tensor([ids])
    plain = chat_base.model.generate(
        ids_1T, attention_mask=torch.ones_like(ids_1T), max_new_tokens=12, do_sample=False
    )
    assert result.token_ids == plain[0, len(ids) :].tolist()
    assert result.stats.steps_run_by.startswith("torch")
    said = capsys.readouterr().err
    assert ("MSVC" if system == "Windows" else "non-zero exit status") in said
    assert "they need g++ or clang++" in said


def test_free_memory_needs_nothing_of_linux(system: str) -> None:
    assert 1_000_000 < packed_linear.free_memory() < 10**14


# The instruction set of the kernels.


def test_flags_are_those_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "AMD64")
    assert kernels.machine_flags("native") == ("-march=native",)
    assert kernels.machine_flags("plain") == ("-march=x86-64",)
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert kernels.machine_flags("native") == ()  # Apple's compilers take all without a flag
    assert kernels.machine_flags("plain") == ("-DMK_PLAIN",)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert kernels.machine_flags("native") == ("-mcpu=native",)
    with pytest.raises(ConfigError, match="'avx2', which this processor lacks"):
        kernels.machine_flags("avx2")


def test_an_instruction_set_that_the_processor_lacks_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    assert kernels.machine_flags("avx512") == ("-march=skylake-avx512",)
    with pytest.raises(ConfigError, match="'avx512-vnni', which this processor lacks"):
        kernels.machine_flags("avx512-vnni")
    monkeypatch.setattr(kernels, "_processor", lambda: "flags : fpu avx2 avx_vnni")
    assert kernels.machine_flags("avx-vnni") == ("-march=alderlake",)
    monkeypatch.setattr(kernels, "_processor", lambda: "flags : fpu avx2 avx512_vnni")
    with pytest.raises(ConfigError, match="'avx-vnni', which this processor lacks"):
        kernels.machine_flags("avx-vnni")


def test_the_variable_chooses_the_flags(
    monkeypatch: pytest.MonkeyPatch, no_library: None, nothing_packaged: None
) -> None:
    seen: list[tuple[str, ...]] = []

    def build(flags: tuple[str, ...]) -> str:
        seen.append(flags)
        raise OSError("seen")

    monkeypatch.setattr(kernels, "build", build)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for value in ("plain", ""):
        monkeypatch.setenv(kernels.ISA_SWITCH, value)
        assert kernels.load_library() is None
        kernels.load_library.cache_clear()
    assert seen == [("-march=x86-64",), ("-march=native",)]
    monkeypatch.setenv(kernels.ISA_SWITCH, "avx3")
    with pytest.raises(
        ConfigError, match="MEDUSA_KIT_ISA 'avx3' is unknown; expected one of"
    ) as caught:
        kernels.load_library()
    assert "did you mean avx2?" in str(caught.value.hint)


def test_files_are_read_as_utf_8_whatever_the_system_prefers(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_bytes("model: größe\n".encode())
    code = (
        "import sys; from pathlib import Path; from medusa_kit.settings.schema import read_yaml; "
    )
    code += "print(ascii(read_yaml(Path(sys.argv[1]), 'file')))"
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, path], env={**os.environ, **plain}, capture_output=True,
        check=False, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "{'model': 'gr\\xf6\\xdfe'}\n"
