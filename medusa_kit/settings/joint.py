"""The section `joint` of a training recipe: Medusa-2, base and heads together."""

from typing import Literal

from pydantic import Field, model_validator

from medusa_kit.settings.schema import Section


class LoraSection(Section):
    """Adapters of the base (LoRA, arXiv 2106.09685), through peft."""

    rank: int = Field(default=32, ge=1)
    alpha: float = Field(default=16, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    targets: list[str] | Literal["all-linear"] = "all-linear"  # names of modules, or their ends


class JointSection(Section):
    """Medusa-2 (arXiv 2401.10774, §2.2.2): heads and base together."""

    moves: Literal["full", "lora", "qlora"] = "lora"  # what of the base is trained
    heads_weight: float = Field(default=0.2, gt=0)  # of the heads' loss, relative to the base's
    schedule: Literal["constant", "linear", "sine"] = "constant"  # how that weight grows
    heads_learning_rate_factor: float = Field(default=4.0, gt=0)  # times train.learning_rate
    distill_share: float = Field(default=1.0, ge=0, le=1)  # of the base's loss: KL to the original
    distill_top: int = Field(default=64, ge=1)  # top tokens of the original that are kept
    teacher: Literal["live", "cached"] | None = None  # live: the adapters switched off
    gradient_checkpointing: bool = False
    save_merged: bool = False  # besides the adapter, a whole model
    lora: LoraSection = LoraSection()

    @model_validator(mode="after")
    def _full_training_needs_a_cached_teacher(self) -> "JointSection":
        if self.moves == "full" and self.teacher == "live":
            raise ValueError(
                "moves 'full' with teacher 'live': the original is gone once the base moves; "
                "use teacher 'cached', or moves 'lora'"
            )
        if self.moves == "full" and self.save_merged:
            raise ValueError("moves 'full' with save_merged: there is no adapter to merge")
        return self
