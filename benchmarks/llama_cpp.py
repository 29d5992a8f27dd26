"""llama.cpp on the embedded model's GGUF file, beside transformers and this kit, in one run.

    python benchmarks/llama_cpp.py --prompts mt_bench.jsonl --limit 20 -n 128

llama-server is built natively from the sdist `llama-cpp-python` on PyPI, which holds llama.cpp's
source, in a folder that git ignores; it runs on as many threads as torch. Prompts go through every
method in turn (`medusa-kit bench --endpoint`); options that are not named here go to that command.
Draws docs/images/speed.svg from the figures; bench.json beside the build has all of them.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LLAMA_CPP_PYTHON = "0.3.36"
FOLDER = Path("build/llama_cpp")
SERVER = FOLDER / "build/bin/llama-server"
FIGURES = FOLDER / "bench/bench.json"
CHART = Path("docs/images/speed.svg")
NAME = "llama.cpp"
START_SECONDS = 120
CONTEXT = 4096
# How the bench names methods (or how those names end): what the chart says, and whose they are.
BARS = {
    "transformers generate": ("transformers generate", "transformers"),
    "transformers prompt lookup": ("transformers prompt lookup", "transformers"),
    f"endpoint, {NAME}": ("llama.cpp, the same GGUF file", "llama.cpp"),
    "medusa-kit, one node": ("medusa-kit, plain decoding", "medusa-kit"),
    ", medusa": ("medusa-kit, heads", "medusa-kit"),
    ", auto": ("medusa-kit, auto (the default)", "medusa-kit"),
}
COLOURS = {"transformers": "#9aa0a6", "llama.cpp": "#c58f4a", "medusa-kit": "#2f7d6b"}


def build() -> None:
    """llama-server for this processor. Ten minutes on two cores; nothing where it is there."""
    if SERVER.exists():
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    what = f"llama-cpp-python=={LLAMA_CPP_PYTHON}"
    _run(sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:",
         "--dest", FOLDER, what)  # fmt: skip
    with tarfile.open(FOLDER / f"llama_cpp_python-{LLAMA_CPP_PYTHON}.tar.gz") as archive:
        archive.extractall(FOLDER, filter="data")
    source = FOLDER / f"llama_cpp_python-{LLAMA_CPP_PYTHON}" / "vendor/llama.cpp"
    _run("cmake", "-S", source, "-B", FOLDER / "build", "-DCMAKE_BUILD_TYPE=Release",
         "-DGGML_NATIVE=ON", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
         "-DLLAMA_OPENSSL=OFF")  # fmt: skip
    _run("cmake", "--build", FOLDER / "build", "--target", "llama-server",
         "--parallel", str(os.cpu_count() or 1))  # fmt: skip


def _run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr)


@contextmanager
def serve(threads: int) -> Iterator[str]:
    """The URL of llama-server, on the embedded model, one request at a time."""
    from medusa_kit.base.gguf import embedded_gguf

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [SERVER, "--model", embedded_gguf(), "--alias", NAME, "--port", port,
               "--threads", threads, "--ctx-size", CONTEXT, "--parallel", 1]  # fmt: skip
    with (FOLDER / "server.log").open("wb") as log:
        server = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log)
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", server)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait()


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit(f"llama-server did not start; {FOLDER / 'server.log'} says why")


def measure(url: str, options: list[str]) -> dict[str, Any]:
    """The record of one bench of every method, interleaved."""
    _run(sys.executable, "-m", "medusa_kit", "bench", "--drafters", "none,medusa,auto",
         "--peers", "prompt-lookup", "--endpoint", url, "--endpoint-model", NAME,
         "--output", FIGURES.parent, *options)  # fmt: skip
    record: dict[str, Any] = json.loads(FIGURES.read_text(encoding="utf-8"))
    return record


def draw(record: dict[str, Any], path: Path) -> None:
    """Bars of tokens a second, over whole answers: prompts are read, then tokens made."""
    from matplotlib import pyplot

    speeds = {}
    for method in record["methods"]:
        end = next((end for end in BARS if method["name"].endswith(end)), None)
        if end is not None and "not_run" not in method:
            speeds[end] = method["tokens_per_second"]
    shown = [end for end in BARS if end in speeds]
    pyplot.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "medusa-kit", "font.size": 11})
    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(shown) + 0.8))
    for place, end in enumerate(shown):
        axes.barh(place, speeds[end], color=COLOURS[BARS[end][1]], height=0.7)
        axes.text(speeds[end], place, f" {speeds[end]:.0f}", va="center")
    axes.set_yticks(range(len(shown)), [BARS[end][0] for end in shown])
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("tokens/s, SmolLM2-135M-Instruct, two CPU cores")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", facecolor="white", metadata={"Date": None})


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build-only", action="store_true", help="build llama-server, no more")
    parser.add_argument("--draw-only", action="store_true", help="draw the last figures again")
    ours, options = parser.parse_known_args()
    if ours.draw_only:
        if not FIGURES.is_file():
            raise SystemExit(f"no figures at {FIGURES}; run this without --draw-only first")
        draw(json.loads(FIGURES.read_text(encoding="utf-8")), CHART)
        return
    build()
    if not ours.build_only:
        with serve(torch.get_num_threads()) as url:
            draw(measure(url, options), CHART)


if __name__ == "__main__":
    main()
