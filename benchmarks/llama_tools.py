"""llama.cpp's own programs: how they are built, started, and what their output says.

The sdist `llama-cpp-python` on PyPI holds llama.cpp's source. It is built natively, in a folder
that git ignores.
"""

import json
import os
import re
import socket
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from process_cost import Cost, cost_of

LLAMA_CPP_PYTHON = "0.3.36"
FOLDER = Path("build/llama_cpp")
PROGRAMS = FOLDER / "build/bin"
TARGETS = ("llama-server", "llama-bench", "llama-cli")
NAME = "llama.cpp"
START_SECONDS = 120
CONTEXT = 4096
NANO = 1e-9
# What llama-bench says of itself, the machine and how it ran; the rest is about a single test.
ABOUT = ("build_commit", "build_number", "cpu_info", "backends", "model_type", "model_size",
         "model_n_params", "n_batch", "n_ubatch", "n_threads", "type_k", "type_v", "flash_attn",
         "repack", "load_mode")  # fmt: skip


def build(targets: Sequence[str] = TARGETS) -> None:
    """The programs, for this processor. 15 minutes on two cores; nothing where they are there."""
    missing = [target for target in targets if not (PROGRAMS / target).exists()]
    if not missing:
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    source = FOLDER / f"llama_cpp_python-{LLAMA_CPP_PYTHON}" / "vendor/llama.cpp"
    if not source.is_dir():
        _download()
    _run("cmake", "-S", source, "-B", FOLDER / "build", "-DCMAKE_BUILD_TYPE=Release",
         "-DGGML_NATIVE=ON", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
         "-DLLAMA_OPENSSL=OFF")  # fmt: skip
    _run("cmake", "--build", FOLDER / "build", "--target", *missing,
         "--parallel", str(os.cpu_count() or 1))  # fmt: skip


def _download() -> None:
    _run(sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python",
         "--dest", FOLDER, f"llama-cpp-python=={LLAMA_CPP_PYTHON}")  # fmt: skip
    with tarfile.open(FOLDER / f"llama_cpp_python-{LLAMA_CPP_PYTHON}.tar.gz") as archive:
        archive.extractall(FOLDER, filter="data")


def _run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr)


@dataclass(frozen=True)
class BenchRun:
    """One test of llama-bench: tokens of a forward or an answer, and the seconds of each repeat."""

    tokens: int
    seconds: list[float]
    about: dict[str, Any]


def bench_command(
    gguf: Path, threads: int, *, prompt: int = 0, new: int = 0, depth: int = 0, repeats: int = 1
) -> list[str]:
    """Reads `prompt` tokens, or makes `new` ones, behind `depth` others."""
    counts = {"-t": threads, "-p": prompt, "-n": new, "-d": depth, "-r": repeats}
    flags = [str(part) for pair in counts.items() for part in pair]
    return [str(PROGRAMS / "llama-bench"), "-m", str(gguf), "-o", "json", *flags]


def read_bench(text: str) -> BenchRun:
    """From the JSON of a single test. Raises ValueError for anything else."""
    try:
        (test,) = json.loads(text)
        seconds = [NANO * taken for taken in test["samples_ns"]]
        tokens = int(test["n_prompt"]) + int(test["n_gen"])
        about = {name: test[name] for name in ABOUT if name in test}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"not one test of llama-bench: {text[:200]!r}") from error
    if not tokens or not seconds or min(seconds) <= 0:
        raise ValueError(f"llama-bench timed nothing: {tokens} tokens, seconds {seconds}")
    return BenchRun(tokens, seconds, about)


def run_bench(gguf: Path, threads: int, **counts: int) -> BenchRun:
    """Raises RuntimeError where it fails, ValueError for output that is not understood."""
    return read_bench(cost_of(bench_command(gguf, threads, **counts)).output)


def ask(gguf: Path, threads: int, message: str, new: int, piped: bool = False) -> Cost:
    """One answer of llama-cli, in a process of its own. The message is an argument or `piped` to
    its standard input; its banner and the echo of the message are no output of the model."""
    command = [PROGRAMS / "llama-cli", "--model", gguf, "--threads", threads, "--ctx-size", CONTEXT,
               "--temp", 0, "--predict", new, "--single-turn", "--ignore-eos", "--simple-io",
               "--no-show-timings"]  # fmt: skip
    if piped:
        return cost_of(command, input=f"{message}\n", after="\n> ")
    return cost_of([*command, "--prompt", message], after=f"\n> {message}\n")


@contextmanager
def serve(gguf: Path, threads: int, *options: str, name: str = NAME) -> Iterator[str]:
    """The URL of llama-server, one request at a time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [PROGRAMS / "llama-server", "--model", gguf, "--alias", name, "--port", port,
               "--threads", threads, "--ctx-size", CONTEXT, "--parallel", 1, *options]  # fmt: skip
    path = FOLDER / f"{re.sub('[^-.,A-Za-z0-9]+', '_', name)}.log"
    with path.open("wb") as log:
        server = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log)
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", server, path)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait()


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"llama-server did not start; {log} says why")


def speculation_options(kind: str) -> Sequence[str]:
    """Of llama-server, for one of its kinds of n-gram speculation."""
    return ("--spec-type", kind)
