"""The base model: the causal LM whose output we must reproduce.

Heads read the input of the output embedding (the last hidden state after the final norm). So a base
model here is a transformers model plus `hidden_states` and `head_logits`, both checked at load
against the model's own forward. No model code is patched.

Shapes: B batch, T tokens, D hidden, V vocabulary (rows of the output embedding), X any
leading shape.
"""

import hashlib
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from threading import get_ident
from typing import Any, Self

import torch
from torch import Tensor

from medusa_kit import console
from medusa_kit.base import families, fingerprint, hooks, text_part
from medusa_kit.base.fingerprint import Fingerprint
from medusa_kit.base.logit_scale import LogitScale
from medusa_kit.base.model_state import config_of, watch_of
from medusa_kit.base.origin import BASE, CONFIG
from medusa_kit.base.own_code import replaced_function
from medusa_kit.base.quantization import is_quantised, num_weights, quantisation_of, raw_bytes
from medusa_kit.base.remembered_checks import SOURCES, record_of_check
from medusa_kit.base.remembered_configs import computed_by, settings_of
from medusa_kit.base.still import while_still
from medusa_kit.base.tokenizer.check import look_at_tokenizer
from medusa_kit.base.tokenizer.encoding_digest import ENCODING, encoding_digest
from medusa_kit.errors import IncompatibleBaseError, Live
from medusa_kit.locks import ATTRIBUTE as LOCK
from medusa_kit.locks import lock_of
from medusa_kit.settings.engine import FLOAT32, allowed
from medusa_kit.store.records import Record
from medusa_kit.usual_device import on_usual_device

# Largest error allowed between two ways of computing the same logits, as a share of their spread.
# In float32 rounding is some 1e-5 of the spread, a missing scale or cap 1e-1 and more.
RELATIVE_TOLERANCE = {
    torch.float64: 1e-8,
    torch.float32: 1e-3,
    torch.bfloat16: 0.1,
    torch.float16: 2e-2,
}
FINAL_NORM_NAMES = ("norm", "final_layernorm", "ln_f", "final_layer_norm", "final_norm")
CHECKPOINT, INT8 = allowed("weights")  # whose numbers, see infer/cpu/packed/int8_weights.py
VARIANT_KEY = "medusa_kit_variant"  # in the config of a model that Medusa-2 trained: its digest


