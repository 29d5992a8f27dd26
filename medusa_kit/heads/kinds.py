"""Medusa heads (arXiv 2401.10774, §2.1.1): K predictions further ahead from one hidden state.

heads[k], k from 0, reads the hidden state at token t and predicts token t + 2 + k; token t + 1, the
root, is the base model's own. A head is L residual blocks x + SiLU(Wx + b), W and b zero at the
start, then a projection to the vocabulary, so that an untrained head equals the base's own output
embedding.

Kinds: a `medusa` head reads the hidden state alone. A `hydra` one (Hydra, arXiv 2402.05109, §3)
also reads all tokens before its own, t + 1 .. t + 1 + k: better draft tokens, one small pass for
each depth of the tree. Their first block is x + SiLU(W[x; e] + b), e being the base's input
embeddings of those tokens, each scaled to unit RMS.

Heads of kind `recurrent` read the same tokens as `hydra` ones, but share one network (blocks.py),
which carries a state along the path (ReDrafter, arXiv 2403.09919): head k goes on from the state
that head k - 1 left, starting from the hidden state. So they are smaller, and each learns from the
targets of all. Their output is unit(u) * rms(x) * gain[k], u being the state.

Projections: `shared`, the base's output embedding itself; `reduced`, chosen rows of it (nothing to
save but their ids); `own`, a trainable copy for each head (of chosen rows, where ids are given).

Shapes: D hidden, V vocabulary, K heads, R columns of the projection (V, or the reduced ids),
X any leading shape, B batch, C candidates kept for each head, J tokens of the path, E numbers read
of these tokens, N nodes of a tree.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_kit.base.files import lasting_name
from medusa_kit.base.mapped import copy_mapped
from medusa_kit.base.model import BaseModel, plain_linear
from medusa_kit.errors import ConfigError, Live, unknown_value
from medusa_kit.heads.blocks import (
    RecurrentNetwork,
    Walk,
    copy_of_embedding,
    mlp_size_of,
    residual_blocks,
    rms,
)
from medusa_kit.heads.config import (
    KINDS,
    PROJECTIONS,
    HeadsConfig,
    Kind,
    Projection,
    check_mlp_size,
    check_reduced_ids,
)
from medusa_kit.heads.digest import StoredDigest, heads_digest
from medusa_kit.heads.guesser import Guesser, Guesses
from medusa_kit.heads.order import best_columns


class MedusaHeads(Live, nn.Module):
    """K heads on one base model. Build with `for_base`, or load with `load_heads`."""

    recurrent: RecurrentNetwork | None
    column_ids: Tensor | None
    _columns_V: Tensor | None

    def __init__(
        self, config: HeadsConfig, base: BaseModel, reduced_ids: Tensor | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self._base = (base,)  # in a tuple, so that the base is no submodule of the heads
        factory = {"device": base.device, "dtype": base.dtype}
        self.blocks, self.recurrent = nn.ModuleList(), None  # one or the other
        if config.kind == "recurrent":
            self.recurrent = RecurrentNetwork(config, base.embedding_size, **factory)
        else:
            self.blocks.extend(
                residual_blocks(config, config.num_read(k) * base.embedding_size, factory)
                for k in range(config.num_heads)
            )
        self.projections = nn.ModuleList()
        ids_R = None if reduced_ids is None else reduced_ids.to(base.device, torch.int64)
        if config.projection == "own":
            copies = (copy_of_embedding(base, ids_R) for _ in range(config.num_heads))
            self.projections.extend(copies)
        self.register_buffer("column_ids", ids_R)
        self.guesser: Guesser | None = None
        self.stored: StoredDigest | None = None  # of heads that were read from a file
        self._bind_columns()

    @classmethod
    def for_base(
        cls,
        base: BaseModel,
        num_heads: int = 4,
        num_blocks: int = 1,
        projection: Projection = "shared",
        reduced_ids: Tensor | None = None,
        kind: Kind = "medusa",
        mlp_size: int | None = None,
    ) -> "MedusaHeads":
        """Untrained heads for `base`. `reduced_ids`: token ids for `reduced`, ascending, unique;
        `mlp_size`: of `recurrent` heads, by default that of the base's layers.

        Raises ConfigError for numbers below 1, unknown kinds and wrong ids.
        """
        if num_heads < 1 or num_blocks < 1:
            raise ConfigError(
                f"num_heads={num_heads}, num_blocks={num_blocks}: both must be at least 1"
            )
        for what, value, known in (
            ("projection", projection, PROJECTIONS),
            ("head kind", kind, KINDS),
        ):
            if value not in known:
                raise unknown_value(what, value, known)
        check_reduced_ids(projection, reduced_ids, base.info.vocab_size)
        if kind == "recurrent" and mlp_size is None:
            mlp_size = mlp_size_of(base)
        check_mlp_size(kind, mlp_size)
        config = HeadsConfig(
            num_heads=num_heads,
            num_blocks=num_blocks,
            projection=projection,
            hidden_size=base.info.hidden_size,
            vocab_size=base.info.vocab_size,
            reduced_size=None if reduced_ids is None else len(reduced_ids),
            base_model_name=lasting_name(base.info.name, base.info.source),
            base_model_revision=base.info.revision,
            base_model_type=base.info.model_type,
            base_fingerprint=base.info.fingerprint,
            base_quantized=base.info.quantized,
            kind=kind,
            mlp_size=mlp_size,
            encoding=base.encoding,
            base_config=base.computation,
        )
        return cls(config, base, reduced_ids)

    def with_heads(self, num_heads: int) -> "MedusaHeads":
        """So many recurrent heads: the first of its own and, beyond them, copies of the last, on
        the network that all share. Other kinds: as many as there are."""
        if num_heads == self.num_heads:
            return self
        assert self.recurrent is not None, "only recurrent heads can become more or fewer"
        source = [min(k, self.num_heads - 1) for k in range(num_heads)]
        config, tensors = replace(self.config, num_heads=num_heads), self.state_dict()
        heads = MedusaHeads(config, self.base, self.column_ids).to(tensors["recurrent.gain"].dtype)
        tensors["recurrent.gain"] = tensors["recurrent.gain"][source]
        for k, own in enumerate(self.projections):
            for name, value in own.state_dict().items():
                del tensors[f"projections.{k}.{name}"]
                copies = [to for to, like in enumerate(source) if like == k]
                tensors.update({f"projections.{to}.{name}": value for to in copies})
        heads.load_state_dict(tensors)
        return heads

    @property
    def base(self) -> BaseModel:
        return self._base[0]

    @property
    def num_heads(self) -> int:
        return self.config.num_heads

    @property
    def digest(self) -> str:
        """What tells these heads from others, in files that are made from them."""
        stored = None if self.stored is None else self.stored.of(self)
        return stored or heads_digest(self.config, self.state_dict())

    def use(self, tensors: dict[str, Tensor]) -> "MedusaHeads":
        """Take these numbers, as a file holds them; frozen, and ready to draft."""
        copy_mapped(self)  # the columns that it was made with
        self.load_state_dict(tensors)
        self.requires_grad_(False)
        self.stored = StoredDigest(self, heads_digest(self.config, tensors))
        return self.eval()

    @property
    def num_bytes(self) -> int:
        """The memory that they take beside their base, packed copies included."""
        config, size = self.config, self.base.dtype.itemsize
        tensors = [*self.parameters(), *self.buffers(), self._columns_V]
        kept = sum(one.numel() * one.element_size() for one in tensors if one is not None)
        if config.projection == "reduced":  # the base's rows are gathered at first use
            kept += (config.reduced_size or 0) * config.hidden_size * size
        return kept + getattr(self.guesser, "num_bytes", 0)

    @property
    def one_pass(self) -> bool:
        """Whether all heads can run before any node of the tree but the root is filled."""
        return not self.config.reads_path

    def transform(
        self, hidden_XD: Tensor, k: int, path_XJ: Tensor | None = None, walk: Walk | None = None
    ) -> Tensor:
        """What head k makes of a row, before its projection: z_XD.

        path_XJ: token ids from the root on, at least as many as head k reads; not needed where it
        reads none. An id below 0 stands for no token; the output of such rows is meaningless.
        walk: of heads 0 to k along these paths, X being BQ; saves recurrent ones the steps before.
        """
        if self.recurrent is not None:
            return self._step_of(walk, hidden_XD, k, path_XJ)
        first, *others = list(self.blocks[k])  # type: ignore[call-overload]
        num_read, read_XE = self.config.num_read(k), None
        if num_read:
            assert path_XJ is not None, f"{self.config.kind} heads read the path"
            read_XE = self.base.token_embeddings(path_XJ[..., :num_read]).flatten(-2)
            read_XE = read_XE.to(hidden_XD.dtype)
        z_XD = first(hidden_XD, read_XE)
        for block in others:
            z_XD = block(z_XD)
        return z_XD

    def transforms(self, hidden_XD: Tensor, path_XJ: Tensor | None = None) -> Iterator[Tensor]:
        """`transform` of each head in turn, each step of a state computed only once."""
        walk = Walk()
        return (self.transform(hidden_XD, k, path_XJ, walk) for k in range(self.num_heads))

    def _step_of(
        self, walk: Walk | None, hidden_XD: Tensor, k: int, path_XJ: Tensor | None
    ) -> Tensor:
        assert self.recurrent is not None
        assert path_XJ is not None, f"{self.config.kind} heads read the path"
        state_XD, begun = hidden_XD, 0
        if walk is not None and walk.state_BQD is not None:
            state_XD, begun = walk.state_BQD, k
        for step in range(begun, k + 1):
            token_XE = self.base.token_embeddings(path_XJ[..., step]).to(hidden_XD.dtype)
            state_XD, z_XD = self.recurrent(state_XD, token_XE, step)
        if walk is not None:
            walk.state_BQD = state_XD
        return z_XD * rms(hidden_XD)

    def project(self, z_XD: Tensor, k: int) -> Tensor:
        """logits_XR of head k over the projection's columns, with the base's scale and soft cap."""
        if self.config.projection == "own":
            return self.base.scale_logits(plain_linear(self.projections[k], z_XD))
        if self.config.projection == "shared":
            return self.base.head_logits(z_XD)
        weight_RD, bias_R = self._reduced_rows(z_XD.dtype)
        return self.base.scale_logits(F.linear(z_XD, weight_RD, bias_R))

    def forward(self, hidden_XD: Tensor, first: int | None = None) -> Tensor:
        """logits_KXR of the `first` `medusa` heads (all) at once: for drafting, where X is few
        rows."""
        z_KXD = torch.stack([self.transform(hidden_XD, k) for k in range(first or self.num_heads)])
        if self.config.projection == "own":
            return torch.stack([self.project(z_XD, k) for k, z_XD in enumerate(z_KXD)])
        return self.project(z_KXD, 0)

    def candidates(self, hidden_BD: Tensor, count: int, first: int | None = None) -> Tensor:
        """The `count` likeliest token ids of each of the `first` `medusa` heads (all), best first:
        ids_KBC.

        Order: logit descending, then token id ascending, as calibration counts ranks.
        """
        guesses = self.quickly(range(first or self.num_heads), hidden_BD, None, count)
        if guesses is not None:
            return guesses[0]
        logits_KBR = self(hidden_BD, first)
        return self.to_ids(best_columns(logits_KBR, count))

    def candidates_after(
        self,
        k: int,
        hidden_XD: Tensor,
        path_XJ: Tensor,
        count: int,
        walk: Walk | None = None,
    ) -> Tensor:
        """The `count` likeliest token ids of head k after each path, best first: ids_XC."""
        guesses = self.quickly([k], hidden_XD, path_XJ, count)
        if guesses is not None:
            return guesses[0][0]
        logits_XR = self.project(self.transform(hidden_XD, k, path_XJ, walk), k)
        return self.to_ids(best_columns(logits_XR, count))

    def quickly(
        self,
        heads: Sequence[int],
        hidden_XD: Tensor,
        path_XJ: Tensor | None,
        count: int,
        temperatures: Sequence[float] | None = None,
    ) -> Guesses | None:
        """The draft tokens of the `guesser`; None where there is none or it cannot."""
        if self.guesser is None:
            return None
        return self.guesser(heads, hidden_XD, path_XJ, count, temperatures)

    def to_ids(self, columns_XC: Tensor) -> Tensor:
        """The token id of each of the projection's columns, same shape."""
        return columns_XC if self.column_ids is None else self.column_ids[columns_XC]

    def to_columns(self, token_ids: Tensor) -> Tensor:
        """The projection's column for each token id, same shape; -1 where it has none."""
        if self._columns_V is None:
            return token_ids
        columns = self._columns_V[token_ids.clamp_min(0)]
        return columns.masked_fill(token_ids < 0, -1)

    @property
    def num_columns(self) -> int:
        return self.config.reduced_size or self.config.vocab_size

    def _bind_columns(self) -> None:
        self._columns_V = None
        self._reduced: tuple[Tensor, Tensor | None] | None = None
        self._number = 0  # of the base's changes that those rows include
        if self.column_ids is not None:
            columns_V = torch.full((self.config.vocab_size,), -1, device=self.column_ids.device)
            columns_V[self.column_ids] = torch.arange(
                len(self.column_ids), device=self.column_ids.device
            )
            self._columns_V = columns_V

    def _reduced_rows(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """The chosen rows of the base's output embedding; gathered once where that is frozen."""
        number = self.base.number
        if self._reduced is None or self._reduced[0].dtype != dtype or self._number != number:
            ids_R, last = self.column_ids, self.base.info.vocab_size - 1
            if ids_R is not None:  # the base may have had more rows when heads were made
                ids_R = ids_R.clamp(max=last)
            rows_RD, bias_R = self.base.output_rows(ids_R)
            weight_RD = rows_RD.detach().to(dtype)
            bias_R = None if bias_R is None else bias_R.detach().to(dtype)
            if rows_RD.requires_grad:
                return weight_RD, bias_R
            self._reduced, self._number = (weight_RD, bias_R), number
        return self._reduced
