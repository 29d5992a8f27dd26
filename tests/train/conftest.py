"""A tiny random base and rows of a language that heads can learn: counting upwards, modulo 23."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from medusa_kit.base.model import wrap_model
from medusa_kit.data.chat import EncodedExample
from medusa_kit.settings.recipe import TrainRecipe
from medusa_kit.train.loop import TrainingLoop
from medusa_kit.train.trainer import train_heads

VOCABULARY = 32
CYCLE = 23
STOP = 31


@pytest.fixture
def tiny_base():
    def build(dtype=torch.float32, **changes):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=128,
            eos_token_id=STOP,
            bos_token_id=None,
            pad_token_id=None,
            initializer_range=0.3,  # the usual 0.02 leaves all logits near 0
        )
        model = LlamaForCausalLM(config).to(dtype)
        for name, value in changes.items():
            setattr(model.config, name, value)
        return wrap_model(model)

    return build


@pytest.fixture
def counting_rows():
    def build(count=12, prompt=3, answer=20):
        rows = []
        for row in range(count):
            ids = [(5 * row + i) % CYCLE for i in range(prompt + answer)]
            rows.append(EncodedExample(ids, [i >= prompt for i in range(len(ids))], row + 1))
        return rows

    return build


@pytest.fixture
def killed(counting_rows, make_recipe, monkeypatch):
    """Trains a base until it is killed after a checkpoint; the recipe of that run."""

    def run(base):
        recipe, original, done = make_recipe(), TrainingLoop._update, []

        def update(self, arguments):
            if len(done) == 6:
                raise KeyboardInterrupt
            done.append(1)
            original(self, arguments)

        with monkeypatch.context() as patch:
            patch.setattr(TrainingLoop, "_update", update)
            with pytest.raises(KeyboardInterrupt):
                train_heads(base, counting_rows(), recipe)
        return recipe

    return run


@pytest.fixture
def often():
    """For tests of checkpoints and judgements: there are some within the few updates of a run."""


@pytest.fixture
def make_recipe(tmp_path, request):
    """A recipe for the tiny base; sections given by keyword are laid over the defaults here."""
    often = "often" in request.fixturenames

    def build(**sections):
        train = {
            "epochs": 3,
            "loss": "cross_entropy",
            "micro_batch_positions": 40,
            "learning_rate": 0.01,
            "chunk_positions": 16,
            "log_every": 2,
            "eval_every": 5 if often else 1000,
            "save_every": 4 if often else 1000,
            "feature_batch_tokens": 100,
        }
        raw = {
            "output_dir": str(tmp_path / "run"),
            "base": {"model": "in-memory"},
            "data": {"sources": ["unused"], "eval_fraction": 0.2},
            "deepspeed": {"enabled": False},
            **sections,
            "train": train | sections.get("train", {}),
        }
        return TrainRecipe.model_validate(raw)

    return build