@dataclass(frozen=True)
class BaseModelInfo:
    """A description of the model, printed by the CLI and stored with everything made from it."""

    name: str
    revision: str | None
    source: str  # hub | folder | gguf | embedded (by a name of the kit's own) | memory
    model_type: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    context_length: int
    tied_embeddings: bool
    quantized: bool
    dtype: str
    device: str
    num_parameters: int
    fingerprint: str
    weights: str = CHECKPOINT
    quantization: str | None = None  # method and kind; None: not quantised

    @property
    def lossy(self) -> bool:
        """Whether this is another model than the checkpoint's."""
        return self.weights != CHECKPOINT

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class BaseModel(Live):
    """A frozen transformers causal LM, its tokenizer, and the two functions that heads need.

    A light one (infer/cpu/packed_base.py) computes them without `model`, which it loads when
    somebody asks for it.
    """

    is_light = False
    text_activations = FLOAT32  # of hidden states of whole texts

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        source: str,
        revision: str | None = None,
        known: Fingerprint | None = None,
        check: bool = False,
    ) -> None:
        """`known`: the fingerprint, where it is not computed from the weights. `check`: whatever
        is remembered of earlier checks."""
        text = config_of(model).get_text_config()
        if model.config.is_encoder_decoder or families.too_short(text):
            families.refuse_impossible(model.config, name)
        model.eval().requires_grad_(False)
        families.keep_soft_cap(model)
        self._model = model
        setattr(self, LOCK, lock_of(model))  # so that lock_of(base) is the model's
        self.tokenizer = tokenizer
        self.check = check
        self.scales: dict[Any, Tensor] = {}  # linear layer rounded to int8 -> scales_OQ

        def describe() -> None:
            self.number = watch_of(model).number
            self.config = text
            self.scale_logits = LogitScale.of(text)
            self.check_output()
            self.info = self._describe(name, source, revision, known)
            self.checks_are_remembered = self._known_code(source)
            self.decoder_is_exact = self._checked_views()

        while_still(lambda: watch_of(model).look(model), describe)
        look_at_tokenizer(self)

    @property
    def model(self) -> Any:
        """transformers' model. Whoever asks for it may change it: from now on its numbers are read
        before and after each answer."""
        watch_of(self.own_model).hand_out(self.own_model)
        return self.own_model

    @property
    def own_model(self) -> Any:
        """The same for code of the kit, which does not change it."""
        return self._model

    @property
    def device(self) -> torch.device:
        return self._output_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self._output_weight.dtype

    @property
    def output_embedding(self) -> Any:
        """The module that turns hidden states into logits, of `model`."""
        return self.model.get_output_embeddings()

    @property
    def own_output(self) -> Any:
        """The same for code of the kit; not stored, since it may be replaced."""
        return self.own_model.get_output_embeddings()

    def output_rows(self, ids_R: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(weight_RD, bias_R) of the output embedding, of all tokens unless `ids_R` names some."""
        embedding, rows = self.own_output, slice(None) if ids_R is None else ids_R
        bias = getattr(embedding, "bias", None)
        return embedding.weight[rows], None if bias is None else bias[rows]

    def own_modules(self) -> Iterable[Any]:
        """The model's modules, for code of the kit; none where there is no model."""
        return self.own_model.modules()

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights in memory."""
        return sum(int(p.nbytes) for p in self.own_model.parameters())

    @property
    def is_handed_out(self) -> bool:
        """Whether code that is not the kit's may change the model."""
        return self._model is not None and watch_of(self._model).is_handed_out

    def look(self) -> int:
        """How often the model has been found changed, having looked at it now."""
        model = self.own_model
        return watch_of(model).look(model)

    def changes(self) -> int:
        """`look`, after which what is known of the model (`number`) is of it as it is now: found
        out anew where it was changed; no check of an earlier load is one of it.

        Raises IncompatibleBaseError for one that heads cannot read any more.
        """
        number = self.look()
        if number != self.number:
            with lock_of(self.own_model), torch.no_grad():
                # Not `self.look`: a light base changes its class meanwhile.
                while_still(lambda: self.look(), self._look_again, number)
        return self.number

    def adopt(self) -> None:
        """What the kit itself has just changed is no change."""
        self.number = self.look()

    def _look_again(self) -> None:
        model, info, number = self.own_model, self.info, watch_of(self.own_model).number
        self.config = config_of(model).get_text_config()
        self.scale_logits, self.checks_are_remembered = LogitScale.of(self.config), False
        self.check_output()
        known = self._describe(info.name, info.source, info.revision, None)
        self.info = replace(known, weights=info.weights)
        self.decoder_is_exact = self._check_views()
        self.number = number

    @property
    def num_logits(self) -> int:
        return self.info.vocab_size

    @property
    def generation_config(self) -> Any:
        return self.own_model.generation_config

    @property
    def generation(self) -> Any:
        """What has transformers' functions of generation, for code of the kit."""
        return self.own_model

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer: the generation config's, else the tokenizer's. At load the
        generation config gets the token with which the chat template ends turns."""
        ids = self.generation_config.eos_token_id
        if ids is None and self.tokenizer is not None:
            ids = self.tokenizer.eos_token_id
        if ids is None:
            return frozenset()
        return frozenset(ids) if isinstance(ids, list | tuple) else frozenset([ids])

    @property
    def encoding(self) -> str | None:
        """The digest of how text is encoded; None without a tokenizer."""
        return encoding_digest(self.tokenizer, self.stop_token_ids)

    def head_logits(self, hidden_XD: Tensor) -> Tensor:
        """Output embedding with its bias, then the model's own scale and soft cap: logits_XV.

        A plain Linear's weights are read without calling the module: training reads them chunk by
        chunk, and ZeRO-3 would gather them at every call.
        """
        return self.scale_logits(plain_linear(self.own_output, hidden_XD))

    @property
    def embedding_size(self) -> int:
        """The size of an input embedding, nearly always the hidden size."""
        return int(self.own_model.get_input_embeddings().weight.shape[1])

    def input_rows(self, ids_X: Tensor) -> Tensor:
        """embeddings_XE as they are stored, where the embedding is a plain one."""
        embedding = self.own_model.get_input_embeddings()
        plain = isinstance(embedding, torch.nn.Embedding) and not is_quantised(embedding.weight)
        return embedding.weight[ids_X] if plain else embedding(ids_X)

    @torch.no_grad()
    def token_embeddings(self, token_ids_X: Tensor) -> Tensor:
        """Input embeddings_XE, each scaled to unit RMS; ids below 0 are read as token 0.

        Families scale their embeddings differently, some by the size of the model; unit RMS suits
        the same heads and learning rates everywhere. The weights are read without calling the
        module, as in head_logits.
        """
        embeddings_XE = self.input_rows(token_ids_X.clamp_min(0))
        wide = torch.promote_types(embeddings_XE.dtype, torch.float32)
        wide_XE = embeddings_XE.to(wide)  # in float16 the factor of a row of zeros is infinite
        scale_X1 = wide_XE.square().mean(-1, keepdim=True).clamp_min(1e-12).rsqrt()
        return (wide_XE * scale_X1).to(embeddings_XE.dtype)

    @torch.no_grad()
    def hidden_states(
        self, input_ids_BT: Tensor, attention_mask_BT: Tensor | None = None
    ) -> Tensor:
        """hidden_BTD, the input of the output embedding at every token."""
        return self.traced_hidden_states(input_ids_BT, attention_mask_BT)

    def traced_hidden_states(
        self,
        input_ids_BT: Tensor,
        attention_mask_BT: Tensor | None = None,
        position_ids_BT: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        """The same with gradient, where the model has any. `more`: further arguments of the model.

        It skips the [T, V] product if the check at load found that the decoder alone returns this.
        """
        arguments = {"attention_mask": attention_mask_BT, "use_cache": False, **more}
        if position_ids_BT is not None:
            arguments["position_ids"] = position_ids_BT
        if self.decoder_is_exact:
            decoder = self.own_model.get_decoder()
            return decoder(input_ids_BT, **arguments).last_hidden_state
        return self._hooked(input_ids_BT, **arguments)[0]

    @torch.no_grad()
    def hidden_and_logits(
        self, input_ids_BT: Tensor, keep_M: Tensor | None = None, **arguments: Any
    ) -> tuple[Tensor, Tensor]:
        """One forward of the model: (input of the output embedding, the model's own logits).
        `keep_M`: the tokens whose logits are computed, as with transformers' `logits_to_keep`; the
        hidden states are those of all tokens nevertheless."""
        return self._hooked(input_ids_BT, keep_M, **arguments)

    def _hooked(
        self, input_ids_BT: Tensor, keep_M: Tensor | None = None, **arguments: Any
    ) -> tuple[Tensor, Tensor]:
        @hooks.ours
        def look(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            seen[get_ident()] = args[0]
            kept = keep_M is not None and get_ident() == own
            return (args[0][:, keep_M], *args[1:]) if kept else None

        # By thread, since other threads may run the model too.
        seen, own = dict[int, Tensor](), get_ident()
        with lock_of(self):
            hook = self.own_output.register_forward_pre_hook(look)
            try:
                logits_BTV = self.own_model(input_ids_BT, **arguments).logits
            finally:
                hook.remove()
        return seen[own], logits_BTV

    def weights_digest(self) -> str:
        """SHA-256 over every parameter and buffer, to show that training left the base alone."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.own_model.state_dict().items()):
            digest.update(name.encode())
            digest.update(raw_bytes(tensor))
        return digest.hexdigest()

    @property
    def computation(self) -> dict[str, Any]:
        """What its config says of how it computes: the fingerprint does not cover that."""
        return computed_by(self.config)

    def view(self) -> Self:
        """Another object around the same model, whose attributes may be set apart."""
        return self._twin()

    @property
    def identity(self) -> dict[str, Any]:
        """What it computes with, as files say it: weights and config."""
        return {BASE: self.info.fingerprint, CONFIG: self.computation}

    @property
    def origin(self) -> dict[str, Any]:
        """What a file that is made from it says of it (origin.py)."""
        return {**self.identity, ENCODING: self.encoding}

    def _known_code(self, source: str) -> bool:
        """Whether weights and versions say all of what the model computes."""
        plain = source in SOURCES and self.device.type == "cpu" and not self.info.quantized
        return plain and replaced_function(self.config) is None

    def check_record(self, **depends_on: Any) -> Record | None:
        """The record of a check of this model; None where checks are not remembered."""
        if not self.checks_are_remembered:
            return None
        info = self.info
        model: dict[str, Any] = {
            "model": info.fingerprint, "dtype": info.dtype, "weights": info.weights,
        }  # fmt: skip
        attention = getattr(self.config, "_attn_implementation", None)
        settings = settings_of(self.config)  # windows and rotary embeddings are not in the weights
        model |= {"config": settings, "own_attention": attention}
        return record_of_check(info.name, **model, **depends_on)

    def _checked_views(self) -> bool:
        """`_check_views`, or what an earlier load found."""
        record = self.check_record(check="hidden states")
        known = None if record is None or self.check else record.read()
        if known is not None and isinstance(known.get("decoder_is_exact"), bool):
            return bool(known["decoder_is_exact"])
        found = self._check_views()
        if record is not None:
            record.write(decoder_is_exact=found)
        return found

    @property
    def _output_weight(self) -> Any:
        weight = getattr(self.own_output, "weight", None)
        if not isinstance(weight, Tensor):
            self.check_output()
        return weight

    def check_output(self) -> None:
        """Raises IncompatibleBaseError for a model without an output embedding, or with one that
        has no numbers: it has sizes, by which forecasts and counts of kernels go."""
        weight = getattr(self.own_output, "weight", None)
        if isinstance(weight, Tensor) and weight.is_meta:
            raise IncompatibleBaseError(
                f"the weights of this {type(self.own_model).__name__} are on the meta device: they "
                "have no numbers",
                hint="build or load the model outside of torch.device('meta')",
            )
        if not isinstance(weight, Tensor) or is_quantised(weight):
            found = "" if weight is None else " in floating point"
            raise IncompatibleBaseError(
                f"{type(self.own_model).__name__} has no output embedding{found}",
                hint="a causal language model with one output embedding is needed, and "
                "quantisation must leave that one out (as it does by default)",
            )

    def _check_views(self) -> bool:
        """Check `head_logits` against the model's logits; whether the decoder equals it too."""
        with torch.autocast(self.device.type, enabled=False):  # a caller's
            return self._compare_views()

    def _compare_views(self) -> bool:
        generator = torch.Generator().manual_seed(0)
        rows = min(self.own_output.weight.shape[0], self.config.vocab_size)
        ids_BT = torch.randint(0, rows, (2, 8), generator=generator).to(self.device)
        hidden_BTD, logits_BTV = self.hidden_and_logits(ids_BT, use_cache=False)
        error = relative_error(self.head_logits(hidden_BTD), logits_BTV)
        if error > RELATIVE_TOLERANCE[logits_BTV.dtype]:
            raise IncompatibleBaseError(
                f"{self.config.model_type}: logits rebuilt from the hidden state differ from the "
                f"model's own by {error:.1e} of their spread (allowed "
                f"{RELATIVE_TOLERANCE[logits_BTV.dtype]:.0e})",
                hint="the model changes its logits after the output embedding in a way that "
                "medusa-kit does not support (it supports scales and soft caps)",
            )
        try:
            decoded = self.own_model.get_decoder()(ids_BT, use_cache=False).last_hidden_state
        except (AttributeError, TypeError, ValueError):
            return False
        return bool(
            decoded.shape == hidden_BTD.shape
            and relative_error(decoded, hidden_BTD) < RELATIVE_TOLERANCE[hidden_BTD.dtype]
        )

    def _describe(
        self, name: str, source: str, revision: str | None, known: Fingerprint | None
    ) -> BaseModelInfo:
        weight_VD = self.own_output.weight
        embedding = self.own_model.get_input_embeddings()
        quantization = quantisation_of(self.own_model)
        return BaseModelInfo(
            name=name,
            revision=revision,
            source=source,
            model_type=self.config.model_type,
            hidden_size=weight_VD.shape[1],
            vocab_size=weight_VD.shape[0],
            num_layers=self.config.num_hidden_layers,
            context_length=families.context_length(self.config),
            tied_embeddings=weight_VD.data_ptr() == embedding.weight.data_ptr(),
            quantized=quantization is not None,
            quantization=quantization,
            dtype=str(self.dtype).removeprefix("torch."),
            device=str(self.device),
            num_parameters=num_weights(self.own_model),
            fingerprint=str(known) if known else self._fingerprint(quantization is not None),
        )

    def fingerprint(self, variant: str | None = None) -> str:
        """The fingerprint of the weights now. `variant`: the mark of a model that Medusa-2
        trained."""
        return self._fingerprint(self.info.quantized, variant)

    def adapted_fingerprint(self, variant: str) -> Fingerprint:
        """The fingerprint of this base with the adapter of digest `variant`, merged or not."""
        output = fingerprint.output_digest(self.output_weights(), variant)
        return Fingerprint.parse(self.info.fingerprint).adapted(variant, output)

    def _fingerprint(self, quantised: bool, variant: str | None = None) -> str:
        variant = variant or getattr(self.config, VARIANT_KEY, None)
        console.stage("computing the model's fingerprint")
        digests = fingerprint.digests_of(self.own_model, self._made_whole)
        whole = fingerprint.whole_digest(digests.by_name, variant)
        output = fingerprint.output_digest(self.output_weights(), variant)
        return str(Fingerprint(whole, output, quantised, None if variant else digests.vectors))

    def _made_whole(self, weight: Tensor) -> AbstractContextManager[Any]:
        """A context in which this process can read `weight`."""
        return nullcontext()

    def output_weights(self) -> list[Any]:
        """Output embedding and final norm, which quantisation and adapters leave alone."""
        decoder = self.own_model.get_decoder() if hasattr(self.own_model, "get_decoder") else None
        norms = [getattr(getattr(decoder, name, None), "weight", None) for name in FINAL_NORM_NAMES]
        return [self.own_output.weight, *(norm for norm in norms if norm is not None)]


def plain_linear(module: Any, x_XD: Tensor) -> Tensor:
    """module(x), for a plain Linear without its hooks."""
    if type(module) is torch.nn.Linear:
        return torch.nn.functional.linear(x_XD, module.weight, module.bias)
    return module(x_XD)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference, in standard deviations of `expected`."""
    spread = expected.float().std().clamp_min(1e-12)
    return float((actual.double() - expected.double()).abs().max() / spread)


@on_usual_device
def wrap_model(model: Any, tokenizer: Any = None, name: str = "in-memory") -> BaseModel:
    """Around a transformers model that the caller built; of a multimodal one its text part."""
    part = text_part.in_memory(model)
    watch_of(part).hand_out(part)  # the caller has it
    return BaseModel(part, tokenizer, name, "memory")
