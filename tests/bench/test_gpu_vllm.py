"""The process that runs vLLM, with a stand-in for its script."""

import importlib.util
import os
import select
from typing import Any

import pytest
import torch

from medusa_kit.bench.gpu import vllm_peer
from medusa_kit.bench.gpu.shapes import SMOLLM2_135M, tiny
from medusa_kit.bench.gpu.workbench import Cannot, Workbench
from medusa_kit.errors import MedusaKitError

TINY = tiny(SMOLLM2_135M)
# A worker of its own, as vLLM has, that outlives the process; it holds the other end of a pipe.
WORKER = """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False)
"""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Workbench:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: True if name == "vllm" else found(name)
    )
    one = Workbench(torch.device("cuda", 1), True, lambda name: {})
    monkeypatch.setattr(one, "clear", lambda: None)
    return one


def decoding(bench: Workbench, monkeypatch: pytest.MonkeyPatch, script: str) -> dict[str, Any]:
    monkeypatch.setattr(vllm_peer, "SCRIPT", script)
    return vllm_peer.plain_decoding(TINY, bench)


@pytest.mark.parametrize(
    ("end", "raised"),
    [("time.sleep(600)", Cannot), ("sys.exit(3)", MedusaKitError)],
    ids=["too slow", "an error"],
)
def test_its_workers_end_with_it(
    end: str, raised: type[Exception], bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe()
    os.set_inheritable(write, True)
    monkeypatch.setattr(vllm_peer, "LIMIT_SECONDS", 1.0)
    popen = vllm_peer.subprocess.Popen
    monkeypatch.setattr(
        vllm_peer.subprocess, "Popen", lambda *a, **k: popen(*a, **{**k, "pass_fds": (write,)})
    )
    with pytest.raises(raised):
        decoding(bench, monkeypatch, f"import time\n{WORKER}\n{end}")
    os.close(write)
    ended, _, _ = select.select([read], [], [], 20)
    assert ended, "the pipe has an end only when nobody is left to write"
    os.close(read)


@pytest.mark.parametrize(("seen", "own"), [(None, "1"), ("4,6", "6")])
def test_it_sees_the_measured_device_alone_and_no_network(
    seen: str | None, own: str, bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seen is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    script = """
import json, os, sys
names = ("CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS")
print("some line of its own")
print(sys.argv[4] + json.dumps([[name, os.environ.get(name)] for name in names]))
"""
    found = decoding(bench, monkeypatch, script)
    assert found == {
        "CUDA_VISIBLE_DEVICES": own, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip


def test_what_it_said_last_is_the_reason(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys; print('no memory', file=sys.stderr); sys.exit(2)"
    with pytest.raises(MedusaKitError, match="vLLM ended with exit code 2: no memory"):
        decoding(bench, monkeypatch, script)
