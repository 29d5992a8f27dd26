"""What a report is about: what was measured, with which weights and on which machine.

torch is not imported here, since a bench of a server alone does without.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict

from medusa_kit.settings.engine import FLOAT32
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.version import __version__


class About(BaseModel):
    """What a report was measured with, as its file has it, and any further fields. Earlier versions
    wrote less."""

    model_config = ConfigDict(extra="allow")
    prompts: str | None = None  # what they are called
    base: dict[str, Any] = {}
    # What the base's config says of how it computes, and how it encodes text (base/origin.py).
    base_config: dict[str, Any] | None = None
    encoding: str | None = None
    setup: dict[str, Any] = {}
    # Digests of the heads, by name; of earlier versions the SHA-256 of their file.
    heads: dict[str, str | None] | str | None = None
    trees: dict[str, str] = {}  # digests of the trees in use, by the name of the heads
    activations: str = FLOAT32
    lossy: bool = False
    sampling: dict[str, Any] = {}

    @classmethod
    def of(cls, prompts: str, sampling: SamplingParams, **more: Any) -> "About":
        drawn = {"temperature": sampling.temperature, "seed": sampling.seed}
        return cls.model_validate({"prompts": prompts, "sampling": drawn,
                      "setup": {"medusa_kit": __version__}, **more})  # fmt: skip

    @property
    def digests(self) -> dict[str, str]:
        """The digests of heads by name, as far as known."""
        heads = self.heads if isinstance(self.heads, dict) else {"": self.heads}
        return {name: digest for name, digest in heads.items() if digest is not None}

    @property
    def sampled(self) -> str:
        """How tokens were chosen."""
        if not self.sampling.get("temperature"):
            return "greedy"
        return f"temperature {self.sampling['temperature']}, seed {self.sampling['seed']}"

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True)
