"""`--nproc N`: the same command in N processes on this machine.

Several machines, or other launchers: `torchrun` and `deepspeed` set the same variables (RANK,
LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and start `medusa-kit train` themselves.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from medusa_kit import console
from medusa_kit.errors import ConfigError

POLL_SECONDS = 0.2
GRACE_SECONDS = 20.0  # between asking the others to stop and making them


def launch(arguments: Sequence[str], processes: int) -> int:
    """Run `medusa-kit ARGUMENTS` in so many processes; the exit code of the first that failed.

    When one dies, the others are stopped: they would wait for it for ever. Raises ConfigError when
    a launcher is at work already.
    """
    if "WORLD_SIZE" in os.environ and int(os.environ["WORLD_SIZE"]) > 1:
        raise ConfigError(
            f"--nproc {processes} inside a launcher that started {os.environ['WORLD_SIZE']} "
            "processes",
            hint="leave --nproc to torchrun or deepspeed, or start medusa-kit without them",
        )
    port = _free_port()
    workers = [_start(arguments, rank, processes, port) for rank in range(processes)]
    try:
        code = _first_failure(workers)
    except KeyboardInterrupt:  # the terminal sends it to the workers too: they save and stop
        for worker in workers:
            worker.wait()
        raise
    finally:
        _stop(workers)
    return code


def _start(
    arguments: Sequence[str], rank: int, processes: int, port: int
) -> "subprocess.Popen[bytes]":
    places = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": processes,
        "LOCAL_WORLD_SIZE": processes,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    threads = max(1, (os.cpu_count() or 1) // processes)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    environment |= {name: str(value) for name, value in places.items()}
    return subprocess.Popen([sys.executable, "-m", "medusa_kit", *arguments], env=environment)


def _first_failure(workers: "Sequence[subprocess.Popen[bytes]]") -> int:
    while True:
        codes = [worker.poll() for worker in workers]
        for rank, code in enumerate(codes):
            if code:
                killed = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
                console.warn(f"process {rank} of {len(workers)} {killed}; the others are stopped")
                return code if code > 0 else 1
        if all(code == 0 for code in codes):
            return 0
        time.sleep(POLL_SECONDS)


def _stop(workers: "Sequence[subprocess.Popen[bytes]]") -> None:
    for worker in workers:
        if worker.poll() is None:
            worker.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    for worker in workers:
        try:
            worker.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
