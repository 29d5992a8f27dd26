"""The C++ library: a wheel's own, or built at first use by torch's extension loader and cached;
called through ctypes.

The structures mirror those of matrix.h, recurrent.h, heads.h, copying.h, trees.h, step.h,
draw.h and packing.cpp, field by field.
"""

import ctypes
import os
import platform
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch

from medusa_kit import console
from medusa_kit.errors import ConfigError, check_count, unknown_value
from medusa_kit.infer.cpu.binding.levels import (
    COMPILED,
    FLAGS,
    FOLDER,
    X86,
    digest_of_sources,
    packaged_library,
    suffix_of,
)
from medusa_kit.installing import extra
from medusa_kit.store.builds import make_file_once
from medusa_kit.store.records import extensions_folder

MAX_ROWS = 256
WORK_OF_A_THREAD = 2_000_000  # multiplications: some 30 microseconds
WORK_OF_A_BYTE = 5  # multiplications in the time that a core reads a byte
OFF_SWITCH = "MEDUSA_KIT_NATIVE"  # 0: torch instead of the kernels
ISA_SWITCH = "MEDUSA_KIT_ISA"  # a name of NEEDED; native by default
# what the processor must have: `_has`
NEEDED: dict[str, tuple[str, ...]] = {
    "native": (),
    "plain": (),
    "avx2": ("_is_avx2_supported",),
    "avx-vnni": ("avx_vnni",),
    "avx512": ("_is_avx512_supported",),
    "avx512-vnni": ("_is_avx512_supported", "_is_vnni_supported"),
}


class Matrix(ctypes.Structure):
    _fields_ = (
        ("kind", c_int64), ("outputs", c_int64), ("inputs", c_int64),
        ("data", c_void_p), ("bias", c_void_p), ("digits", c_int64),
    )  # fmt: skip


def with_digits(matrix: Matrix, digits: int) -> Matrix:
    """A matrix of the same weights, for numbers of so many digits of 8 bits (integers.h). Kinds
    that are not multiplied as integers have no digits."""
    same = Matrix.from_buffer_copy(matrix)
    same.digits = digits
    return same


class Layer(ctypes.Structure):
    _fields_ = (
        ("qkv", Matrix), ("out", Matrix), ("gate_up", Matrix), ("down", Matrix),
        ("values", Matrix),
        ("input_norm", c_void_p), ("after_attention_norm", c_void_p),
        ("before_mlp_norm", c_void_p), ("after_mlp_norm", c_void_p),
        ("q_norm", c_void_p), ("k_norm", c_void_p),
        ("rotary", c_int64), ("window", c_int64),
    )  # fmt: skip


class Decoder(ctypes.Structure):
    _fields_ = (
        ("hidden", c_int64), ("mlp", c_int64), ("query_heads", c_int64), ("kv_heads", c_int64),
        ("head_size", c_int64), ("rotary_size", c_int64), ("num_layers", c_int64),
        ("gelu", c_int64), ("norm_epsilon", c_float), ("scale", c_float),
        ("layers", POINTER(Layer)), ("final_norm", c_void_p), ("output", Matrix),
    )  # fmt: skip


class Step(ctypes.Structure):
    _fields_ = (
        ("batch", c_int64), ("nodes", c_int64), ("cache_rows", c_int64), ("slots", c_int64),
        ("embeddings", c_void_p), ("rotary", c_void_p),
        ("rotary_length", c_int64), ("positions", c_void_p),
        ("starts", c_void_p), ("places", c_void_p), ("lengths", c_void_p),
        ("depths", c_void_p), ("sees", c_void_p), ("cache", c_void_p),
        ("num_kept", c_int64), ("kept", c_void_p),
        ("hidden_out", c_void_p), ("logits", c_void_p),
        ("num_likeliest", c_int64), ("likeliest", c_void_p), ("half_cache", c_int64),
        ("num_watched", c_int64), ("watched", c_void_p), ("watched_out", c_void_p),
    )  # fmt: skip


class Head(ctypes.Structure):
    _fields_ = (
        ("blocks", POINTER(Matrix)), ("num_blocks", c_int64), ("num_read", c_int64),
        ("projection", Matrix),
    )  # fmt: skip


class RecurrentBlock(ctypes.Structure):
    _fields_ = (("gate_up", Matrix), ("down", Matrix), ("norm", c_void_p))


class Recurrent(ctypes.Structure):
    _fields_ = (
        ("mlp", c_int64), ("num_blocks", c_int64),
        ("epsilon", c_float), ("unit_epsilon", c_float),
        ("input", Matrix), ("blocks", POINTER(RecurrentBlock)), ("gains", c_void_p),
    )  # fmt: skip


