"""A base whose weights its owner has changed between two runs is another base."""

import pytest

from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.heads.checkpoint import read_config
from medusa_kit.train.trainer import train_heads


def test_hidden_states_of_the_weights_before_are_not_used(
    tiny_base, counting_rows, make_recipe, tmp_path
):
    base, train = tiny_base(), {"epochs": 1, "features": "disk"}
    first = train_heads(base, counting_rows(), make_recipe(train=train))
    base.model.model.layers[0].mlp.down_proj.weight.data.mul_(3)
    again = {**train, "cache_dir": str(tmp_path / "run" / "features")}
    other = make_recipe(output_dir=str(tmp_path / "other"), train=again)
    with pytest.raises(IncompatibleBaseError, match="base_fingerprint"):
        train_heads(base, counting_rows(), other)
    second = train_heads(
        base, counting_rows(), make_recipe(output_dir=str(tmp_path / "other"), train=train)
    )
    named = [read_config(run.heads_folder).base_fingerprint for run in (first, second)]
    assert named[0] != named[1] == base.info.fingerprint
