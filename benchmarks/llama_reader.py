"""Logits of llama.cpp, through the package `llama-cpp-python`.

LLAMA_CPP_LIB_PATH names the folder of a build of its library, where it isn't the package's own.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

PACKAGE = "llama_cpp"
HERE = Path(__file__).resolve().parent


def package() -> ModuleType:
    """The package: a script in this folder has its name."""
    elsewhere = [place for place in sys.path if Path(place).resolve() != HERE]
    spec = PathFinder.find_spec(PACKAGE, elsewhere)
    if spec is None or spec.loader is None:
        raise SystemExit("llama-cpp-python is not installed\nhint: pip install llama-cpp-python")
    module = sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class LlamaReader:
    """Reads texts of up to `context` tokens with a GGUF file."""

    def __init__(self, gguf: Path | None, context: int, threads: int) -> None:
        self.model: Any = package().Llama(
            str(gguf), n_ctx=context, n_batch=context, n_threads=threads, n_threads_batch=threads,
            logits_all=True, verbose=False,
        )  # fmt: skip

    def read(self, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        """logits_TV: after the prompt and after each token of the answer but the last."""
        text = [*prompt, *answer[:-1]]
        self.model.reset()
        self.model.eval(text)
        return torch.from_numpy(self.model.scores[len(prompt) - 1 : len(text)])
