"""A light base model: C++ computes all that decoding needs, from packed weights that are mapped.

There are no torch modules, and no code of models is imported. Whatever asks for `model` gets
transformers' own, which is loaded then and says so. If that is changed, the base is an ordinary one
from the next answer on.

Shapes: B rows, T tokens, D hidden, V vocabulary, X any leading shape, R rows of an embedding,
E size of an embedding.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medusa_kit import console
from medusa_kit.base import families
from medusa_kit.base.files import (
    NO_TOKENIZER,
    config_and_folder,
    generation_config_of,
    gguf_source,
    quiet_transformers,
    resolve,
    tokenizer_of,
    whole_name,
)
from medusa_kit.base.fingerprint import Match, compare
from medusa_kit.base.loading import load_base_model
from medusa_kit.base.logit_scale import LogitScale
from medusa_kit.base.model import CHECKPOINT, BaseModel, BaseModelInfo
from medusa_kit.base.model_state import ATTRIBUTE as WATCH
from medusa_kit.base.model_state import ModelWatch
from medusa_kit.base.placement import pick_device, requested_dtype
from medusa_kit.base.quantization import raw_bytes
from medusa_kit.base.remembered_checks import SOURCES
from medusa_kit.base.tokenizer.check import look_at_tokenizer
from medusa_kit.errors import CheckpointError
from medusa_kit.infer.check_texts import drawn_texts
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.decoder import NativeDecoder
from medusa_kit.infer.cpu.layerwise_reference import LayerwiseReference
from medusa_kit.infer.cpu.packed.cache import packed_model
from medusa_kit.infer.cpu.packed.int8_weights import with_weights
from medusa_kit.infer.cpu.packed.model import PackedModel
from medusa_kit.infer.cpu.packed_texts import hidden_of_texts
from medusa_kit.infer.cpu.verifier import WITHOUT, needed
from medusa_kit.infer.model_parts import Unsupported
from medusa_kit.locks import ATTRIBUTE as LOCK
from medusa_kit.locks import lock_of
from medusa_kit.settings.engine import FLOAT32

QUANTISED = f"{WITHOUT}, or a quantised GGUF file on a CPU"


class PackedBase(BaseModel):
    """Build with `light_base`."""

    is_light = True
    decoder_is_exact = True  # of `model`, if it is ever asked for

    def __init__(
        self, packed: PackedModel, config: Any, generation_config: Any, tokenizer: Any,
        info: BaseModelInfo, check: bool, reference: LayerwiseReference,
    ) -> None:  # fmt: skip
        """`reference`: the model that the self-check compares trees with."""
        self.packed, self.tokenizer, self.config, self.info = packed, tokenizer, config, info
        self.reference = reference
        self.scale_logits = LogitScale.of(config)
        self.checks_are_remembered, self.check = True, check
        self.scales, self.number = {}, 0
        self._generation_config, self._model = generation_config, None
        look_at_tokenizer(self)

    @property
    def own_model(self) -> Any:
        with lock_of(self):
            if self._model is None:
                info = self.info
                size = 4 * info.num_parameters / 1e9
                console.note(
                    f"loading the whole of {info.name} through transformers, for what C++ does not "
                    f"compute: {size:.1f} GB more of memory"
                )
                base = load_base_model(
                    info.name, dtype=info.dtype, device="cpu", revision=info.revision
                )
                _check_same(base.info, info)
                model = with_weights(base, info.weights).own_model
                setattr(model, LOCK, lock_of(self))
                model.generation_config = self._generation_config
                setattr(model, WATCH, ModelWatch())  # so far nobody has seen it
                self._model, self.scales = model, base.scales
            return self._model

    def look(self) -> int:
        """0 as long as nobody has asked for `model`."""
        return 0 if self._model is None else super().look()

    def _look_again(self) -> None:
        """A base that has changed is packed no longer."""
        self.text_activations = FLOAT32
        self.__class__ = BaseModel  # type: ignore[assignment]
        self._look_again()

    @property
    def is_loaded(self) -> bool:
        """Whether `model` is in memory."""
        return self._model is not None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def own_output(self) -> Any:
        return self._output if self._model is None else self._model.get_output_embeddings()

    @cached_property
    def _output(self) -> nn.Linear:
        """The output embedding as a module in float32, for what computes with it in torch."""
        weight_VD, bias_V = self.packed.output_rows()
        layer = nn.Linear(1, 1, bias=bias_V is not None, device="meta")
        layer.out_features, layer.in_features = weight_VD.shape
        layer.weight = nn.Parameter(weight_VD, requires_grad=False)
        if bias_V is not None:
            layer.bias = nn.Parameter(bias_V.clone(), requires_grad=False)
        return layer

    def output_rows(self, ids_R: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return self.packed.output_rows(ids_R)

    def own_modules(self) -> Iterable[Any]:
        return () if self._model is None else super().own_modules()

    @property
    def num_bytes(self) -> int:
        return self.decoder.weight_bytes

    def weights_digest(self) -> str:
        """The digest of the packed weights."""
        digest = hashlib.sha256()
        for name, matrix in sorted(self.packed.matrices.items()):
            digest.update(name.encode())
            digest.update(raw_bytes(matrix.data))
        return digest.hexdigest()

    @property
    def generation_config(self) -> Any:
        return self._generation_config

    @property
    def generation(self) -> Any:
        from transformers.generation.utils import GenerationMixin

        maker: Any = GenerationMixin()
        maker.config = self.config
        return maker

    @property
    def embedding_size(self) -> int:
        return self.packed.embedding_size

    def input_rows(self, ids_X: Tensor) -> Tensor:
        return self.packed.input_rows(ids_X)

    @torch.no_grad()
    def traced_hidden_states(
        self,
        input_ids_BT: Tensor,
        attention_mask_BT: Tensor | None = None,
        position_ids_BT: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        """hidden_BTD, zeros where the mask hides. Each row is one text, padded on the right; with
        position ids, several texts that each begin at 0. Raises ValueError for further arguments of
        transformers' models."""
        if more:
            raise ValueError(f"{', '.join(more)}: only a model of torch takes these")
        B, T = input_ids_BT.shape
        spans = [
            (row, *span)
            for row in range(B)
            for span in _spans(
                T,
                None if attention_mask_BT is None else attention_mask_BT[row],
                None if position_ids_BT is None else position_ids_BT[row],
            )
        ]
        length, lock = self.info.context_length, lock_of(self)
        return hidden_of_texts(self._texts_decoder, input_ids_BT, spans, length, lock)

    @cached_property
    def decoder(self) -> NativeDecoder:
        return NativeDecoder(self.packed, self.scale_logits)

    @cached_property
    def _texts_decoder(self) -> NativeDecoder:
        return self.decoder.with_activations(self.text_activations)

    def read_texts_in(self, activations: str) -> None:
        """Compute hidden states of whole texts in this precision from now on. Raises Unsupported
        where quantised weights are not multiplied so."""
        decoder = self.decoder.with_activations(activations)
        self.text_activations, self._texts_decoder = activations, decoder

    @torch.no_grad()
    def hidden_and_logits(
        self, input_ids_BT: Tensor, keep_M: Tensor | None = None, **arguments: Any
    ) -> tuple[Tensor, Tensor]:
        _ = self.own_model  # so that the output embedding is its own
        return super().hidden_and_logits(input_ids_BT, keep_M, **arguments)


