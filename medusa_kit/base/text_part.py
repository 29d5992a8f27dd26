"""The language model inside a multimodal checkpoint, on its own.

Its config is the checkpoint's `text_config`, to which is added what the whole's config alone says
(`text_part_config`). Its weights are read by transformers' class of the whole, which knows their
names, without its other parts (towers for images and sound, projectors): no tensor of these is
read. The model is then transformers' own class for such text (`Gemma3ForCausalLM`), or the whole's
text model with the whole's output embedding where transformers has none (Qwen-VL).

Shapes: B batch, T tokens, V vocabulary.
"""

import copy
import functools
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from medusa_kit.errors import IncompatibleBaseError

WHOLE_KEY = "medusa_kit_whole"  # in the config of a text part: the whole's model type
CARRIED = ("generation_config", "hf_quantizer", "is_quantized", "quantization_method",
           "hf_device_map", "is_loaded_in_4bit", "is_loaded_in_8bit")  # fmt: skip

_patching = threading.RLock()


def whole_class(config: Any) -> Any | None:
    """transformers' class of a multimodal model with this config; None where it is none."""
    if config.get_text_config() is config:
        return None
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING as WHOLES

    return WHOLES.get(type(config), None)


def text_part_config(config: Any) -> Any:
    """The config of the text part of a multimodal model; that of any other model as it is."""
    whole = whole_class(config)
    if whole is None:
        return config
    text = copy.deepcopy(config.get_text_config())
    text.tie_word_embeddings = _tied(whole, config)
    _complete(text, config)
    return text


def _tied(whole: Any, config: Any) -> bool:
    """Whether the output embedding is the input's: as the config says whose class ties them."""
    source = config if getattr(whole, "_tied_weights_keys", None) else config.get_text_config()
    return bool(getattr(source, "tie_word_embeddings", False))


def _complete(text: Any, config: Any) -> None:
    setattr(text, WHOLE_KEY, config.model_type)
    text.dtype = getattr(text, "dtype", None) or getattr(config, "dtype", None)
    if getattr(config, "quantization_config", None) is not None:
        text.quantization_config = config.quantization_config


def causal_model(config: Any) -> Any:
    """transformers' causal language model of a config, as `text_part_config` gives it."""
    from transformers import AutoModelForCausalLM

    if not hasattr(config, WHOLE_KEY):
        return AutoModelForCausalLM.from_config(config)
    return causal_class(config)._from_config(config)


def causal_class(config: Any) -> Any:
    """transformers' class of causal language models for the config of a text part; one made for it
    where there is none."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    known = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if known is not None and known.config_class is type(config):
        return known
    decoder = MODEL_MAPPING.get(type(config), None)
    if decoder is None:
        raise IncompatibleBaseError(
            f"transformers has no text model for {config.model_type!r} alone",
            hint="docs/models.md lists the multimodal families whose text part is tested",
        )
    return _with_output(decoder)


@functools.cache
def _with_output(decoder: Any) -> Any:
    """A causal language model around a family's text model, of the family's own base class."""
    from transformers import GenerationMixin

    family = next(kind for kind in decoder.__mro__[1:] if kind.__name__.endswith("PreTrainedModel"))
    named = {
        "__module__": decoder.__module__,  # transformers reads there what the class can do
        "__init__": functools.partialmethod(_build, family, decoder),
        "forward": _forward,
        "base_model_prefix": "model",
        "_tied_weights_keys": {"lm_head.weight": "model.embed_tokens.weight"},
    }
    name = decoder.__name__.removesuffix("Model") + "ForCausalLM"
    return type(name, (family, GenerationMixin), named)


def _build(self: Any, family: Any, decoder: Any, config: Any) -> None:
    family.__init__(self, config)  # not by super(): that of a subclass would come back here
    self.model = decoder(config)
    self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    self.post_init()


def _forward(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    logits_to_keep: int | Tensor = 0,
    **options: Any,
) -> Any:
    """The forward of transformers' causal language models, without a loss."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    output = self.model(
        input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
        past_key_values=past_key_values, inputs_embeds=inputs_embeds, **options,
    )  # fmt: skip
    counted = isinstance(logits_to_keep, int)
    kept = slice(-logits_to_keep, None) if counted else logits_to_keep
    return CausalLMOutputWithPast(
        logits=self.lm_head(output.last_hidden_state[:, kept]),
        past_key_values=output.past_key_values,
        hidden_states=output.hidden_states,
        attentions=output.attentions,
    )


