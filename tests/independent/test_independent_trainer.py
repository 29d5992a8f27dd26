"""Losses of training, update by update, beside those of a trainer that shares no code with it."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from independent.plain_trainer import Place, PlainTrainer, Row, Setting, places
from support.tiny_models import tiny_model
from torch import Tensor

from medusa_kit.base.model import wrap_model
from medusa_kit.data.chat import EncodedExample
from medusa_kit.settings.recipe import TrainRecipe
from medusa_kit.train import loop
from medusa_kit.train.trainer import train_heads

FAMILY, VOCABULARY, FIRST = "llama", 96, [5, 7]
REDUCED = 24


def rows_of_turns() -> list[Row]:
    """Rows of one turn and of two, which begin alike and follow a rule that can be learned."""
    generator, rows = torch.Generator().manual_seed(3), []
    for number in range(8):
        turns = [(4, False), (9 + number % 3, True)] * (1 + number % 2)
        written = [wrote for length, wrote in turns for _ in range(length)]
        ids = [*FIRST, 20 + number]
        while len(ids) < len(written):
            step = int(torch.randint(1, 4, (), generator=generator))
            ids.append((ids[-1] * 3 + step) % VOCABULARY)
        rows.append((ids, written))
    return rows


class Watched:
    """What the independent trainer takes from the run: the weights at its start, and of each
    update the positions."""

    def __init__(self, rows: Sequence[Row], hidden: Sequence[Tensor]) -> None:
        self.rows, self.hidden = rows, hidden
        self.heads: dict[str, Tensor] = {}
        self.adapters: dict[str, tuple[Tensor, Tensor]] = {}
        self.columns: list[int] | None = None
        self.updates: list[list[Place]] = []

    def start(self, module: Any) -> None:
        if self.heads:
            return
        heads = module.heads
        self.columns = None if heads.column_ids is None else heads.column_ids.tolist()
        self.heads = {name: p.detach().clone() for name, p in heads.named_parameters()}
        base = dict(heads.base.model.named_parameters())
        for name, a in base.items():
            if ".lora_A." in name:
                b = base[name.replace(".lora_A.", ".lora_B.")]
                self.adapters[name.split(".lora_A.")[0]] = (a.detach().clone(), b.detach().clone())

    def see(self, update: Any) -> None:
        found: list[Place] = []
        for batch in update.batches:
            if not bool((batch.ahead_PJ >= 0).any()):
                continue  # a row without targets, in place of an empty part
            if batch.rows is not None:
                found += [place for ids in batch.rows.input_ids_BT.tolist()
                          for place in places(self.rows, self._row(ids))]  # fmt: skip
            else:
                roots = batch.ahead_PJ[:, 0].tolist()
                found += map(self._place, batch.hidden_PD, roots)
        self.updates.append(found)

    def _row(self, ids: list[int]) -> int:
        (row,) = (i for i, (own, _) in enumerate(self.rows) if ids[: len(own)] == own)
        return row

    def _place(self, h_D: Tensor, root: int) -> Place:
        """Rows that begin alike have the same states there, and the next token tells which."""
        near: list[Place] = []
        for i, own_TD in enumerate(self.hidden):
            close_T = (own_TD - h_D).abs().amax(1) < 1e-3
            near += [(i, t) for t in close_T.nonzero()[:, 0].tolist()]
        (place,) = ((i, t) for i, t in near if self.rows[i][0][t + 1 : t + 2] == [root])
        return place


JOINT: dict[str, Any] = {"loss": "cross_entropy", "kind": "medusa", "joint": True}
CASES: dict[str, dict[str, Any]] = {
    "medusa": {
        "kind": "medusa", "loss": "cross_entropy", "projection": "own", "epochs": 16},
    "hydra, soft": {"kind": "hydra", "loss": "soft"},
    "recurrent, all of the base, all tokens": {
        "kind": "recurrent", "loss": "soft", "soft_top": "all", "projection": "reduced",
        "reduced_size": REDUCED, "train_on": "all", "weight_decay": 0.1},
    "recurrent, tokens with a column": {
        "kind": "recurrent", "loss": "cross_entropy", "projection": "reduced",
        "reduced_size": REDUCED},
    "medusa, overlap": {"kind": "medusa", "loss": "lk", "soft_share": 0.6},
    "medusa and adapters": {**JOINT, "moves": "lora", "distill_top": 20},
    "recurrent and adapters, growing": {
        **JOINT, "kind": "recurrent", "loss": "soft", "moves": "lora", "schedule": "sine",
        "distill_share": 0.5, "distill_top": 30},
    "hydra and adapters, few of the likeliest": {
        **JOINT, "kind": "hydra", "loss": "soft", "soft_top": 5, "moves": "lora",
        "projection": "reduced", "reduced_size": REDUCED, "distill_top": 3},
    "medusa and the base, more of the likeliest": {
        **JOINT, "loss": "soft", "soft_top": 40, "moves": "full", "distill_top": 10},
    "medusa and the base": {**JOINT, "moves": "full", "projection": "own", "distill_share": 0.7},
    "hydra and the base, shared": {
        **JOINT, "kind": "hydra", "moves": "full", "schedule": "linear", "distill_share": 0.0},
}  # fmt: skip
OF_HEADS = ("kind", "projection", "reduced_size")
OF_JOINT = ("moves", "distill_top", "distill_share", "schedule")
SHARES = {"cross_entropy": 0.0, "soft": 0.5, "lk": 1.0}
HEADS = 3


def rate_of(case: dict[str, Any]) -> float:
    """Small where a whole base moves: there differences in the last bit grow fast."""
    return 1e-4 if case.get("moves") == "full" else 3e-3


def recipe_of(case: dict[str, Any], folder: Path) -> TrainRecipe:
    own = (*OF_HEADS, *OF_JOINT, "joint", "train_on")
    train = {
        "epochs": 4, "micro_batch_positions": 16, "accumulation": 2, "learning_rate": rate_of(case),
        "chunk_positions": 7, "log_every": 1, "eval_every": 1000, "save_every": 1000,
        "feature_batch_tokens": 40, "cache_dtype": "float32",
        **{key: value for key, value in case.items() if key not in own},
    }  # fmt: skip
    joint = {key: case[key] for key in OF_JOINT if key in case}
    if joint:
        joint["lora"] = {"rank": 3, "alpha": 6}
    return TrainRecipe.model_validate({
        "stage": "medusa2" if joint else "medusa1",
        "output_dir": str(folder / "run"),
        "base": {"model": "in-memory"},
        "heads": {"num_heads": HEADS, **{key: case[key] for key in OF_HEADS if key in case},
                  **({"mlp_size": 20} if case["kind"] == "recurrent" else {})},
        "data": {"sources": ["unused"], "eval_fraction": 0.2,
                 "train_on": case.get("train_on", "answers")},
        "train": train,
        "deepspeed": {"enabled": False},
        **({"joint": joint} if joint else {}),
    })  # fmt: skip


def setting_of(case: dict[str, Any], updates: int, columns: list[int] | None) -> Setting:
    share = case.get("soft_share", SHARES[case["loss"]])
    top = case.get("soft_top", case.get("distill_top", 64) if "joint" in case else 32)
    return Setting(
        case["kind"], HEADS, updates, case["loss"], share,
        None if top == "all" else top, columns,
        rate_of(case), decay=case.get("weight_decay", 0.0),
        joint="joint" in case, grows=case.get("schedule", "constant"),
        distil_share=case.get("distill_share", 1.0), distil_top=case.get("distill_top", 64),
        lora_scale=6 / 3,
    )  # fmt: skip


def on_all_tokens(rows: list[Row], trained: set[int]) -> list[Row]:
    """Prompts too, without the tokens that all trained rows begin with."""
    texts = [rows[i][0] for i in sorted(trained)]
    same = next(i for i, column in enumerate(zip(*texts, strict=False)) if len(set(column)) > 1)
    return [(ids, [wrote or i >= same for i, wrote in enumerate(written)]) for ids, written in rows]


def logged(recipe: TrainRecipe) -> list[dict[str, Any]]:
    text = (Path(recipe.output_dir) / "metrics.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if "loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_an_independent_trainer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, rows, model = CASES[name], rows_of_turns(), tiny_model(FAMILY)
    original = copy.deepcopy(model)
    with torch.no_grad():
        hidden = [original.model(torch.tensor([ids])).last_hidden_state[0] for ids, _ in rows]
    watched, real = Watched(rows, hidden), loop.TrainingLoop._update

    def update(self: Any, batches: Any) -> None:
        watched.start(self.engine.module)
        watched.see(batches)
        real(self, batches)

    monkeypatch.setattr(loop.TrainingLoop, "_update", update)
    examples = [EncodedExample(ids, written, i + 1) for i, (ids, written) in enumerate(rows)]
    recipe = recipe_of(case, tmp_path)
    base = wrap_model(model, None, "in-memory")
    train_heads(base, examples, recipe)
    lines = logged(recipe)

    trained = {row for places in watched.updates for row, _ in places}
    if case.get("train_on") == "all":
        rows = on_all_tokens(rows, trained)
    epochs = recipe.train.epochs
    per_epoch = len(lines) // epochs
    assert len(trained) == 6
    assert per_epoch > 1
    for epoch in range(epochs):  # each position once
        updates = watched.updates[epoch * per_epoch : (epoch + 1) * per_epoch]
        seen = [place for update in updates for place in update]
        assert sorted(seen) == sorted(place for row in trained for place in places(rows, row))

    setting = setting_of(case, len(lines), watched.columns)
    trainer = PlainTrainer(setting, original, rows, watched.heads, watched.adapters)
    for chosen in watched.updates:
        trainer.update(chosen)
    losses = trainer.losses
    assert [line["loss"] for line in lines] == pytest.approx(losses.total, rel=1e-5)
    for ours, theirs in zip(lines, losses.heads, strict=True):
        assert ours["head_loss"] == pytest.approx(theirs, rel=1e-5)
    if "joint" in case:
        assert [line["base_loss"] for line in lines] == pytest.approx(losses.base, rel=1e-5)
    first, last = losses.heads[:per_epoch], losses.heads[-per_epoch:]
    assert sum(map(sum, last)) < sum(map(sum, first))
