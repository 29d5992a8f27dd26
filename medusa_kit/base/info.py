"""What is told of a base model."""

from dataclasses import asdict, dataclass
from typing import Any

from medusa_kit.settings.engine import allowed

CHECKPOINT, INT8 = allowed("weights")  # whose numbers, see infer/cpu/int8_weights.py


@dataclass(frozen=True)
class BaseModelInfo:
    """A description of the model, printed by the CLI and stored with everything made from it."""

    name: str
    revision: str | None
    source: str  # hub | folder | gguf | embedded | memory
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