class Heads(ctypes.Structure):
    _fields_ = (
        ("hidden", c_int64), ("embedding", c_int64),
        ("one_projection", c_int64),
        ("factor", c_float), ("cap", c_float),
        ("heads", POINTER(Head)), ("embeddings", Matrix), ("column_ids", c_void_p),
        ("recurrent", POINTER(Recurrent)),
    )  # fmt: skip


class Draw(ctypes.Structure):
    _fields_ = (
        ("logits", c_void_p), ("count", c_int64), ("ids", c_void_p), ("temperature", c_float),
        ("top_k", c_int64), ("top_p", c_double), ("min_p", c_double), ("seed", c_uint64),
    )  # fmt: skip


class Guess(ctypes.Structure):
    _fields_ = (
        ("rows", c_int64), ("path_length", c_int64), ("count", c_int64),
        ("head_of_row", c_void_p), ("paths", c_void_p), ("given_of_row", c_void_p),
        ("given", c_void_p), ("temperatures", c_void_p), ("ids", c_void_p), ("scores", c_void_p),
        ("states", c_void_p), ("state_of_row", c_void_p), ("new_states", c_void_p),
        ("draws", POINTER(Draw)), ("num_draws", c_int64),
    )  # fmt: skip


class Fill(ctypes.Structure):
    _fields_ = (
        ("rows", c_int64), ("nodes", c_int64), ("one_pass", c_int64),
        ("parents", c_void_p), ("ranks", c_void_p),
        ("roots", c_void_p), ("given", c_void_p), ("tokens", c_void_p),
        ("draws", POINTER(Draw)), ("num_draws", c_int64),
    )  # fmt: skip


class Text(ctypes.Structure):
    _fields_ = (("tokens", c_void_p), ("length", c_int64))


class Grow(ctypes.Structure):
    _fields_ = (
        ("rows", c_int64), ("nodes", c_int64), ("one_pass", c_int64),
        ("depth", c_int64), ("count", c_int64), ("beam", c_int64),
        ("roots", c_void_p), ("given", c_void_p), ("temperatures", c_void_p),
        ("counts", c_void_p), ("tokens", c_void_p), ("parents", c_void_p),
        ("scores", c_void_p), ("least_kept", c_double), ("least_asked", c_double),
        ("draws", POINTER(Draw)), ("num_draws", c_int64),
        ("texts", POINTER(Text)), ("smoothing", c_void_p), ("num_smoothing", c_int64),
    )  # fmt: skip


class StoredRows(ctypes.Structure):
    _fields_ = (
        ("stored", c_int64), ("kind", c_int64), ("rows", c_int64), ("inputs", c_int64),
        ("from", c_void_p), ("to", c_void_p),
    )  # fmt: skip


@cache
def load_library() -> ctypes.CDLL | None:
    """The library for this machine, or None where it cannot be built; the reason is printed.

    Raises ConfigError where MEDUSA_KIT_ISA is unknown or names what the processor lacks.
    """
    if os.environ.get(OFF_SWITCH) == "0":
        return None
    isa = os.environ.get(ISA_SWITCH) or "native"
    flags = machine_flags(isa)
    packaged = open_packaged(isa)
    if packaged is not None:
        return packaged
    try:
        if platform.system() == "Windows":
            raise OSError("on Windows torch builds with MSVC, which does not know their vectors")
        library = build(flags)
    except Exception as error:  # no compiler, no ninja, no place to write: torch runs the steps
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        console.note(
            f"steps run through torch: the C++ kernels could not be built ({reason}); "
            f"they need g++ or clang++, and ninja ({extra('cpu')})"
        )
        return None
    return declare(library)


def has_integers(library: ctypes.CDLL) -> bool:
    """Whether weights of 4 to 8 bits are multiplied as integers."""
    return bool(library.mk_integers())


def loaded_library() -> ctypes.CDLL | None:
    """The library if something has loaded it; nothing is built."""
    return load_library() if load_library.cache_info().currsize else None


def open_packaged(isa: str) -> ctypes.CDLL | None:
    """A level of the library that came with a wheel, if one did: `isa`, or the best for native."""
    path = packaged_library()
    if not path.exists() or platform.machine() != "x86_64":
        return None
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        console.note(f"{path} cannot be opened ({error}), so the C++ kernels are built")
        return None
    library.mk_best_level.restype = c_char_p
    level = library.mk_best_level().decode() if isa == "native" else isa
    if not library.mk_runs(level.encode()):
        raise _lacking(isa)
    return declare(library, suffix_of(level))


