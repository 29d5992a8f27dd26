"""vLLM on the same shape, where it is installed: a process of its own, with a time limit.

Its weights are random too (`load_format="dummy"`), so its text means nothing and its speed does.
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from medusa_kit.bench.gpu.decoding import ANSWER, PROMPT
from medusa_kit.bench.gpu.runner import Part
from medusa_kit.bench.gpu.shapes import Shape, config_of
from medusa_kit.bench.gpu.workbench import Cannot, Workbench
from medusa_kit.errors import MedusaKitError

LIMIT_SECONDS = 150.0
MARK = "medusa-kit: "  # before the line of figures, which stands among vLLM's own lines
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
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise Cannot(f"vLLM took more than {LIMIT_SECONDS:.0f} s") from error
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise MedusaKitError(f"vLLM ended with {done.returncode} and said: {last}")
    return dict(json.loads(lines[-1].removeprefix(MARK)))


def vllm_part(shape: Shape) -> Part:
    name = f"{shape.name}: vLLM, greedy"
    return Part(name, "answers", partial(plain_decoding, shape), LIMIT_SECONDS, shape.name)
