"""A trainer of heads in plain torch, written from the papers and docs/training.md alone.

It imports nothing of the package, reads one row after another without padding, builds whole logits
and leaves gradients to autograd. From the run that it is held against it takes the rows, the
weights at the start and which positions each update holds; every target, mask, weight, schedule
and loss is its own.

Shapes: T tokens of a row, D hidden, V vocabulary, R columns, N targets of a head in an update.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Row = tuple[list[int], list[bool]]  # token ids, and whether the assistant wrote each
Place = tuple[int, int]  # row, token whose hidden state is read


@dataclass
class Setting:
    """What a recipe says, as numbers."""

    kind: str
    num_heads: int
    updates: int
    loss: str = "cross_entropy"
    soft_share: float = 0.0
    soft_top: int | None = None  # None: the whole distribution
    columns: list[int] | None = None  # token ids that heads score; None: all
    rate: float = 1e-3
    warmup: float = 0.05
    decay: float = 0.0
    # Medusa-2
    joint: bool = False
    heads_weight: float = 0.2
    grows: str = "constant"
    rate_factor: float = 4.0
    distil_share: float = 1.0
    distil_top: int = 64
    lora_scale: float = 0.0


@dataclass
class Losses:
    total: list[float] = field(default_factory=list)
    heads: list[list[float]] = field(default_factory=list)
    base: list[float] = field(default_factory=list)


def target(row: Row, t: int, head: int) -> int | None:
    """What head `head` (1 is the first) learns at token t: the token 1 + head places on, if the
    assistant wrote it and everything from t + 1 to it (arXiv 2401.10774, §2.1.1)."""
    ids, written = row
    end = t + 1 + head
    return ids[end] if end < len(ids) and all(written[t + 1 : end + 1]) else None


def places(rows: Sequence[Row], number: int) -> list[Place]:
    """The tokens of a row that are followed by one that the assistant wrote."""
    _, written = rows[number]
    return [(number, t) for t in range(len(written) - 1) if written[t + 1]]


def unit(x: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt()


def head_outputs(setting: Setting, weights: dict[str, Tensor], h: Tensor, path: Tensor) -> Any:
    """z of each head. h_TD; path_TJE: embeddings of the tokens that follow, the root first."""
    if setting.kind == "recurrent":
        state, found = h, []
        size = h.square().mean(-1, keepdim=True).sqrt()
        for k in range(setting.num_heads):
            u = torch.cat([unit(state), unit(path[:, k])], -1) @ weights["recurrent.input.weight"].T
            n = u / (u.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            n = n * weights["recurrent.blocks.0.norm.weight"]
            gate = F.silu(n @ weights["recurrent.blocks.0.w1.weight"].T)
            up = n @ weights["recurrent.blocks.0.w3.weight"].T
            state = u + (gate * up) @ weights["recurrent.blocks.0.w2.weight"].T
            found.append(unit(state) * size * weights["recurrent.gain"][k])
        return found
    found = []
    for k in range(setting.num_heads):
        reads = {"medusa": 0, "hydra": k + 1}[setting.kind]
        read = torch.cat([h, *(unit(path[:, j]) for j in range(reads))], -1)
        place = f"blocks.{k}.0.linear"
        z = h + F.silu(read @ weights[f"{place}.weight"].T + weights[f"{place}.bias"])
        found.append(z)
    return found


def loss_of(name: str, p: Tensor, logits: Tensor) -> Tensor:
    """p_NR, logits_NR -> the loss of each row."""
    if name in ("cross_entropy", "soft"):
        return -(p * logits.log_softmax(-1)).sum(-1)
    return -torch.minimum(p, logits.softmax(-1)).sum(-1).log()


class PlainTrainer:
    """`model`: a transformers model of the base, `weights`: the heads' at the start, `adapters`:
    (A, B) of each adapted layer."""

    def __init__(
        self,
        setting: Setting,
        model: Any,
        rows: Sequence[Row],
        weights: dict[str, Tensor],
        adapters: dict[str, tuple[Tensor, Tensor]],
    ) -> None:
        self.setting, self.model, self.rows = setting, model.eval(), rows
        self.heads = {name: w.clone().requires_grad_() for name, w in weights.items()}
        self.adapters = {
            name: (a.clone().requires_grad_(), b.clone().requires_grad_())
            for name, (a, b) in adapters.items()
        }
        self.adapting = bool(adapters)
        for name, (a, b) in self.adapters.items():
            model.get_submodule(name).register_forward_hook(self._adapted(a, b))
        for parameter in model.parameters():
            parameter.requires_grad_(setting.joint and not adapters)
        moved = [x for pair in self.adapters.values() for x in pair] or [
            p for p in model.parameters() if p.requires_grad
        ]
        factor = setting.rate_factor if setting.joint else 1.0
        groups = [(moved, 1.0)] if setting.joint else []
        self.groups = [*groups, (list(self.heads.values()), factor)]
        self.optimizer = torch.optim.AdamW(
            [{"params": some} for some, _ in self.groups],
            lr=setting.rate, weight_decay=setting.decay, foreach=False,
        )  # fmt: skip
        self.step, self.losses = 0, Losses()
        self.before = [self._original(ids) for ids, _ in rows] if self._needs_original else []

    def _adapted(self, a: Tensor, b: Tensor) -> Any:
        """LoRA (arXiv 2106.09685): Wx + s B A x."""

        def hook(module: Any, inputs: Any, output: Tensor) -> Tensor:
            if not self.adapting:
                return output
            return output + self.setting.lora_scale * (inputs[0] @ a.T @ b.T)

        return hook

    @property
    def _needs_original(self) -> bool:
        return self.setting.joint or self.setting.loss != "cross_entropy"

    @torch.no_grad()
    def _original(self, ids: list[int]) -> Tensor:
        """p_TV of the base as it was, for the token after each."""
        was, self.adapting = self.adapting, False
        found = self.model(torch.tensor([ids])).logits[0].softmax(-1)
        self.adapting = was
        return found

    def rate(self) -> float:
        """Linear warm-up, then half a cosine down to 0."""
        n = self.setting.updates
        warm = round(self.setting.warmup * n)
        if self.step < warm:
            return self.setting.rate * (self.step + 1) / warm
        return self.setting.rate * (1 + math.cos(math.pi * (self.step - warm) / (n - warm))) / 2

    def heads_weight(self) -> float:
        done = (self.step + 1) / self.setting.updates
        growth = {"constant": 1.0, "linear": done, "sine": math.sin(math.pi / 2 * done)}
        return self.setting.heads_weight * growth[self.setting.grows]

    def update(self, chosen: Sequence[Place]) -> None:
        hidden = {row: self._hidden(row) for row in sorted({row for row, _ in chosen})}
        by_head = [self._head_loss(k, chosen, hidden) for k in range(self.setting.num_heads)]
        total = torch.zeros(())
        for k, loss in enumerate(by_head):
            total = total + 0.8 ** (k + 1) * loss
        if self.setting.joint:
            own = self._base_loss(chosen, hidden)
            total = own + self.heads_weight() * total
            self.losses.base.append(own.item())
        self.losses.total.append(total.item())
        self.losses.heads.append([loss.item() for loss in by_head])
        self._move(total)

    def _move(self, total: Tensor) -> None:
        total.backward()
        trained = [p for some, _ in self.groups for p in some if p.grad is not None]
        norm = torch.sqrt(sum((p.grad.square().sum() for p in trained), torch.zeros(())))
        for p in trained:
            p.grad *= min(1.0, 1.0 / (float(norm) + 1e-6))
        for group, (_, factor) in zip(self.optimizer.param_groups, self.groups, strict=True):
            group["lr"] = self.rate() * factor
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def _hidden(self, row: int) -> Tensor:
        """The base's hidden states behind its last norm, h_TD."""
        with torch.set_grad_enabled(self.setting.joint):
            return self.model.model(torch.tensor([self.rows[row][0]])).last_hidden_state[0]

    def _head_loss(self, k: int, chosen: Sequence[Place], hidden: dict[int, Tensor]) -> Tensor:
        """The mean over the update's targets of head k (from 0)."""
        found = []
        for row, t in chosen:
            token = target(self.rows[row], t, k + 1)
            p = None if token is None else self._target(token, row, t + 1 + k)
            if p is not None:
                found.append((row, t, p))
        h = torch.stack([hidden[row][t] for row, t, _ in found])
        ids = torch.tensor([self.rows[row][0][t + 1 : t + 2 + k] for row, t, _ in found])
        path = self.model.get_input_embeddings()(ids)
        z = head_outputs(self.setting, self.heads, h, self._padded(path))[k]
        own = self.heads.get(f"projections.{k}.weight")
        # the base's own rows learn from the base's own loss alone
        matrix = self.model.get_output_embeddings().weight.detach() if own is None else own
        if self.setting.columns is not None:
            matrix = matrix[self.setting.columns]
        p_NR = torch.stack([p for _, _, p in found])
        return loss_of(self.setting.loss, p_NR, z @ matrix.T).mean()

    def _padded(self, path: Tensor) -> Tensor:
        """Ones behind the tokens that head k reads, for the heads after it, which are not used."""
        more = self.setting.num_heads - path.shape[1]
        return torch.cat([path, path.new_ones(len(path), more, path.shape[2])], 1)

    def _target(self, token: int, row: int, before: int) -> Tensor | None:
        """p_R: the token, and in part what the base said at `before`, the place before it."""
        ids = self.setting.columns or list(range(self.model.config.vocab_size))
        hard = torch.zeros(len(ids))
        if token in ids:
            hard[ids.index(token)] = 1
        share = self.setting.soft_share
        if not share:
            return hard if token in ids else None
        said = self.before[row][before]
        if self.setting.soft_top is not None:
            top = said.topk(self.setting.soft_top)
            said = torch.zeros_like(said).scatter(0, top.indices, top.values)
            soft = said[ids] / said[ids].sum().clamp_min(1e-6)
        else:  # all of it: over the heads' columns, by the base's logits there
            soft = said[ids] / said[ids].sum()
        return (1 - share) * hard + share * soft

    def _base_loss(self, chosen: Sequence[Place], hidden: dict[int, Tensor]) -> Tensor:
        """Of the base itself: KL to the original (up to a constant) and cross-entropy; the tokens
        behind the likeliest count as one (arXiv 2401.10774, §2.3.2)."""
        share, found = self.setting.distil_share, []
        for row, t in chosen:
            q = self.model.get_output_embeddings()(hidden[row][t]).softmax(-1)
            loss = -(1 - share) * q[self.rows[row][0][t + 1]].log()
            p, ids = self.before[row][t].topk(min(self.setting.distil_top, len(q)))
            loss = loss - share * (p * q[ids].log()).sum()
            if len(ids) < len(q):
                loss = loss - share * (1 - p.sum()) * (1 - q[ids].sum()).log()
            found.append(loss)
        return torch.stack(found).mean()
