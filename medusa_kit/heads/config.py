"""The configuration of heads: all that is needed to rebuild them and to refuse the wrong base.

Shapes: V vocabulary, R columns of a reduced projection.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor

from medusa_kit.base.origin import BASE, CONFIG
from medusa_kit.base.tokenizer.encoding_digest import ENCODING
from medusa_kit.errors import ConfigError
from medusa_kit.version import __version__

CONFIG_NAME = "config.json"
FORMAT = "medusa-kit-heads"
Kind = Literal["medusa", "hydra", "recurrent"]
KINDS: tuple[Kind, ...] = get_args(Kind)
READING_PATHS: tuple[Kind, ...] = ("hydra", "recurrent")
Projection = Literal["shared", "own", "reduced"]
PROJECTIONS: tuple[Projection, ...] = get_args(Projection)


@dataclass(frozen=True)
class HeadsConfig:
    """Written as config.json beside the weights.

    reduced_size  how many tokens a head scores, where not all: rows of the base's matrix, or
                  (`own`, in heads of other engines) of each head's
    kind    what a head reads besides the hidden state: nothing (`medusa`), or all tokens on the
            path before its own, with a network for each head (`hydra`) or one that all share
            (`recurrent`)
    encoding  how text was encoded that they learned (base/tokenizer/encoding_digest.py); None: it
            is not known
    base_config  what the base's config said of how it computes (base/origin.py); None: it is not
            known
    mlp_size  units of each block of the network that `recurrent` heads share; None for other kinds
    """

    num_heads: int
    num_blocks: int
    projection: Projection
    hidden_size: int
    vocab_size: int
    reduced_size: int | None
    base_model_name: str
    base_model_revision: str | None
    base_model_type: str
    base_fingerprint: str
    base_quantized: bool = False
    kind: Kind = "medusa"
    mlp_size: int | None = None
    encoding: str | None = None
    base_config: dict[str, Any] | None = field(default=None, hash=False)
    kit_version: str = __version__

    @property
    def reads_path(self) -> bool:
        """Whether heads read tokens besides the hidden state."""
        return self.kind in READING_PATHS

    def num_read(self, k: int) -> int:
        """How many tokens of the path, from the root on, head k reads."""
        return k + 1 if self.reads_path else 0

    @property
    def origin(self) -> dict[str, Any]:
        """What it says of the base that the heads learned (base/origin.py)."""
        return {BASE: self.base_fingerprint, CONFIG: self.base_config, ENCODING: self.encoding}

    def as_dict(self) -> dict[str, Any]:
        """What is written; what heads lack is left out, as before there was any."""
        fields = asdict(self)
        for key in ("mlp_size", "encoding", "base_config"):
            if fields[key] is None:
                del fields[key]
        return fields


def check_mlp_size(kind: str, mlp_size: Any) -> None:
    """Raises ConfigError for a size that is missing, out of place or no positive number."""
    if kind != "recurrent":
        if mlp_size is not None:
            raise ConfigError(
                f"mlp_size is {mlp_size!r} with heads of kind {kind!r}: only recurrent heads "
                "have one"
            )
    elif type(mlp_size) is not int or mlp_size < 1:
        raise ConfigError(f"mlp_size is {mlp_size!r}, expected a whole number from 1 on")


def check_reduced_ids(projection: str, reduced_ids: Tensor | None, vocab_size: int) -> None:
    """Raises ConfigError for ids that are missing, out of place, out of range or unsorted."""
    fits = {"shared": reduced_ids is None, "reduced": reduced_ids is not None}
    if not fits.get(projection, True):
        raise ConfigError(
            f"projection {projection!r} with {'no' if reduced_ids is None else 'given'} reduced "
            "ids: reduced ids belong to the reduced projection, and it needs them"
        )
    if reduced_ids is None:
        return
    inside = len(reduced_ids) > 0 and reduced_ids[0] >= 0 and reduced_ids[-1] < vocab_size
    if not inside or (reduced_ids.diff() <= 0).any():
        raise ConfigError(
            f"reduced ids must be ascending, unique and within 0..{vocab_size - 1}",
            hint="sort them with torch.unique",
        )
