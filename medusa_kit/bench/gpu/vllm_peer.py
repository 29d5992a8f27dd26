"""vLLM on the same shape, where it is installed, in its own process with a time limit.

Its weights are random too (`load_format="dummy"`), so only its speed means anything.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from medusa_kit.bench.gpu.decoding import ANSWER, PROMPT
from medusa_kit.bench.gpu.runner import Part
from medusa_kit.bench.gpu.shapes import Shape, config_of
from medusa_kit.bench.gpu.workbench import Cannot, Workbench
from medusa_kit.errors import MedusaKitError

LIMIT_SECONDS = 150.0
MARK = "medusa-kit: "  # marks the line of figures among vLLM's own
SCRIPT = """
import json, sys, time
from vllm import LLM, SamplingParams
folder, prompt, answer, mark = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
llm = LLM(folder, load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True,
          max_model_len=4096, gpu_memory_utilization=0.8)
rule = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False)
seconds = []
for _ in range(3):
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": list(range(5, 5 + prompt))}], rule, use_tqdm=False)
    seconds.append(time.perf_counter() - start)
print(mark + json.dumps({"tokens": answer, "tokens_per_second": answer / min(seconds[1:])}))
"""


def plain_decoding(shape: Shape, bench: Workbench) -> dict[str, Any]:
    """Tokens a second, greedy, one request. Raises Cannot where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise Cannot("vLLM is not installed")
    if bench.device.type != "cuda":
        raise Cannot("vLLM is compared on a GPU only")
    bench.clear()
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(shape).to_dict() | {"architectures": ["LlamaForCausalLM"]}
        (Path(folder) / "config.json").write_text(json.dumps(config, default=str))
        command = [sys.executable, "-c", SCRIPT, folder, str(PROMPT), str(ANSWER), MARK]
        try:
            code, said, errors = _finished(command, _environment(bench.device), LIMIT_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise Cannot(f"vLLM took more than {LIMIT_SECONDS:.0f} s") from error
    lines = [line for line in said.splitlines() if line.startswith(MARK)]
    if code or not lines:
        last = (errors.strip().splitlines() or ["nothing"])[-1]
        raise MedusaKitError(f"vLLM ended with exit code {code}: {last}")
    return dict(json.loads(lines[-1].removeprefix(MARK)))


def _finished(
    command: Sequence[str], environment: Mapping[str, str], seconds: float
) -> tuple[int, str, str]:
    """(exit code, stdout, stderr). Processes that it started are ended in any case, since they
    would keep the device's memory. Raises subprocess.TimeoutExpired."""
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            said, errors = process.communicate(timeout=seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said, errors


def _environment(device: torch.device) -> dict[str, str]:
    """No network, and only the measured device visible."""
    number = device.index or 0
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    own = str(number) if seen is None else seen.split(",")[number]
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    return {**os.environ, **offline, "CUDA_VISIBLE_DEVICES": own}


def vllm_part(shape: Shape) -> Part:
    name = f"{shape.name}: vLLM, greedy"
    return Part(name, "answers", partial(plain_decoding, shape), LIMIT_SECONDS, shape.name)
