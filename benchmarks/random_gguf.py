"""Writes a GGUF file of a Llama of any shape, whose blocks are random: for speed and memory only.

    python benchmarks/random_gguf.py 8B random-8b.gguf
    python benchmarks/random_gguf.py 1B random-1b.gguf --type Q8_0 --layers 4

Speed and memory do not depend on the values. Blocks are such that activations and logits have an
ordinary size. The tokenizer is the embedded model's, cut or padded to the vocabulary, so that this
kit, transformers and llama.cpp load the file. Q4_K_M is llama.cpp's mix of that name. Tensors are
written as they are made, a few MB at a time.
"""

import argparse
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from medusa_kit.base.gguf import embedded_gguf
from medusa_kit.files import atomic_write

CHUNK_BYTES = 4 << 20
LOGITS_SPREAD = 3.0
MIX = "Q4_K_M"
UNUSED = 5  # a kind of token
TEXTS = ("general.name", "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.chat_template")
IDS = ("bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id")


@dataclass(frozen=True)
class Shape:
    """A Llama's. The presets are those of Llama 3.2 1B and 3B and Llama 3.1 8B."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    tied: int  # whether the output embedding is the input's: 1 or 0
    context: int = 8192


PRESETS = {
    "1B": Shape(16, 2048, 8192, 32, 8, 64, 128256, 1),
    "3B": Shape(28, 3072, 8192, 24, 8, 128, 128256, 1),
    "8B": Shape(32, 4096, 14336, 32, 8, 128, 128256, 0),
}
# Type -> where a block's scale is; where its minimum's is (None: it has none); how many scales that
# must be for weights whose mean is 0.
SCALES: dict[str, tuple[int, int | None, float]] = {
    "Q4_0": (0, None, 0.0), "Q4_1": (0, 2, -7.5), "Q5_0": (0, None, 0.0), "Q5_1": (0, 2, -15.5),
    "Q8_0": (0, None, 0.0), "Q2_K": (80, 82, 1.5), "Q3_K": (108, None, 0.0), "Q4_K": (0, 2, 7.5),
    "Q5_K": (0, 2, 15.5), "Q6_K": (208, None, 0.0), "IQ4_NL": (0, None, 0.0),
    "IQ4_XS": (0, None, 0.0),
}  # fmt: skip
FLOATS = ("F32", "F16", "BF16")


def random_blocks(kind: str, count: int, spread: float, rng: np.random.Generator) -> np.ndarray:
    """[count, bytes of a block] whose weights have mean 0 and standard deviation `spread`.

    For F32, F16 and BF16 a block is one number.
    """
    if kind in FLOATS:
        numbers = rng.standard_normal(count, dtype=np.float32) * np.float32(spread)
        halves = numbers.astype(np.float16) if kind == "F16" else numbers
        raw = halves.view(np.uint8).reshape(count, -1)
        return raw[:, 2:] if kind == "BF16" else raw
    return _filled(kind, count, spread / _spread_of_one(kind), rng)


def _filled(kind: str, count: int, scale: float, rng: np.random.Generator) -> np.ndarray:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    _, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (count, size), dtype=np.uint8)
    if kind == "Q2_K":  # a group's minimum belongs to its scale, or its weights have a mean
        raw[:, :16] = (raw[:, :16] & 15) * 17
    if kind in ("Q4_K", "Q5_K"):
        raw[:, 8:12] = raw[:, 4:8]
        raw[:, 12:16] = (raw[:, 12:16] & 15) * 17
    at, minimum_at, share = SCALES[kind]
    scales = (scale * rng.uniform(0.8, 1.25, (count, 1))).astype(np.float16)
    raw[:, at : at + 2] = scales.view(np.uint8)
    if minimum_at is not None:
        minima = (scales.astype(np.float32) * share).astype(np.float16)
        raw[:, minimum_at : minimum_at + 2] = minima.view(np.uint8)
    return raw


_spreads: dict[str, float] = {}


def _spread_of_one(kind: str) -> float:
    """The standard deviation of weights in blocks whose scales are about 1."""
    from gguf import GGMLQuantizationType, dequantize

    if kind not in _spreads:
        sample = _filled(kind, 512, 1.0, np.random.default_rng(0))
        _spreads[kind] = float(dequantize(sample, GGMLQuantizationType[kind]).std())
    return _spreads[kind]


def tensors(shape: Shape, mix: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> its shape, rows first, and the type of its blocks. Norms are F32."""
    usual, finer = ("Q4_K", "Q6_K") if mix == MIX else (mix, mix)
    embedding = (shape.vocab, shape.hidden)
    found: dict[str, tuple[tuple[int, ...], str]] = {
        "token_embd.weight": (embedding, finer if shape.tied else usual)
    }
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    for layer in range(shape.layers):
        some = finer if _more_bits(layer, shape.layers) else usual
        found |= {
            f"blk.{layer}.{name}.weight": what
            for name, what in {
                "attn_norm": ((shape.hidden,), "F32"),
                "attn_q": ((queries, shape.hidden), usual),
                "attn_k": ((keys, shape.hidden), usual),
                "attn_v": ((keys, shape.hidden), some),
                "attn_output": ((shape.hidden, queries), usual),
                "ffn_norm": ((shape.hidden,), "F32"),
                "ffn_gate": ((shape.mlp, shape.hidden), usual),
                "ffn_up": ((shape.mlp, shape.hidden), usual),
                "ffn_down": ((shape.hidden, shape.mlp), some),
            }.items()
        }
    found["output_norm.weight"] = ((shape.hidden,), "F32")
    return found if shape.tied else {**found, "output.weight": (embedding, finer)}


