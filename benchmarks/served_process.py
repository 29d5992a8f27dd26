"""`medusa-kit serve` in a process of its own, for the scripts here."""

import re
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 120


@contextmanager
def served(model, *options):
    """Yields (its process, its URL without /v1). It is stopped by SIGTERM, and must then exit 0."""
    command = [sys.executable, "-m", "medusa_kit", "serve", "--model", model, "--port", "0"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as stderr:
            process = subprocess.Popen([*command, *options], stderr=stderr)
        try:
            yield process, _url(process, log)
            process.send_signal(signal.SIGTERM)
            if process.wait(PATIENCE) != 0:
                raise SystemExit(f"the server ended with status {process.returncode}\n{tail(log)}")
        except BaseException:
            print(tail(log), file=sys.stderr)
            raise
        finally:
            process.kill()
            process.wait()


def _url(process, log):
    while True:
        if found := re.search(r"serving .* at (http\S+)/v1", log.read_text()):
            return found[1]
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
        raise SystemExit(f"the server did not start\n{tail(log)}")


def tail(log):
    return "\n".join(log.read_text().splitlines()[-40:])
