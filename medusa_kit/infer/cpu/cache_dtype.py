"""Keys and values stored in 16 bits, a lossy option for steps in C++.

Each number is rounded as it is written (the largest float16 for what is larger) and expanded as it
is read; everything is computed in float32. The self-check at load runs before, in float32, since it
is about trees and not about rounding.
"""

import torch

from medusa_kit import console
from medusa_kit.errors import ConfigError
from medusa_kit.infer.cpu.verifier import NativeVerifier
from medusa_kit.infer.verifier import Verifier
from medusa_kit.settings.engine import allowed, check_value

FLOAT32, FLOAT16 = allowed("cache")


def store_cache_as(cache: str, verifier: Verifier) -> None:
    """Let caches made from now on store keys and values so. Raises ConfigError where steps do not
    run in C++."""
    check_value("cache", cache)
    if cache == FLOAT32:
        return
    if not isinstance(verifier, NativeVerifier):
        raise ConfigError(
            f"cache {cache} needs steps in C++; here they are run by {verifier.steps_run_by}",
            hint="leave out --cache, or use a CPU, --dtype float32 and a model whose steps run in "
            "C++",
        )
    verifier.cache_dtype = torch.float16
    console.note("the KV cache is stored in float16, which is LOSSY")


def refuse_float16_cache(verifier: Verifier, requirement: str) -> None:
    """Raises ConfigError for a KV cache in 16 bits: `requirement` must be the model's own."""
    if verifier.cache_dtype is not None:
        raise ConfigError(
            f"the KV cache is stored in {cache_of(verifier)}, which is lossy; {requirement}",
            hint=f"use --cache {FLOAT32}",
        )


def cache_of(verifier: Verifier) -> str:
    """The number format of a verifier's caches, in the words of the option."""
    return FLOAT16 if verifier.cache_dtype == torch.float16 else FLOAT32
