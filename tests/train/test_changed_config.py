"""A base's config says how it computes: what was made with another one is not gone on with."""

import json

import pytest

from medusa_kit.errors import ConfigError, IncompatibleBaseError
from medusa_kit.train.data import prepare
from medusa_kit.train.features.cache import cache_folder, cached_positions
from medusa_kit.train.features.features import FeatureOptions
from medusa_kit.train.features.shards import _read_shard, write_shard
from medusa_kit.train.run.folder import RunFolder
from medusa_kit.train.trainer import train_heads

pytestmark = pytest.mark.usefixtures("often")
CHANGES = {
    "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5.0},
    "hidden_act": "gelu",
}
HARMLESS = {"pad_token_id": 3, "use_cache": False, "_name_or_path": "elsewhere"}


@pytest.fixture
def stopped(tiny_base, killed):
    """(base, recipe) of a run that was killed after a checkpoint."""
    base = tiny_base()
    return base, killed(base)


def drop_config(path):
    """As earlier versions left it."""
    found = json.loads(path.read_text())
    del found["base_config"]
    path.write_text(json.dumps(found))


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_does_not_go_on_with_another_config(stopped, counting_rows, name):
    base, recipe = stopped
    before = getattr(base.config, name)
    setattr(base.config, name, CHANGES[name])
    with pytest.raises(ConfigError, match=rf"another config of the base.*{name}") as caught:
        train_heads(base, counting_rows(), recipe)
    assert "--fresh" in caught.value.hint
    setattr(base.config, name, before)
    for other, value in HARMLESS.items():
        setattr(base.config, other, value)
    train_heads(base, counting_rows(), recipe)


def test_a_checkpoint_of_an_earlier_version_goes_on_with_a_line(stopped, counting_rows, capsys):
    base, recipe = stopped
    drop_config(RunFolder(recipe).load().folder / "progress.json")
    train_heads(base, counting_rows(), recipe)
    assert "which config of the base" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", CHANGES)
def test_hidden_states_of_another_config_are_refused(
    tiny_base, counting_rows, make_recipe, capsys, name
):
    base, items, options = tiny_base(), prepare(counting_rows(3), 4), FeatureOptions(100)
    recipe = make_recipe(train={"features": "disk"})
    cached_positions(base, items, recipe, options)
    setattr(base.config, name, CHANGES[name])
    with pytest.raises(IncompatibleBaseError, match=rf"made differently: base_config .*{name}"):
        cached_positions(base, items, recipe, options)
    drop_config(cache_folder(recipe) / "index.json")
    for path in cache_folder(recipe).glob("shard-*"):
        shard = _read_shard(path)
        path.unlink()
        write_shard(path.parent, shard.rows, shard.tensors, {})
    for _ in range(2):
        cached_positions(base, items, recipe, options)
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("which config of the base") == 1
