"""Decodes with each level of the installed library. Run by check.py, without a compiler."""

import ctypes
import os
import sys
from pathlib import Path

import torch
from support.kernels.packed_weights import BLOCKS, weights_of
from support.small_engines import build_engine, random_prompt
from support.tiny_models import tiny_model

import medusa_kit
from medusa_kit.base.model import wrap_model
from medusa_kit.errors import ConfigError
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.binding.levels import X86, packaged_library
from medusa_kit.infer.cpu.packed.packing import pack

WIDE = {"hidden_size": 96, "head_dim": 16, "num_attention_heads": 6}
PROMPT = random_prompt(9, seed=1)


def plain_tokens() -> list[int]:
    ids_1T = torch.tensor([PROMPT])
    answer = tiny_model("llama", **WIDE).generate(
        ids_1T, attention_mask=torch.ones_like(ids_1T), max_new_tokens=24, do_sample=False
    )
    return answer[0, len(PROMPT) :].tolist()


def check_level(level: str, expected: list[int]) -> str:
    """The instruction set that ran."""
    os.environ[kernels.ISA_SWITCH] = level
    kernels.load_library.cache_clear()
    library = kernels.load_library()
    assert library is not None
    assert Path(library._name) == packaged_library()
    isa = library.mk_isa().decode()
    engine = build_engine(wrap_model(tiny_model("llama", **WIDE), None, "tiny"))
    result = engine.generate(PROMPT, max_new_tokens=24)
    assert result.stats.steps_run_by.startswith(f"C++ ({isa}"), result.stats.steps_run_by
    assert result.token_ids == expected
    weights, x = weights_of("int4"), torch.randn(5, 64)
    matrix, out = pack(weights, None, BLOCKS["int4"]), torch.empty(5, 37)
    library.mk_linear(ctypes.byref(matrix.struct), x.data_ptr(), 5, out.data_ptr(), 2)
    assert torch.allclose(out, x @ weights.T, atol=1e-3)
    return isa


def main() -> int:
    assert Path(medusa_kit.__file__).is_relative_to(sys.prefix), medusa_kit.__file__
    assert packaged_library().exists(), "the wheel has no kernels of these sources"
    expected = plain_tokens()
    for level in X86:
        try:
            kernels.machine_flags(level)
        except ConfigError as error:
            print(f"{level}: not tested ({error})")
            continue
        assert check_level(level, expected) == level
        print(f"{level}: the tokens of plain transformers")
    print(f"native: {check_level('native', expected)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
