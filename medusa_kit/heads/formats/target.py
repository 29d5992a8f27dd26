"""What writers share: the base, its name, what a format can hold, and the files to write.

Shapes: D hidden, V vocabulary, R rows of a vocabulary matrix.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_kit.base.model import BaseModel
from medusa_kit.errors import CheckpointError, ConfigError
from medusa_kit.heads.formats.engines import scores_some
from medusa_kit.heads.formats.neutral import ForeignHeads

LAYOUTS = ("auto", "v1", "v2")


@dataclass
class Written:
    """The folder to write: config.json, weight files, an index, files copied from the source.

    `metadata`: of weight files; transformers requires its format."""

    config: dict[str, Any]
    files: dict[str, dict[str, Tensor]]
    index: dict[str, str] | None = None
    copies: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    command: list[str] | None = None
    metadata: dict[str, str] = field(default_factory=lambda: {"format": "pt"})


@dataclass(frozen=True)
class Target:
    """The format to write and the heads' base. `layout`: auto, v1 or v2, for formats with two.

    `base_name`: the base's name in the config. `loadable_base`: its folder or Hub id for an
    engine's command; None where another engine could not load it.
    """

    format: str
    folder: Path
    base: BaseModel | None
    base_name: str | None
    layout: str = "auto"
    loadable_base: str | None = None

    def required_base_name(self) -> str:
        if self.base_name is None:
            raise ConfigError(
                f"a {self.format} config names the base model, and the heads do not name theirs",
                hint="give it as --base-name",
            )
        return self.base_name

    def matrices(self, heads: ForeignHeads) -> list[Tensor] | Tensor:
        """The heads' matrices; for heads without any, the base's rows as one for all."""
        if heads.matrices is not None:
            return heads.matrices
        if self.base is None:
            raise ConfigError(
                f"the heads use the base's own vocabulary matrix, and {self.format} has to hold a "
                "copy of it",
                hint="name the base as --model",
            )
        return base_rows(self.base, heads.token_map_R, heads.dtype)

    def full_matrices(self, heads: ForeignHeads) -> list[Tensor]:
        """One [V, D] a head. Raises CheckpointError for heads that score only some tokens."""
        if heads.token_map_R is not None:
            raise scores_some(len(heads.token_map_R), self.format, heads.base_name)
        matrices = self.matrices(heads)
        return matrices if isinstance(matrices, list) else [matrices] * heads.num_heads

    def version(self, heads: ForeignHeads, one_block: bool) -> int:
        """2 (blocks alone) or 1 (a matrix for each head), as `layout` and the heads require."""
        possible = heads.matrices is None and heads.token_map_R is None
        fits = possible and (heads.num_blocks == 1 or not one_block)
        if self.layout == "v2":
            self.require_version_2(heads, one_block)
        return 2 if self.layout == "v2" or (self.layout == "auto" and fits) else 1

    def require_version_2(self, heads: ForeignHeads, one_block: bool) -> None:
        """Raises CheckpointError where blocks alone do not make up these heads."""
        if heads.token_map_R is not None:
            self.full_matrices(heads)
        if heads.matrices is not None:
            raise CheckpointError(
                f"version 2 of {self.format} has no vocabulary matrices; these heads have their "
                "own, " + ("and no base was named to compare them with" if self.base is None
                           else "different from the base's"),
                hint="write version 1" + ("" if self.base else ", or name the base as --model"),
            )  # fmt: skip
        if one_block and heads.num_blocks != 1:
            raise CheckpointError(
                f"version 2 of {self.format} has one block a head; these have {heads.num_blocks}",
                hint="write version 1: --layout v1 --model BASE",
            )

    def sizes(self, heads: ForeignHeads) -> dict[str, int]:
        """hidden_size and vocab_size of the base."""
        V = None if self.base is None else self.base.info.vocab_size
        if V is None:
            V = heads.vocab_size
        if V is None and heads.token_map_R is None and heads.matrices is not None:
            V = len(heads.matrix_list()[0])
        if V is None:
            raise ConfigError(
                f"a {self.format} config states the vocabulary size, and the heads do not",
                hint="name the base as --model",
            )
        return {"hidden_size": heads.hidden_size, "vocab_size": V}


def heads_config(heads: ForeignHeads) -> dict[str, int]:
    return {"medusa_num_heads": heads.num_heads, "medusa_num_layers": heads.num_blocks}


def base_rows(base: BaseModel, ids_R: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Rows of the base's output embedding on the CPU, in `dtype` where that changes no number.

    Raises CheckpointError where the output embedding has a bias, which no format can hold.
    """
    bias = getattr(base.own_output, "bias", None)
    if bias is not None and bool(bias.any()):
        raise CheckpointError(
            f"the output embedding of {base.info.name!r} has a bias, and no vocabulary matrix of a "
            "Medusa format has one"
        )
    weight_VD = base.own_output.weight.detach().cpu()
    weight_RD = weight_VD if ids_R is None else weight_VD[ids_R.cpu()]
    narrow_RD = weight_RD.to(dtype)
    return narrow_RD if same_numbers(narrow_RD, weight_RD) else weight_RD


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers, whatever they are stored in."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.shape == b.shape and torch.equal(a.to(dtype), b.to(dtype))
