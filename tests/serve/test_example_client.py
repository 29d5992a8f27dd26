"""examples/openai_client.py, against a live server."""

import subprocess
import sys

from support.debug_model import ROOT
from support.serving.live_server import LiveServer


def test_it_streams_calls_and_goes_on(live: LiveServer) -> None:
    command = [sys.executable, str(ROOT / "examples/openai_client.py"), f"{live.url}/v1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "tokens\nit calls weather {'city': '" in done.stdout
