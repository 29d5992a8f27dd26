"""The moving average of the weights: its arithmetic, and that it is what is judged and kept."""

import json

import pytest
import torch

from medusa_kit.base.loading import load_base_model
from medusa_kit.data.chat import EncodedExample
from medusa_kit.errors import CheckpointError
from medusa_kit.heads import load_heads
from medusa_kit.train import loop, quality
from medusa_kit.train.data import prepare, split
from medusa_kit.train.evaluate import evaluate
from medusa_kit.train.features.features import FeatureOptions, by_length, collect_features
from medusa_kit.train.run.folder import RunFolder
from medusa_kit.train.trainer import train_heads

pytestmark = pytest.mark.usefixtures("often")

DECAY = 0.7  # of the kind that weights differ from their average by much after few updates


class Crash(Exception):
    pass


def watched(monkeypatch, stop_at=None):
    """The trained weights before the first update and after each; a run may be stopped once."""
    original, seen, stopped = loop.TrainingLoop._update, [], []

    def weights(self):
        named = self.engine.module.named_parameters()
        return {name: p.detach().double().clone() for name, p in named if p.requires_grad}

    def update(self, arguments):
        if self.step == stop_at and not stopped:
            stopped.append(True)
            raise Crash
        if not seen:
            seen.append(weights(self))
        original(self, arguments)
        seen.append(weights(self))

    monkeypatch.setattr(loop.TrainingLoop, "_update", update)
    return seen


def averaged(seen):
    """By the definition, in float64."""
    average = seen[0]
    for step, weights in enumerate(seen[1:]):
        decay = min(DECAY, (1 + step) / (10 + step))
        average = {name: decay * average[name] + (1 - decay) * weights[name] for name in average}
    return average


def metrics(recipe):
    """Without the times."""
    lines = (RunFolder(recipe).path / "metrics.jsonl").read_text().splitlines()
    return [{**json.loads(line), "seconds": None} for line in lines]


def losses(recipe):
    return [line["loss"] for line in metrics(recipe) if "loss" in line]


@pytest.fixture
def averaging(make_recipe, tmp_path):
    def build(name="run", average=DECAY, train=None, **sections):
        options = {"average": average, "accumulation": 2, "epochs": 6, **(train or {})}
        return make_recipe(output_dir=str(tmp_path / name), train=options, **sections)

    return build


@pytest.mark.parametrize("keep", ["last", "best"])
def test_the_average_is_judged_and_kept_and_training_does_not_notice(
    tiny_base, counting_rows, averaging, monkeypatch, keep
):
    base, rows = tiny_base(), counting_rows()
    heads = {"num_heads": 2, "projection": "own"}
    train = {"keep": keep, "log_every": 1, "eval_every": 3}
    recipe = averaging(heads=heads, train=train)
    plain = averaging("plain", average=None, heads=heads, train=train)
    train_heads(base, rows, plain)
    seen = watched(monkeypatch)
    report = train_heads(base, rows, recipe)
    assert report.num_updates == len(seen) - 1 >= 10
    assert losses(recipe) == losses(plain)
    judged = [(line["step"], line["held_out"]) for line in metrics(recipe) if "held_out" in line]
    assert judged.pop(0)[0] == 0, "untrained heads are judged, not kept"
    step, scores = judged[-1]
    if keep == "best":
        step, scores = max(judged, key=lambda one: (one[1]["acceptance_length"], one[0]))
    assert report.best == scores["acceptance_length"]
    found = load_heads(report.heads_folder, base)
    kept = averaged(seen[: step + 1])
    for name, tensor in found.named_parameters():
        torch.testing.assert_close(tensor.double(), kept[f"heads.{name}"], rtol=1e-5, atol=1e-7)
    name = "heads.blocks.0.0.linear.weight"
    assert (kept[name] - seen[step][name]).norm() > 0.01 * kept[name].norm()

    held_out = by_length(split(prepare(rows, 2), recipe.data.eval_fraction, recipe.seed)[1])
    again = evaluate(found, collect_features(base, held_out, FeatureOptions(100)), 16)
    assert scores["loss"] == pytest.approx(again.loss, rel=1e-5)


@pytest.mark.parametrize("keep", ["best", "last"])
def test_a_run_that_goes_on_has_the_average_of_one_that_was_not_stopped(
    tiny_base, counting_rows, averaging, monkeypatch, keep
):
    base, rows, train = tiny_base(), counting_rows(), {"keep": keep}
    straight, recipe = averaging("straight", train=train), averaging(train=train)
    expected = load_heads(train_heads(base, rows, straight).heads_folder, base).state_dict()
    watched(monkeypatch, stop_at=6)
    with pytest.raises(Crash):
        train_heads(base, rows, recipe)
    found = load_heads(train_heads(base, rows, recipe).heads_folder, base).state_dict()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert metrics(recipe) == metrics(straight)


@pytest.mark.parametrize("damage", ["missing", "cut off", "of other weights"])
def test_a_checkpoint_whose_average_cannot_be_read_is_refused(
    tiny_base, counting_rows, averaging, monkeypatch, damage
):
    base, rows, recipe = tiny_base(), counting_rows(), averaging()
    watched(monkeypatch, stop_at=6)
    with pytest.raises(Crash):
        train_heads(base, rows, recipe)
    (path,) = RunFolder(recipe).path.glob("checkpoint/*/average.pt")
    if damage == "missing":
        path.unlink()
    elif damage == "cut off":
        path.write_bytes(path.read_bytes()[:100])
    else:
        torch.save({"heads.blocks.0.0.linear.weight": torch.zeros(3)}, path)
    with pytest.raises(CheckpointError, match=r"average\.pt cannot be read") as caught:
        train_heads(base, rows, recipe)
    assert "--fresh" in caught.value.hint


@pytest.mark.parametrize("moves", ["lora", "full"])
def test_heads_and_what_moves_of_the_base_are_averaged_together(averaging, monkeypatch, moves):
    base = load_base_model("debug-tiny")
    texts = ["count: one two three four five six", "a b c d e f g h", "to be or not to be, to be"]
    rows = []
    for row in range(8):
        ids = base.tokenizer(texts[row % 3] * 2).input_ids[:30]
        rows.append(EncodedExample(ids, [i >= 4 for i in range(len(ids))], row + 1))
    recipe = averaging(
        stage="medusa2", base={"model": "debug-tiny"}, heads={"num_heads": 2},
        joint={"moves": moves, "distill_share": 0.0},
        train={"epochs": 2, "accumulation": 1, "micro_batch_positions": 50, "keep": "last",
               "learning_rate": 5e-3},
    )  # fmt: skip
    seen = watched(monkeypatch)
    report = train_heads(base, rows, recipe)
    saved = load_base_model(str(report.heads_folder.parent))
    heads = load_heads(report.heads_folder, saved)
    kept = averaged(seen)
    assert kept.keys() > {"medusa1.heads.blocks.0.0.linear.weight"}
    for name, tensor in heads.named_parameters():
        torch.testing.assert_close(
            tensor.double(), kept[f"medusa1.heads.{name}"], rtol=1e-4, atol=1e-6
        )
    held_out = split(prepare(rows, 2), recipe.data.eval_fraction, recipe.seed)[1]
    after = quality.read(saved, held_out, FeatureOptions(100)).perplexity
    base.model.eval()
    last = quality.read(base, held_out, FeatureOptions(100)).perplexity
    assert report.quality.perplexity_after == pytest.approx(after, rel=1e-4)
    assert abs(last - after) > 1e-3 * after
