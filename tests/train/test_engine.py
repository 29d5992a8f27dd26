"""DeepSpeed against plain torch, in a child process: importing it warns, prints and sets state."""

import importlib.util
import json
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from medusa_kit.errors import ConfigError
from medusa_kit.heads import MedusaHeads
from medusa_kit.settings.recipe import JointSection
from medusa_kit.train import engine as engine_module
from medusa_kit.train import optimizer as optimizer_module
from medusa_kit.train.batching import Batch
from medusa_kit.train.engine import make_engine
from medusa_kit.train.loss.loss import LossOptions
from medusa_kit.train.optimizer import check_optimizer, network_matrices
from medusa_kit.train.run.schedule import heads_weight, learning_rate
from medusa_kit.train.stages import Medusa1
from medusa_kit.train.trainer import train

CHILD = """
import json, tempfile, torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
from medusa_kit.base.model import wrap_model
from medusa_kit.settings.recipe import TrainRecipe
from medusa_kit.heads import MedusaHeads
from medusa_kit.train.engine import make_engine
from medusa_kit.train.batching import Batch
from medusa_kit.train.loss.loss import LossOptions
from medusa_kit.train.stages import Medusa1

torch.manual_seed(0)
base = wrap_model(LlamaForCausalLM(LlamaConfig(
    vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2)))
hidden = torch.randn(8, 20, 16)
ahead = torch.randint(-1, 50, (8, 20, 4))
folder = Path(tempfile.mkdtemp())
losses = {}
for enabled in (False, True):
    recipe = TrainRecipe.model_validate({
        "output_dir": "unused", "base": {"model": "unused"}, "data": {"sources": ["unused"]},
        "train": {"accumulation": 2, "grad_clip": 0.1, "weight_decay": 0.1},
        "deepspeed": {"enabled": enabled}})
    module = Medusa1(MedusaHeads.for_base(base, 3, 1, "own"), LossOptions(chunk=7))
    engine = make_engine(module, recipe, base.device)
    losses[str(enabled)] = []
    for update in range(4):
        terms = module.terms(ahead[2 * update : 2 * update + 2].flatten(0, 1))
        for micro in (0, 1):
            result = engine.forward(
                Batch(ahead[2 * update + micro], hidden[2 * update + micro]), terms)
            engine.backward(result.loss)
            losses[str(enabled)].append(result.loss.item())
        engine.update(0.05 / (update + 1))
        engine.save(folder)
        engine.load(folder)
    engine.close()
print(json.dumps(losses))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)
def test_deepspeed_gives_the_losses_of_plain_torch_and_keeps_stdout_clean():
    child = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=300, check=False
    )
    assert child.returncode == 0, child.stderr[-2000:]
    losses = json.loads(child.stdout)  # fails if anything else was printed there
    assert losses["True"] == pytest.approx(losses["False"], rel=1e-6)
    assert losses["False"][-1] != losses["False"][0]


def test_a_missing_deepspeed_says_what_to_do(monkeypatch, make_recipe):
    monkeypatch.setattr(engine_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed") as caught:
        make_engine(None, make_recipe(deepspeed={"enabled": True}), torch.device("cpu"))
    assert "deepspeed.enabled=false" in caught.value.hint
    assert ".[train]" in caught.value.hint


def test_micro_batches_add_up_to_their_update_and_the_norm_is_clipped(tiny_base, make_recipe):
    """One plain update against AdamW's first step, whose size is the learning rate."""
    base = tiny_base()
    module = Medusa1(MedusaHeads.for_base(base, 1), LossOptions(chunk=8))
    recipe = make_recipe(train={"accumulation": 2, "grad_clip": 1e-3})
    engine = make_engine(module, recipe, base.device)
    hidden_PD, ahead_PJ = torch.randn(10, 16), torch.randint(0, 32, (10, 2))
    terms = module.terms(ahead_PJ)
    for rows in (slice(0, 3), slice(3, 10)):
        engine.backward(engine.forward(Batch(ahead_PJ[rows], hidden_PD[rows]), terms).loss)
    accumulated = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    module(Batch(ahead_PJ, hidden_PD), terms).loss.backward()
    for parameter, gradient in zip(module.parameters(), accumulated, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    engine.update(0.01)
    norm = math.sqrt(
        sum(float(s["exp_avg"].square().sum()) for s in engine.optimizer.state.values())
    )
    assert norm == pytest.approx(0.1 * 1e-3, rel=1e-3)  # (1 - beta1) times the clipped gradient


@pytest.mark.parametrize("kind", ["medusa", "hydra", "recurrent"])
def test_muon_turns_matrices_as_far_as_adamw_and_leaves_the_rest_to_it(
    tiny_base, make_recipe, kind
):
    """A first update of AdamW moves each weight by the learning rate. Muon's moves an orthogonal
    matrix, scaled by 0.2 √max(rows, columns): a root mean square of 0.2 at full rank."""
    base = tiny_base()
    heads = MedusaHeads.for_base(base, 2, kind=kind, projection="own")
    module = Medusa1(heads, LossOptions(chunk=8))
    recipe = make_recipe(train={"optimizer": "muon", "grad_clip": 1e6})
    for weight in module.parameters():  # some start at zero and stop others' gradients
        weight.data += 0.1 * torch.randn_like(weight)
    engine = make_engine(module, recipe, base.device)
    before = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    hidden_PD, ahead_PJ = torch.randn(64, 16), torch.randint(0, 32, (64, 3))
    terms = module.terms(ahead_PJ)
    engine.backward(engine.forward(Batch(ahead_PJ, hidden_PD), terms).loss)
    engine.update(0.01)
    matrices = set(map(id, network_matrices(module.heads)))
    assert matrices
    for name, weight in module.named_parameters():
        moved = (weight.detach() - before[name]) / 0.01
        if id(weight) in matrices:
            assert "projections" not in name
            values = torch.linalg.svdvals(moved) / (0.2 * math.sqrt(max(moved.shape)))
            assert values[0] < 1.35  # five steps of Newton-Schulz end between 0.7 and 1.2
            assert values[0] / values[len(values) // 2] < 2  # the gradient's own: 3 and more
        else:
            assert float(moved[moved != 0].abs().max()) == pytest.approx(1, rel=1e-2), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_loaded_engine_goes_on_as_the_saved_one(tiny_base, make_recipe, tmp_path, optimizer):
    base, ends = tiny_base(), []
    recipe = make_recipe(train={"optimizer": optimizer})
    hidden_PD, ahead_PJ = torch.randn(3, 16, 16), torch.randint(0, 32, (3, 16, 3))

    def engine_of(seed):
        torch.manual_seed(seed)
        heads = MedusaHeads.for_base(base, 2, kind="hydra")
        return make_engine(Medusa1(heads, LossOptions(chunk=8)), recipe, base.device)

    def update(engine, step):
        terms = engine.module.terms(ahead_PJ[step])
        engine.backward(engine.forward(Batch(ahead_PJ[step], hidden_PD[step]), terms).loss)
        engine.update(0.05 / (step + 1))

    saved, loaded = engine_of(1), engine_of(2)
    for step in (0, 1):
        update(saved, step)
    saved.save(tmp_path)
    loaded.load(tmp_path)
    for engine in (saved, loaded):
        update(engine, 2)
        ends.append([weight.detach().clone() for weight in engine.module.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_muon_warns_where_products_in_bfloat16_are_slow(monkeypatch, make_recipe, capsys):
    recipe = make_recipe(train={"optimizer": "muon"})
    for fast in (True, False):
        monkeypatch.setattr(optimizer_module, "fast_in_bfloat16", lambda device: fast)  # noqa: B023
        check_optimizer(recipe, torch.device("cpu"))
        assert ("'adamw' is faster here" in capsys.readouterr().err) == (not fast)


def test_muon_needs_a_torch_that_has_it(monkeypatch, make_recipe):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ConfigError, match=r"train\.optimizer 'muon' with torch") as caught:
        train(make_recipe(train={"optimizer": "muon"}))
    assert "train.optimizer=adamw" in caught.value.hint


def test_learning_rate_warms_up_and_follows_a_cosine():
    options = SimpleNamespace(learning_rate=2.0, warmup_ratio=0.1)
    rates = [learning_rate(options, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == pytest.approx(2.0)
    assert rates[10] == pytest.approx(2.0)
    assert rates[55] == pytest.approx(1.0)
    assert rates[99] < 0.001
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_the_heads_weight_is_constant_or_grows_to_its_peak():
    weights = {
        name: [heads_weight(JointSection(schedule=name, heads_weight=0.2), step, 50)
               for step in range(50)]
        for name in ("constant", "linear", "sine")
    }  # fmt: skip
    assert set(weights["constant"]) == {0.2}
    for name in ("linear", "sine"):
        assert weights[name] == sorted(weights[name])
        assert weights[name][-1] == pytest.approx(0.2)
    assert weights["linear"][24] == pytest.approx(0.1)
    assert weights["sine"][24] == pytest.approx(0.2 * math.sin(math.pi / 4))


def test_sixteen_bits_and_plain_torch_do_not_train_a_whole_base(make_recipe):
    recipe = make_recipe(
        stage="medusa2", joint={"moves": "full"}, base={"model": "x", "dtype": "bfloat16"}
    )
    with pytest.raises(ConfigError, match="float32 copies") as caught:
        make_engine(None, recipe, torch.device("cpu"))
    assert "deepspeed.enabled=true" in caught.value.hint