def _check_same(actual: BaseModelInfo, expected: BaseModelInfo) -> None:
    if compare(actual.fingerprint, expected.fingerprint) is not Match.SAME:
        raise CheckpointError(
            f"{expected.name} holds other weights than when it was loaded: fingerprint "
            f"{actual.fingerprint}, expected {expected.fingerprint}",
            hint="load it again",
        )


def _spans(length: int, mask_T: Tensor | None, positions_T: Tensor | None) -> list[tuple[int, int]]:
    """(start, end) of the texts of a row."""
    if positions_T is not None:
        starts = (positions_T == 0).nonzero().flatten().tolist()
        return list(zip(starts, [*starts[1:], length], strict=True))
    if mask_T is None:
        return [(0, length)]
    end = int(mask_T.bool().sum())
    if not bool(mask_T[:end].all()):
        raise ValueError("rows of a light base are padded on the right")
    return [(0, end)] if end else []


def base_for_decoding(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    weights: str = CHECKPOINT,
    check: bool = False,
    text_activations: str = FLOAT32,
) -> BaseModel:
    """A light base where there can be one, else what `load_base_model` loads, with these weights.
    `text_activations`: the precision in which it is to compute hidden states of whole texts.

    Raises what that raises, and ConfigError where C++ does not multiply its weights so.
    """
    try:
        base = light_base(name, dtype, device, revision, weights, check)
        if text_activations != FLOAT32:
            base.read_texts_in(text_activations)
        return base
    except (Unsupported, CheckpointError) as reason:  # loading tells what is wrong with it
        loaded = load_base_model(name, dtype=dtype, device=device, revision=revision, check=check)
        if text_activations != FLOAT32:
            why = f"{name!r} has none here ({reason})"
            raise needed(text_activations, "quantised weights in C++", why, QUANTISED) from reason
        return with_weights(loaded, weights)


