"""Which parameter of a transformers model a tensor of a GGUF file belongs to."""

from typing import Any

from medusa_kit.base.gguf_files.check import ARCHITECTURE
from medusa_kit.base.gguf_files.config import FREQUENCIES, LONG, SHORT
from medusa_kit.base.gguf_files.parts import GGUFModel

IN_CONFIG = (FREQUENCIES, LONG, SHORT)  # tensors that became part of the config


def tensor_names(model: GGUFModel, skeleton: Any) -> tuple[Any, dict[str, str]]:
    """(transformers' processor, which undoes the converter's changes; parameters by tensors).

    Two tensors may belong to one parameter: the gates and the other projections of all experts.
    """
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    config = skeleton.config.get_text_config()
    kind = TENSOR_PROCESSORS.get(str(model.values[ARCHITECTURE]), TensorProcessor)
    if config.model_type == "mixtral":
        kind = _mixtral_processor()
    processor = kind(config=config.to_dict())
    model_type = "llama" if config.model_type in ("mistral", "mixtral") else None
    names = get_gguf_hf_weights_map(_Whole(skeleton), processor, model_type=model_type)
    tied = set(getattr(skeleton, "all_tied_weights_keys", None) or ())
    if set(skeleton.state_dict()) - tied - set(names.values()):
        names = get_gguf_hf_weights_map(skeleton, processor, model_type=model_type)
    # Experts are parameters without an ending in transformers, and tensors with one in the file.
    return processor, {**names, **{f"{name}.weight": names[name] for name in names}}


class _Whole:
    """A model without its parts: transformers looks for names in each module again, for families
    that need it, and that takes seconds."""

    def __init__(self, model: Any) -> None:
        self.config, self.state_dict = model.config, model.state_dict

    def named_children(self) -> tuple[()]:
        return ()


def _mixtral_processor() -> Any:
    from transformers.modeling_gguf_pytorch_utils import (
        LlamaTensorProcessor,
        Qwen2MoeTensorProcessor,
    )

    class MixtralProcessor(LlamaTensorProcessor):
        """Llama's order of queries and keys, and experts as Qwen's."""

        perform_fallback_tensor_mapping = Qwen2MoeTensorProcessor.perform_fallback_tensor_mapping
        preprocess_name = Qwen2MoeTensorProcessor.preprocess_name
        HF_EXPERT_RENAME_PATTERN = Qwen2MoeTensorProcessor.HF_EXPERT_RENAME_PATTERN
        HF_MOE_W13_PATTERN = Qwen2MoeTensorProcessor.HF_MOE_W13_PATTERN

    return MixtralProcessor
