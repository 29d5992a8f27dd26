"""The two versions: the old commit's files in a temporary folder, and a worker process of each."""

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from medusa_kit.errors import ConfigError

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("worker.py")


@contextmanager
def checked_out(version: str, repository: Path = ROOT) -> Iterator[Path]:
    """A folder with the files of a commit; a folder stands for itself. Raises ConfigError."""
    if Path(version, "medusa_kit").is_dir():
        yield Path(version).resolve()
        return
    command = ["git", "-C", str(repository), "archive", "--format=tar", version]
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        raise ConfigError(
            f"OLD is {version!r}, which git doesn't know: {done.stderr.decode().strip()}",
            hint="name a commit, or a folder that has medusa_kit",
        )
    with tempfile.TemporaryDirectory(prefix="speed-gate-") as folder:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as files:
            files.extractall(folder, filter="data")
        yield Path(folder)


class Worker:
    """A version's process; what it logs goes to a file."""

    def __init__(
        self, folder: Path, cache: Path, own: Mapping[str, str], log: Path, file: Path = WORKER
    ) -> None:
        environment = {**os.environ, "MEDUSA_KIT_CACHE": str(cache), "PYTHONPATH": str(folder)}
        self._log = log.open("a", encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, str(file)], env=environment | own, cwd="/", text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
        )  # fmt: skip

    def ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Its answer; `error` in place of figures where the command failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(command), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            line = ""
        else:
            line = self._process.stdout.readline()
        if not line:
            return {"error": f"the process ended with {self._process.wait()}"}
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._log.close()