def load_causal(
    path: str, config: Any, *, revision: str | None = None, **options: Any
) -> tuple[Any, Any]:
    """(causal language model, transformers' information about loading it) of the checkpoint at
    `path`, whose config `text_part_config` gave. `options`: of `from_pretrained`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options |= {"revision": revision, "output_loading_info": True}
    if not hasattr(config, WHOLE_KEY):
        return AutoModelForCausalLM.from_pretrained(path, **options)
    own_config = AutoConfig.from_pretrained(path, revision=revision)
    if (multimodal := whole_class(own_config)) is None:  # a text part that was saved alone
        return causal_class(own_config).from_pretrained(path, config=own_config, **options)
    whole, loading_info = _bare_class(multimodal).from_pretrained(
        path, config=own_config, **options
    )
    model = text_part_of(whole)
    _complete(model.config, own_config)
    if type(model).forward is _forward:
        _check_same_logits(whole, model)
    return model, loading_info


@torch.no_grad()
def _check_same_logits(whole: Any, model: Any) -> None:
    """Raises IncompatibleBaseError for a whole that does more to its text than `_forward`, such as
    scaling logits."""
    ids_BT = torch.arange(8, device=model.device)[None] % model.config.vocab_size
    try:
        expected_BTV = whole.eval()(ids_BT, use_cache=False).logits
    except Exception as error:  # of code that was written for the whole
        raise _no_part(whole, f"the whole cannot run without its towers: {error}") from error
    part_BTV = model.eval()(ids_BT, use_cache=False).logits
    if not torch.equal(part_BTV, expected_BTV):
        difference = float((part_BTV - expected_BTV).abs().max())
        raise _no_part(
            whole, f"its text model alone gives logits that differ by up to {difference:.1e}"
        )


def _no_part(whole: Any, why: str) -> IncompatibleBaseError:
    return IncompatibleBaseError(
        f"the text part of {whole.config.model_type!r} cannot be taken out of it: {why}",
        hint="docs/models.md lists the multimodal families whose text part is tested",
    )


@functools.cache
def _bare_class(whole: Any) -> Any:
    """The class of a multimodal model that is built without anything but its text part.

    It goes by the same name, by which transformers finds the names of its weights.
    """

    def build(self: Any, config: Any, *more: Any, **options: Any) -> None:
        try:
            whole.__init__(self, config, *more, **options)
        except ImportError:  # a library that only a tower needs
            with _no_towers(config):
                whole.__init__(self, config, *more, **options)
        _leave_out(self)

    return type(whole.__name__, (whole,), {"__module__": whole.__module__, "__init__": build})


@contextmanager
def _no_towers(config: Any) -> Iterator[None]:
    """A context in which transformers builds empty modules in place of this config's towers. What
    other threads build meanwhile is left alone."""
    from transformers import AutoModel

    text, own = config.get_text_config(), threading.get_ident()

    def from_config(config: Any, **options: Any) -> Any:
        if config is text or threading.get_ident() != own:
            return original(config, **options)
        return nn.Module()

    with _patching:
        original = AutoModel.from_config
        AutoModel.from_config = from_config
        try:
            yield
        finally:
            AutoModel.from_config = original


def _leave_out(whole: Any) -> None:
    """Drop what is neither the text model nor the output embedding, nor holds them."""
    kept = (whole.get_decoder(), whole.get_output_embeddings())
    for owner in [module for module in whole.modules() if _holds(module, kept)]:
        owner._parameters.clear()
        owner._buffers.clear()
        for name, child in list(owner.named_children()):
            if child not in kept and not _holds(child, kept):
                delattr(owner, name)
    expanded = whole.get_expanded_tied_weights_keys(all_submodels=True)
    whole.all_tied_weights_keys = expanded


def _holds(module: nn.Module, kept: tuple[nn.Module, ...]) -> bool:
    inside = set(module.modules())
    return module not in kept and any(kept_module in inside for kept_module in kept)


def stored_names(config: Any, names: Iterable[str]) -> dict[str, str]:
    """A tensor's name in the text part -> its name in the file, of a multimodal checkpoint with
    this config whose tensors have these `names`. What transformers converts as it reads, such as
    experts that are stored one by one, is left out.

    Call it where parameters go to the meta device.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    if (multimodal := whole_class(config)) is None:
        return {name: name for name in names}
    whole = _bare_class(multimodal)(config)
    changes = get_model_conversion_mapping(whole)
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    renamings = [change for change in changes if not isinstance(change, WeightConverter)]
    whole_tensors, stored_by_name = whole.state_dict(), dict[str, str]()
    by_module = {module: name for name, module in whole.named_modules()}
    prefixes = _prefixes(whole, by_module)
    for stored in names:
        name, converted = rename_source_key(
            stored, renamings, converters, whole.base_model_prefix, whole_tensors
        )
        if name not in whole_tensors and stored in whole_tensors:
            name, converted = stored, None
        for prefix, part_prefix in prefixes.items():
            if converted is None and name in whole_tensors and name.startswith(f"{prefix}."):
                stored_by_name[part_prefix + name.removeprefix(f"{prefix}.")] = stored
    return stored_by_name


def _prefixes(whole: Any, by_module: dict[nn.Module, str]) -> dict[str, str]:
    """Prefixes of names in the whole -> those in its text part."""
    decoder, output = whole.get_decoder(), whole.get_output_embeddings()
    if decoder.get_output_embeddings() is output:
        return {by_module[decoder]: ""}
    text = causal_class(decoder.config)
    return {by_module[decoder]: f"{text.base_model_prefix}.", by_module[output]: "lm_head."}


def in_memory(model: Any) -> Any:
    """Return a multimodal model's text part, which shares its modules; any other model itself."""
    kind = whole_class(model.config) if hasattr(model.config, "get_text_config") else None
    return text_part_of(model) if kind is not None and isinstance(model, kind) else model


def text_part_of(whole: Any) -> Any:
    """The text part of a multimodal model in memory, which shares its modules."""
    decoder, output = whole.get_decoder(), whole.get_output_embeddings()
    text = decoder.config
    text.tie_word_embeddings = output.weight is decoder.get_input_embeddings().weight
    if decoder.get_output_embeddings() is output:  # Llama 4's is a causal language model
        model = decoder
    else:
        with torch.device("meta"):
            model = causal_class(text)._from_config(text)
        setattr(model, model.base_model_prefix, decoder)
        model.set_output_embeddings(output)
    for name in CARRIED:
        if name in vars(whole):
            setattr(model, name, getattr(whole, name))
    return model
