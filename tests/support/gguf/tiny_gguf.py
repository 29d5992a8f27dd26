"""A GGUF file of a tiny Llama with a byte tokenizer, which transformers reads."""

from pathlib import Path
from typing import Any

import numpy as np

from medusa_kit.base.gguf import byte_tokenizer

HIDDEN, MLP, HEADS, LAYERS, CONTEXT = 32, 64, 2, 1, 64


def write_gguf(
    path: Path, seed: int = 0, kind: str = "F32", values: dict[str, int] | None = None
) -> Path:
    """Random weights, matrices of `kind`; what is written last is the output embedding. `values`:
    more of the metadata."""
    import gguf

    vocab = len(byte_tokenizer()) + 1
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_description("x" * (1 << 20))  # as large a beginning as real files have
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(vocab)
    add_tokenizer(writer, vocab)
    for key, value in (values or {}).items():
        writer.add_uint32(key, value)
    generator = np.random.default_rng(seed)
    for name, shape in _shapes(vocab).items():
        values = generator.normal(0, 0.2, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, np.ones_like(values))
        else:
            raw_kind = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(values, raw_kind), raw_dtype=raw_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: Any, vocab: int) -> None:
    """The byte tokenizer's tokens, `ab`, and unused ones up to `vocab`."""
    tokenizer = byte_tokenizer()
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    tokens = [*tokens, "ab", *(f"<|unused{i}|>" for i in range(vocab - len(tokens) - 1))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(["a b"])  # there must be one
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_bos_token_id(tokenizer.eos_token_id)


def _shapes(vocab: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.{name}.weight": shape
            for name, shape in {
                "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,),
                "attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN, HIDDEN),
                "attn_v": (HIDDEN, HIDDEN), "attn_output": (HIDDEN, HIDDEN),
                "ffn_gate": (MLP, HIDDEN), "ffn_up": (MLP, HIDDEN), "ffn_down": (HIDDEN, MLP),
            }.items()
        }  # fmt: skip
    return {**shapes, "output_norm.weight": (HIDDEN,), "output.weight": (vocab, HIDDEN)}
