"""`vllm serve` on the loopback interface for as long as a `with` block runs."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

START_SECONDS = 900
STOP_SECONDS = 20
OPTIONS = (
    "--host",
    "127.0.0.1",
    "--dtype",
    "float32",
    "--enforce-eager",
    "--max-model-len",
    "2048",
)
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
    "VLLM_HOST_IP": "127.0.0.1",  # what its processes say to each other stays on this machine
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def stop_on_signals() -> None:
    """End by an exception where a signal would end us: servers are stopped on the way out."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))


@contextlib.contextmanager
def serving(environment: Path, command: Sequence[str], log: Path) -> Iterator[str]:
    """The URL up to /v1 of what `command`, a line that `convert` prints, serves.

    Raises RuntimeError with the log's end where it does not come up.
    """
    if not shutil.which("vllm", path=environment / "bin"):
        raise RuntimeError(f"no vllm in {environment}: make test-vllm builds it")
    port = _free_port()
    whole = [str(environment / "bin" / "vllm"), *command[1:], *OPTIONS, "--port", str(port)]
    print("$", *whole, file=sys.stderr, flush=True)
    settings = {**os.environ, **SETTINGS, "PYTHONPATH": str(environment / "stub")}
    with log.open("w") as stream:
        process = subprocess.Popen(
            whole, env=settings, stdout=stream, stderr=stream, start_new_session=True
        )
    try:
        _wait(process, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        _stop(process)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(1)
    tail = "\n".join(log.read_text().splitlines()[-20:])
    raise RuntimeError(f"vLLM did not start (exit code {process.poll()}); {log} ends:\n{tail}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """All that it started is in its process group, and goes with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
