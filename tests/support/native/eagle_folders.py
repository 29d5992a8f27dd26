"""Folders of tiny EAGLE-3 drafts with random weights, as speculators stores them, and a reference
that drafts with one in plain torch: it reads the whole text anew at each draft.

Shapes: T tokens, D hidden, A outputs that are read, H heads, K heads of keys, E head dim.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.tiny_models import COMMON

D, HEADS, KEYS, E, WIDE = COMMON["hidden_size"], 4, 2, 8, 48
EPSILON, THETA = 1e-5, 10000.0
PROPOSED = 4  # tokens of a draft
SEED = 7  # whose draft is right now and then for the bases of the tests


def eagle_folder(
    folder: Path,
    vocab: int,
    known: int,
    reads: list[int] | None = None,
    embedding: bool = True,
    layer: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """A draft for a base with `vocab` tokens, which knows `known` of them: every token but the
    first ones. `reads`: [3, 1, 2] unless given."""
    sizes = {"model_type": "llama", "vocab_size": vocab, "hidden_size": D,
             "intermediate_size": WIDE, "num_hidden_layers": 1, "num_attention_heads": HEADS,
             "num_key_value_heads": KEYS, "head_dim": E, "rms_norm_eps": EPSILON,
             "rope_theta": THETA, "max_position_embeddings": 128, "hidden_act": "silu",
             "attention_bias": False, "mlp_bias": False, **(layer or {})}  # fmt: skip
    reads = [3, 1, 2] if reads is None else reads
    config = {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3",
              "draft_vocab_size": known, "norm_before_residual": False,
              "embed_requires_grad": False, "target_hidden_size": None,
              "eagle_aux_hidden_state_layer_ids": reads, "transformer_layer_config": sizes,
              "speculators_config": {"algorithm": "eagle3", "proposal_methods": [
                  {"proposal_type": "greedy", "speculative_tokens": PROPOSED}]},
              **changes}  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        _tensors(vocab, known, len(reads), embedding, sizes["hidden_size"]),
        folder / "model.safetensors",
    )
    return folder


def _tensors(vocab: int, known: int, num_read: int, embedding: bool, D: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    shapes = {"fc": (D, num_read * D), "lm_head": (known, D),
              "layers.0.self_attn.q_proj": (HEADS * E, 2 * D),
              "layers.0.self_attn.k_proj": (KEYS * E, 2 * D),
              "layers.0.self_attn.v_proj": (KEYS * E, 2 * D),
              "layers.0.self_attn.o_proj": (D, HEADS * E),
              "layers.0.mlp.gate_proj": (WIDE, D), "layers.0.mlp.up_proj": (WIDE, D),
              "layers.0.mlp.down_proj": (D, WIDE)}  # fmt: skip
    if embedding:
        shapes["embed_tokens"] = (vocab, D)
    found = {f"{name}.weight": 0.4 * torch.randn(shape, generator=generator)
             for name, shape in shapes.items()}  # fmt: skip
    for norm in (
        "norm",
        *(
            f"layers.0.{one}"
            for one in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        ),
    ):
        found[f"{norm}.weight"] = 1 + 0.3 * torch.randn(D, generator=generator)
    if known < vocab:
        found["d2t"] = torch.full((known,), vocab - known)
        found["t2d"] = torch.arange(vocab) >= vocab - known
    return found


def reference_draft(
    folder: Path, model: Any, text: list[int], first: int, length: int
) -> list[int]:
    """The tokens that a draft in `folder` writes behind a text, whose last token the base has not
    read. `model`: transformers' own; what lies before token `first` the draft has not seen."""
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    with torch.no_grad():
        states = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        read_TX = torch.cat(
            [states[one][0, first:] for one in config["eagle_aux_hidden_state_layer_ids"]], dim=-1
        )
        hidden_TD, tokens = read_TX @ weights["fc.weight"].T, text[first + 1 :]
        embedding = weights.get("embed_tokens.weight", model.get_input_embeddings().weight)
        drafted = list[int]()
        while True:
            out_TD = _layer(weights, hidden_TD, embedding[tokens], config["norm_before_residual"])
            logits_U = _norm(out_TD[-1], weights["norm.weight"]) @ weights["lm_head.weight"].T
            token = int(logits_U.argmax())
            token += int(weights["d2t"][token]) if "d2t" in weights else 0
            drafted.append(token)
            if len(drafted) == length:
                return drafted
            hidden_TD, tokens = torch.cat([hidden_TD, out_TD[-1:]]), [*tokens, token]


def _norm(hidden_TD: Tensor, weight_D: Tensor) -> Tensor:
    return weight_D * hidden_TD / (hidden_TD.square().mean(-1, keepdim=True) + EPSILON).sqrt()


def _turned(heads_THE: Tensor) -> Tensor:
    """With positions from 0 on: distances alone matter."""
    rates = THETA ** (-torch.arange(0, E, 2) / E)
    angles_T1E = (torch.arange(len(heads_THE))[:, None] * rates).repeat(1, 2)[:, None]
    low, high = heads_THE.chunk(2, dim=-1)
    return heads_THE * angles_T1E.cos() + torch.cat([-high, low], dim=-1) * angles_T1E.sin()


def _layer(
    weights: dict[str, Tensor], hidden_TD: Tensor, embeds_TD: Tensor, norm_before_residual: bool
) -> Tensor:
    own = {key.removeprefix("layers.0.").removesuffix(".weight"): weight
           for key, weight in weights.items()}  # fmt: skip
    T, normed_TD = len(hidden_TD), _norm(hidden_TD, own["hidden_norm"])
    both_TX = torch.cat([_norm(embeds_TD, own["input_layernorm"]), normed_TD], dim=-1)
    queries = _turned((both_TX @ own["self_attn.q_proj"].T).view(T, HEADS, E))
    keys = _turned((both_TX @ own["self_attn.k_proj"].T).view(T, KEYS, E))
    values = (both_TX @ own["self_attn.v_proj"].T).view(T, KEYS, E)
    keys, values = (one.repeat_interleave(HEADS // KEYS, dim=1) for one in (keys, values))
    scores_HTT = torch.einsum("qhe,khe->hqk", queries, keys) / E**0.5
    unseen_TT = torch.ones(T, T).triu(1).bool()
    weights_HTT = scores_HTT.masked_fill(unseen_TT, -torch.inf).softmax(-1)
    attended = torch.einsum("hqk,khe->qhe", weights_HTT, values).reshape(T, HEADS * E)
    out_TD = (normed_TD if norm_before_residual else hidden_TD) + (
        attended @ own["self_attn.o_proj"].T
    )
    inner_TD = _norm(out_TD, own["post_attention_layernorm"])
    gate = torch.nn.functional.silu(inner_TD @ own["mlp.gate_proj"].T)
    return out_TD + (gate * (inner_TD @ own["mlp.up_proj"].T)) @ own["mlp.down_proj"].T
