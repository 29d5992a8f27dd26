"""GGUF files of a tiny model with any vocabulary."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
HIDDEN, MLP = 32, 64


def write_vocabulary(
    path: Path,
    tokens: Sequence[str],
    kinds: Sequence[int],
    *,
    model: str = "gpt2",
    pre: str | None = None,
    merges: Sequence[str] = (),
    scores: Sequence[float] = (),
    ids: Mapping[str, int] | None = None,
    flags: Mapping[str, bool] | None = None,
    template: str | None = None,
    name: str | None = None,
    architecture: str = "llama",
    always: int | None = None,
) -> Path:
    """`ids`: by key, such as bos for tokenizer.ggml.bos_token_id; `flags`: by whole key behind
    tokenizer.ggml. `always`: the token that the model says, whatever it reads."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    if name is not None:
        writer.add_name(name)
    for add, value in (
        (writer.add_context_length, 256), (writer.add_embedding_length, HIDDEN),
        (writer.add_block_count, 1), (writer.add_feed_forward_length, MLP),
        (writer.add_head_count, 2), (writer.add_head_count_kv, 2),
        (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_rope_freq_base, 10000.0),
        (writer.add_vocab_size, len(tokens)), (writer.add_tokenizer_model, model),
        (writer.add_token_list, tokens), (writer.add_token_types, kinds),
    ):  # fmt: skip
        add(value)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if merges:
        writer.add_token_merges(merges)
    if scores:
        writer.add_token_scores(scores)
    for key, token in (ids or {}).items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", token)
    for key, flag in (flags or {}).items():
        writer.add_bool(f"tokenizer.ggml.{key}", flag)
    if template is not None:
        writer.add_chat_template(template)
    for tensor, values in _tensors(len(tokens), always, architecture).items():
        writer.add_tensor(tensor, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(rows: int, always: int | None, architecture: str) -> dict[str, Any]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (rows, HIDDEN), "output.weight": (rows, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN), "blk.0.ffn_gate.weight": (MLP, HIDDEN),
        "blk.0.ffn_up.weight": (MLP, HIDDEN), "blk.0.ffn_down.weight": (HIDDEN, MLP),
        **{f"blk.0.attn_{part}.weight": (HIDDEN, HIDDEN) for part in "qkv"},
    }  # fmt: skip
    if architecture == "qwen2":
        shapes |= {f"blk.0.attn_{part}.bias": (HIDDEN,) for part in "qkv"}
    generator = np.random.default_rng(0)
    tensors = {
        tensor: generator.normal(0, 0.2, shape).astype(np.float32)
        for tensor, shape in shapes.items()
    }
    if always is not None:
        for tensor, values in tensors.items():
            values[:] = tensor == "token_embd.weight"
        tensors["output.weight"][always] = 1
    norms = ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")
    return tensors | {f"{norm}.weight": np.ones(HIDDEN, np.float32) for norm in norms}