@contextmanager
def _files_read() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # as in `from_pretrained`, which will tell
        raise Unsupported(f"its files cannot be read: {error}") from error


def light_base(
    name: str, dtype: str, device: str, revision: str | None, weights: str, check: bool
) -> PackedBase:
    """The light base of a model. Raises Unsupported where there can be none, CheckpointError."""
    chosen_device = pick_device(device)
    if chosen_device.type != "cpu" or requested_dtype(dtype, chosen_device) != torch.float32:
        raise Unsupported("the C++ kernels compute in float32 on a CPU only")
    if os.environ.get(kernels.OFF_SWITCH) == "0":
        raise Unsupported("the C++ kernels are off")
    quiet_transformers()
    source, where = resolve(name, weights=False)
    if source not in SOURCES:
        raise Unsupported(f"its weights are {source}")
    console.stage("reading the model")
    with _files_read():
        config, folder = config_and_folder(where, source, revision)
    if (
        config.get_text_config() is not config
        or families.why_impossible(config)
        or (families.needs_chains(config))
    ):
        raise Unsupported("it is more than a text model, or none that trees can be verified on")
    if getattr(config, "quantization_config", None) is not None:
        raise Unsupported("its checkpoint is quantised")
    reference = LayerwiseReference(whole_name(name, source), revision, weights)
    try:
        return _packed_base(name, source, folder, config, revision, weights, check, reference)
    except BaseException:  # Ctrl-C too
        reference.stop()
        raise


def _packed_base(
    name: str, source: str, folder: Path, config: Any, revision: str | None, weights: str,
    check: bool, reference: LayerwiseReference,
) -> PackedBase:  # fmt: skip
    """`light_base` of what is on this machine. `reference`: computes while the model is packed."""
    paths = drawn_texts(config.vocab_size).paths()
    packed = packed_model(
        gguf_source(name) or folder, config, weights, check, begun=lambda: reference.begin(paths)
    )
    with _files_read():
        tokenizer = tokenizer_of(str(folder), None, quiet=True)
    pairs = zip(families.cached_windows(config), packed.windows, strict=False)
    if any(cached and cached < (seen or inf) for cached, seen in pairs):
        raise Unsupported("transformers' KV cache keeps less than its layers attend to")
    info = BaseModelInfo(
        name=whole_name(name, source), revision=revision, source=source, quantized=False,
        dtype="float32", device="cpu", **packed.info,
    )  # fmt: skip
    if tokenizer is None:
        console.note(f"{folder} {NO_TOKENIZER}")
    settings = generation_config_of(folder, config)
    return PackedBase(packed, config, settings, tokenizer, info, check, reference)