def machine_flags(isa: str) -> tuple[str, ...]:
    """The compiler's flags for an instruction set of NEEDED. Raises ConfigError as load_library."""
    if isa not in NEEDED:
        unset = f"unset {ISA_SWITCH}: the kernels then use all that the processor has"
        raise unknown_value(ISA_SWITCH, isa, NEEDED, unset)
    machine = platform.machine()
    x86 = machine in ("x86_64", "AMD64")
    if NEEDED[isa] and not (x86 and all(_has(name) for name in NEEDED[isa])):
        raise _lacking(isa)
    if isa != "native":
        return (X86[isa],) if x86 else ("-DMK_PLAIN",)
    # Apple's compilers take all that their processors have without a flag.
    return ("-march=native",) if x86 else ("-mcpu=native",) if machine == "aarch64" else ()


def _lacking(isa: str) -> ConfigError:
    return ConfigError(
        f"{ISA_SWITCH} is {isa!r}, which this processor lacks",
        hint=f"unset it, or set {ISA_SWITCH}=plain",
    )


def build(machine_flags: tuple[str, ...]) -> ctypes.CDLL:
    """The library, compiled if need be. One that does not open is built once more: it may come from
    a machine with newer system libraries. A damaged one is not opened: that could end the process.

    Raises OSError and what torch's loader raises.
    """
    name = f"medusa_kit_{digest_of_sources(machine_flags, _processor())}"

    def compile_into(path: Path) -> None:
        from torch.utils import cpp_extension  # and with it setuptools: a tenth of a second

        cpp_extension.load(
            name,
            [str(FOLDER / file) for file in COMPILED],
            extra_cflags=[*FLAGS, *machine_flags],
            extra_ldflags=["-pthread"],
            # A new one: the loader's lock survives a killed process.
            build_directory=str(path.parent),
            is_python_module=False,
        )
        # torch's loader adds a suffix to the name of a library that it has built before.
        next(path.parent.glob("*.so")).rename(path)

    return make_file_once(
        extensions_folder() / name / f"{name}.so",
        "sha256",
        "building the C++ kernels once for this processor",
        compile_into,
        lambda path: ctypes.CDLL(str(path)),
    )


FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {  # result, arguments
    "mk_isa": (c_char_p, ()),
    "mk_integers": (c_int, ()),
    "mk_step": (None, (POINTER(Decoder), POINTER(Step), c_int)),
    "mk_guess": (None, (POINTER(Heads), POINTER(Guess), c_int)),
    "mk_fill": (None, (POINTER(Heads), POINTER(Fill), c_int)),
    "mk_grow": (None, (POINTER(Heads), POINTER(Grow), c_int)),
    "mk_draw": (c_int64, (POINTER(Draw),)),
    "mk_linear": (None, (POINTER(Matrix), c_void_p, c_int, c_void_p, c_int)),
    "mk_rows": (c_int64, (POINTER(Matrix), c_void_p, c_int64, c_float, c_void_p)),
    "mk_stored_properties": (c_int64, (POINTER(StoredRows), c_int)),
    "mk_pack": (None, (POINTER(StoredRows), c_int)),
    "mk_expand": (None, (POINTER(StoredRows), c_int)),
}


def declare(library: ctypes.CDLL, suffix: str = "") -> ctypes.CDLL:
    """Gives its functions their types, and those of a level the names without its suffix."""
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name + suffix)
        function.restype, function.argtypes = result, arguments
        setattr(library, name, function)
    return library


def threads_for(multiplications: int, num_bytes: int = 0) -> int:
    """How many of torch's threads have enough work: each barrier takes microseconds too.

    `num_bytes`: of the weights that are read.
    """
    work = max(multiplications, WORK_OF_A_BYTE * num_bytes)
    return min(_own_threads or torch.get_num_threads(), 1 + work // WORK_OF_A_THREAD)


_own_threads = 0  # set by set_num_threads, or the parent's number after a fork; 0: as torch's


def set_num_threads(count: int) -> None:
    """Let the C++ kernels of this process use `count` threads; by default they use as many as
    torch. torch's own number does not change. Made for forked workers, where torch must use one
    thread and the kernels start with as many as the parent had.

    Raises ConfigError for less than 1.
    """
    global _own_threads
    check_count("the number of threads", count)
    _own_threads = int(count)


def _limit_torch_to_one_thread() -> None:
    """In a forked child torch's OpenMP would wait for ever for the parent's threads; the kernels
    start new ones."""
    global _own_threads
    _own_threads = _own_threads or torch.get_num_threads()
    torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_limit_torch_to_one_thread)


def _has(feature: str) -> bool:
    """Whether the processor has a feature, by torch's name for the test or by Linux's."""
    known = getattr(torch.cpu, feature, None)
    return known() if known else feature in _processor().split()


def _processor() -> str:
    """What `-march=native` depends on, so that machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor()
