"""A base of which only the config is there: its shapes, on torch's meta device, without weights."""

from pathlib import Path
from typing import Any

import torch

from medusa_kit.base.files import check_readable, resolve, stored_config
from medusa_kit.base.logit_scale import LogitScale
from medusa_kit.base.model import BaseModel, BaseModelInfo
from medusa_kit.base.placement import DTYPES
from medusa_kit.base.remembered_configs import own_config
from medusa_kit.base.text_part import causal_model
from medusa_kit.errors import CheckpointError
from medusa_kit.settings.recipe import BaseSection

WEIGHTS = ("*.safetensors", "*.bin")


def has_weights(name: str, revision: str | None) -> bool:
    """Whether a base's weights are on this machine, so that no large download is needed."""
    source, location = resolve(name, weights=False)
    if source == "hub":
        from transformers.utils import cached_file

        try:
            found = cached_file(location, "config.json", revision=revision, local_files_only=True)
        except OSError:
            return False
        location = str(Path(found).parent)
    elif source != "folder":
        return True
    return any(any(Path(location).glob(pattern)) for pattern in WEIGHTS)


class DescribedBase(BaseModel):
    """Has shapes and no numbers: for counting weights alone."""

    def __init__(self, options: BaseSection) -> None:
        """Raises CheckpointError where there is no config, or none of a causal model."""
        check_readable(options.model, options.revision)
        config = stored_config(options.model, options.revision)
        assert config is not None
        try:
            with torch.device("meta"):
                model: Any = causal_model(own_config(config))
        except Exception as error:  # families differ in what they do on the meta device
            raise CheckpointError(
                f"no model can be described from the config of {options.model!r}: {error}",
                hint="load it once, then the dry run measures it",
            ) from error
        self._model, self.number = model.to(DTYPES[options.dtype]).requires_grad_(False), 0
        config = model.config.get_text_config()  # the class fills in what a file leaves out
        self.tokenizer, self.config, self.scales = None, config, {}
        self.scale_logits = LogitScale.of(config)
        vocab_size, hidden_size = model.get_output_embeddings().weight.shape
        self.info = BaseModelInfo(
            options.model, options.revision, "hub", config.model_type, hidden_size, vocab_size,
            config.num_hidden_layers, getattr(config, "max_position_embeddings", 2048), True, False,
            options.dtype, "meta", sum(p.numel() for p in model.parameters()), "",
        )  # fmt: skip