def _more_bits(layer: int, layers: int) -> bool:
    """llama.cpp's rule for the layers whose values and down projections get more bits."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def write(path: Path, shape: Shape, mix: str = MIX, seed: int = 0) -> None:
    """Write the file, by a temporary name."""
    import gguf

    logging.getLogger("gguf.gguf_writer").setLevel(logging.WARNING)
    wanted = tensors(shape, mix)
    with atomic_write(path) as temporary:
        writer = gguf.GGUFWriter(temporary, "llama")
        _add_metadata(writer, shape)
        _add_tokenizer(writer, gguf.GGUFReader(str(embedded_gguf())), shape.vocab)
        for name, (dims, kind) in wanted.items():
            number = gguf.GGMLQuantizationType[kind]
            row = _row_bytes(name, dims[-1], kind)
            size = row * (dims[0] if len(dims) == 2 else 1)
            raw_dims = (*dims[:-1], row)
            writer.add_tensor_info(name, raw_dims, np.dtype(np.uint8), size, number)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        (stream,) = writer.fout
        rng = np.random.default_rng(seed)
        for name, (dims, kind) in wanted.items():
            writer.write_padding(stream, stream.tell())
            for chunk in _chunks(name, dims, kind, rng):
                stream.write(chunk)
        writer.write_padding(stream, stream.tell())
        writer.close()


def _row_bytes(name: str, columns: int, kind: str) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    if columns % numbers:
        raise SystemExit(f"{name} has rows of {columns}; {kind} needs multiples of {numbers}")
    return columns // numbers * size


def _chunks(
    name: str, dims: tuple[int, ...], kind: str, rng: np.random.Generator
) -> Iterator[bytes]:
    if len(dims) == 1:
        yield np.ones(dims, np.float32).tobytes()
        return
    rows, columns = dims
    embedding = name in ("output.weight", "token_embd.weight")
    spread = (LOGITS_SPREAD if embedding else 1.0) / columns**0.5
    row_bytes = _row_bytes(name, columns, kind)
    at_once = max(1, CHUNK_BYTES // row_bytes)
    row_blocks = row_bytes // random_blocks(kind, 1, spread, rng).shape[1]
    for first in range(0, rows, at_once):
        count = min(at_once, rows - first) * row_blocks
        yield random_blocks(kind, count, spread, rng).tobytes()


def _add_metadata(writer: Any, shape: Shape) -> None:
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.mlp)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab)
    writer.add_quantization_version(2)


def _add_tokenizer(writer: Any, source: Any, vocab: int) -> None:
    def contents(key: str) -> Any:
        return source.get_field(key).contents()

    tokens = contents("tokenizer.ggml.tokens")[:vocab]
    types = contents("tokenizer.ggml.token_type")[:vocab]
    known = set(tokens)
    merges = [
        merge
        for merge in contents("tokenizer.ggml.merges")
        if known.issuperset((*merge.split(" "), merge.replace(" ", "")))
    ]
    missing = vocab - len(tokens)
    writer.add_token_list([*tokens, *(f"<|unused_{i}|>" for i in range(missing))])
    writer.add_token_types([*types, *[UNUSED] * missing])
    writer.add_token_merges(merges)
    for key in TEXTS:
        writer.add_string(key, contents(key))
    for name in IDS:
        writer.add_uint32(f"tokenizer.ggml.{name}", contents(f"tokenizer.ggml.{name}"))
    for name in ("add_space_prefix", "add_bos_token"):
        writer.add_bool(f"tokenizer.ggml.{name}", contents(f"tokenizer.ggml.{name}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("preset", choices=PRESETS, help="the shape that options change")
    parser.add_argument("file", type=Path)
    parser.add_argument("--type", choices=(MIX, *SCALES, *FLOATS), default=MIX)
    parser.add_argument("--seed", type=int, default=0)
    for field in fields(Shape):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int)
    args = parser.parse_args()
    changes = {
        field.name: getattr(args, field.name)
        for field in fields(Shape)
        if getattr(args, field.name) is not None
    }
    shape = replace(PRESETS[args.preset], **changes)
    write(args.file, shape, args.type, args.seed)
    print(f"{args.file}: {args.file.stat().st_size / 1e6:.0f} MB, {shape}", file=sys.stderr)


if __name__ == "__main__":
    main()
