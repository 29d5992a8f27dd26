"""An EAGLE-3 draft as drafter (arXiv 2503.01840), in the format of speculators (`eagle3`).

Its one layer reads what some of the base's layers put out at a position, and the token after it, as
an MTP layer reads the last hidden state. Behind the root it goes on from its own output. Its tokens
are a part of the base's vocabulary, each stored as a distance: `d2t`.

Shapes: B batch, T tokens, N nodes of a chain, D hidden, X all watched layers' D, U its vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medusa_kit.base.files import resolve
from medusa_kit.base.mapped import copy_mapped
from medusa_kit.base.model import BaseModel
from medusa_kit.base.stored_tensors import safetensors_files
from medusa_kit.drafters.factory import DraftContext
from medusa_kit.drafters.native.damaged import check_numbers, loading, reading_config, wrong_sizes
from medusa_kit.drafters.native.layer_rows import LayerCache, LayerRows
from medusa_kit.drafters.native.mtp import MtpDrafter
from medusa_kit.drafters.native.other_kinds import (
    EAGLE_3,
    check_hands_over,
    check_options,
    kind_of,
    stored_dict,
)
from medusa_kit.drafters.native.tally import Tally
from medusa_kit.errors import CheckpointError, ConfigError, IncompatibleBaseError
from medusa_kit.infer.attention import ATTENTION_NAME
from medusa_kit.infer.decode.accept.scored_tree import ScoredTree
from medusa_kit.infer.decode.drafter import RequestText, State, StepResult
from medusa_kit.infer.verifier import Verifier
from medusa_kit.locks import building_models
from medusa_kit.settings.drafters import DraftModelOptions
from medusa_kit.tree.draft_tree import DraftTree

# Switches of speculators' config that change what is computed.
UNREAD = {"norm_before_fc": "a norm before its projection", "fc_norm": "norms of what it reads",
          "norm_output": "a normed output fed back"}  # fmt: skip
TRAINED_ALONG = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")  # not for drafting
HINT = "name an EAGLE-3 draft that was trained for this base, or use another drafter"


@dataclass(frozen=True)
class EagleConfig:
    """What a checkpoint says. `reads`: how many of the base's layers lie before each output that it
    reads; None: as many as EAGLE's authors read."""

    layer: Any  # transformers' config of the layer, with the base's vocabulary
    vocab_size: int
    norm_before_residual: bool
    num_tokens: int
    reads: tuple[int, ...] | None

    def outputs(self, base: Any) -> tuple[int, ...]:
        """The layers of a base with this config whose outputs it reads, in its order."""
        count = base.num_hidden_layers
        numbers = (2, count // 2, count - 3) if self.reads is None else self.reads
        return tuple(number - 1 for number in numbers)


def eagle_config(name: str) -> EagleConfig | None:
    """The config of the EAGLE-3 draft of this name; None for another model. Raises ConfigError for
    one in a form that is not read."""
    stored = stored_dict(name)
    if stored is None or kind_of(stored) != EAGLE_3:
        return None
    from transformers import LlamaConfig

    _check_form(name, stored)
    numbers = stored.get("eagle_aux_hidden_state_layer_ids")
    with reading_config(name, EAGLE_3):
        proposals = (stored.get("speculators_config") or {}).get("proposal_methods") or [{}]
        return EagleConfig(
            LlamaConfig.from_dict(stored["transformer_layer_config"]),
            int(stored["draft_vocab_size"]),
            bool(stored.get("norm_before_residual", False)),
            int(proposals[0].get("speculative_tokens", 3)),
            None if numbers is None else tuple(map(int, numbers)),
        )


def _check_form(name: str, stored: dict[str, Any]) -> None:
    """Raises ConfigError for what is not computed here."""
    layer = stored.get("transformer_layer_config")
    found = [what for key, what in UNREAD.items() if stored.get(key)]
    if isinstance(layer, dict):
        if (kind := layer.get("model_type")) != "llama":
            found.append(f"a layer of the class {kind!r}")
        if (count := layer.get("num_hidden_layers")) != 1:
            found.append(f"{count} layers")
    if found:
        raise ConfigError(
            f"draft model {name!r} is {EAGLE_3} with {found[0]}; only one layer as Llama's, "
            "without further norms, is read",
            hint="use another drafter",
        )


def check_fits(name: str, draft: EagleConfig, base: Any) -> None:
    """Hold a draft's config against its base's, which may both be known before anything is loaded.
    Raises IncompatibleBaseError."""
    layer, last = draft.layer, base.num_hidden_layers - 1
    read = draft.outputs(base)
    wrong = None
    if layer.hidden_size != base.hidden_size:
        wrong = f"has hidden size {layer.hidden_size}; that of the base is {base.hidden_size}"
    elif layer.vocab_size != base.vocab_size:
        wrong = f"is for {layer.vocab_size} tokens; the base has {base.vocab_size}"
    elif not 0 < draft.vocab_size <= base.vocab_size:
        wrong = f"has {draft.vocab_size} tokens; the base has {base.vocab_size}"
    elif not read or not all(0 <= one < last for one in read):
        numbers = [one + 1 for one in read]
        wrong = f"reads outputs {numbers} of the base's layers; expected some of 1 to {last}"
    elif draft.num_tokens < 1:
        wrong = f"proposes {draft.num_tokens} tokens; expected at least 1"
    else:
        wrong = wrong_sizes(layer)
    if wrong is not None:
        raise IncompatibleBaseError(f"EAGLE-3 draft {name!r} {wrong}", hint=HINT)


class EagleModel(nn.Module):
    """Layer, projection, norm and head, called as in the checkpoint; layers are transformers' own.

    Without an embedding of its own it reads the base's, as that is stored."""

    d2t: Tensor

    def __init__(self, config: EagleConfig, base: BaseModel, own_embedding: bool) -> None:
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

        super().__init__()
        self.config, self._base = config, (base,)  # in a tuple: the base is no submodule
        self.outputs = config.outputs(base.config)
        sizes, D = config.layer, config.layer.hidden_size
        if own_embedding:
            self.embed_tokens = nn.Embedding(sizes.vocab_size, D)
        self.fc = nn.Linear(len(self.outputs) * D, D, bias=False)
        layer = LlamaDecoderLayer(sizes, 0)
        for name in ("q_proj", "k_proj", "v_proj"):  # they read the token's embedding too
            narrow = getattr(layer.self_attn, name)
            wide = nn.Linear(2 * D, narrow.out_features, bias=narrow.bias is not None)
            setattr(layer.self_attn, name, wide)
        layer.hidden_norm = LlamaRMSNorm(D, eps=sizes.rms_norm_eps)
        self.layers = nn.ModuleList([layer])
        self.norm = LlamaRMSNorm(D, eps=sizes.rms_norm_eps)
        self.lm_head = nn.Linear(D, config.vocab_size, bias=False)
        self.register_buffer("d2t", torch.empty(config.vocab_size, dtype=torch.long))
        self.rotary: Any = None

    @property
    def _layer(self) -> Any:
        return self.layers[0]

    def project(self, outputs_TX: Tensor) -> Tensor:
        """What the layer reads of the base: hidden_TD. Outputs come once each, in ascending
        order."""
        watched = sorted(set(self.outputs))
        parts = outputs_TX.to(self.fc.weight.dtype).chunk(len(watched), dim=-1)
        in_order = [parts[watched.index(layer)] for layer in self.outputs]
        projected_TD: Tensor = self.fc(torch.cat(in_order, dim=-1))
        return projected_TD

    def forward(
        self,
        hidden_BND: Tensor,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        mask: Tensor,
        cache: LayerCache | None,
    ) -> Tensor:
        own, layer = hasattr(self, "embed_tokens"), self._layer
        embeds_BND = self.embed_tokens(tokens_BN) if own else self._base[0].input_rows(tokens_BN)
        embeds_BND = layer.input_layernorm(embeds_BND.to(hidden_BND.dtype))
        normed_BND = layer.hidden_norm(hidden_BND)
        attended_BND, _ = layer.self_attn(
            torch.cat([embeds_BND, normed_BND], dim=-1),
            position_embeddings=self.rotary(hidden_BND, position_ids=positions_BN),
            attention_mask=mask,
            past_key_values=cache,
        )
        before_BND = normed_BND if self.config.norm_before_residual else hidden_BND
        out_BND = before_BND + attended_BND
        inner_BND: Tensor = layer.mlp(layer.post_attention_layernorm(out_BND))
        return out_BND + inner_BND

    def likeliest(self, hidden_BD: Tensor) -> tuple[Tensor, Tensor]:
        """(chances_B, tokens_B) after what the layer has put out."""
        chances_BU = self.lm_head(self.norm(hidden_BD)).float().softmax(-1)
        chances_B, own_B = chances_BU.max(-1)
        return chances_B, own_B + self.d2t[own_B]


def load_eagle(name: str, config: EagleConfig, verifier: Verifier) -> EagleModel:
    """A draft's network, on the base's device and in its dtype. Raises CheckpointError,
    IncompatibleBaseError."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    base, sizes = verifier.base, config.layer
    check_fits(name, config, base.config)
    check_hands_over(base, EAGLE_3)
    stored = _stored_tensors(name)
    if config.vocab_size == sizes.vocab_size:
        stored.setdefault("d2t", torch.zeros(config.vocab_size, dtype=torch.long))
    sizes._attn_implementation = verifier.own_attention or ATTENTION_NAME
    with loading(name, EAGLE_3):
        with building_models, torch.device("meta"):
            model = EagleModel(config, base, own_embedding="embed_tokens.weight" in stored)
        rotary: Any = LlamaRotaryEmbedding(sizes)
        found = model.load_state_dict(stored, strict=False, assign=True)
    _check_tensors(name, found.missing_keys, found.unexpected_keys)
    model.to(base.device, base.dtype)
    copy_mapped(model)
    check_numbers(name, EAGLE_3, model)
    model.d2t = model.d2t.long()
    tokens_U = model.d2t + torch.arange(config.vocab_size, device=base.device)
    if not bool(((tokens_U >= 0) & (tokens_U < sizes.vocab_size)).all()):
        raise IncompatibleBaseError(
            f"EAGLE-3 draft {name!r} has tokens {int(tokens_U.min())} to {int(tokens_U.max())} by "
            f"its tensor 'd2t'; the base has 0 to {sizes.vocab_size - 1}",
            hint=HINT,
        )
    model.rotary = rotary.to(base.device)  # in float32 whatever the dtype
    return model.eval().requires_grad_(False)


def _stored_tensors(name: str) -> dict[str, Tensor]:
    from huggingface_hub import snapshot_download
    from safetensors.torch import load_file

    source, folder = resolve(name)
    with loading(name, EAGLE_3):
        if source == "hub":
            folder = snapshot_download(folder, allow_patterns=["*.json", "*.safetensors"])
        files = [load_file(file) for file in safetensors_files(Path(folder))]
    return {key: tensor for file in files for key, tensor in file.items()}


def _check_tensors(name: str, missing: Sequence[str], others: Sequence[str]) -> None:
    """Raises CheckpointError."""
    if missing:
        raise CheckpointError(
            f"EAGLE-3 draft {name!r} lacks {len(missing)} tensors, among them {missing[0]!r}",
            hint="a file of weights may be missing",
        )
    if unread := [key for key in others if key not in TRAINED_ALONG]:
        raise CheckpointError(
            f"EAGLE-3 draft {name!r} holds the tensor {unread[0]!r}, which no part of one layer as "
            "Llama's takes",
            hint="the config may be another draft's",
        )


class EagleDrafter(MtpDrafter):
    """Keys and values of true tokens are kept and those of a draft forgotten, as with one MTP
    layer."""

    name, kind = "draft-model", "EAGLE-3"
    reads_prompts = False

    def __init__(self, verifier: Verifier, model: EagleModel, called: str, num_tokens: int) -> None:
        rows = LayerRows(verifier, model.layers[0], model.forward)
        super().__init__(verifier.base, [rows], num_tokens)
        self.model, self.tally = model, Tally(f"draft model {called} ({self.kind})")
        self.no_numbers.called = f"{self.kind} draft {called}"
        self.watches = tuple(sorted(set(model.outputs)))

    @property
    def notes(self) -> list[str]:
        return [*self.no_numbers.notes, *self.tally.notes]

    def observe(self, step: StepResult) -> None:
        super().observe(step)
        self.tally.observe(step)

    def guess(self, state: State) -> list[DraftTree]:
        return self.tally.guessed(super().guess(state))

    def _of_prompt(self, request: RequestText) -> Tensor:
        assert request.prompt_layers is not None, "the base gave no outputs of layers"
        return request.prompt_layers

    def _of_nodes(self, tree: ScoredTree) -> Tensor:
        assert tree.layers_NX is not None, "the base gave no outputs of layers"
        return tree.layers_NX

    def _own(self, hidden_TD: Tensor) -> Tensor:
        return self.model.project(hidden_TD)

    def _likeliest(self, hidden_BD: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.likeliest(hidden_BD)


def build(
    context: DraftContext, name: str, config: EagleConfig, options: DraftModelOptions
) -> EagleDrafter:
    """Raises ConfigError for options that an EAGLE-3 draft has no use for, and as `load_eagle`."""
    check_options(name, EAGLE_3, options)
    key = ("EAGLE-3 draft", name)
    model = context.memory.loaded.remembered(
        key, lambda: load_eagle(name, config, context.verifier)
    )
    num_tokens = min(config.num_tokens, options.num_nodes - 1)
    return EagleDrafter(context.verifier, model, name, num_tokens)
