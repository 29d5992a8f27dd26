"""What `--replicas` and the options beside it may be, and what is told before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from medusa_kit.errors import ConfigError
from medusa_kit.settings.engine_file import read_engine_file
from medusa_kit.settings.serve import ServeConfig


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"replicas": 0}, "replicas 0"),
        ({"replicas": 2, "max_replicas": 1}, "max_replicas 1 is less than replicas 2"),
        ({"replicas": 2, "replica_threads": 0}, "replica_threads 0"),
        ({"replicas": 2, "replica_load": 4}, "replica_load has no effect without max_replicas"),
        ({"replicas": 1, "max_replicas": 2, "replica_load": 0}, "replica_load 0"),
        ({"replicas": 2, "replica_gpus": -1}, "replica_gpus -1"),
        ({"replicas": 2, "replica_gpus": float("nan")}, "replica_gpus nan"),
        ({"replicas": 2, "ray_address": " "}, "ray_address ' '"),
        ({"replicas": 2, "ray_address": "host"}, "ray_address 'host'"),
        ({"replicas": 2, "ray_address": "ray://h:1"}, "ray_address 'ray://h:1'"),
        ({"max_replicas": 2}, "max_replicas has no effect without replicas"),
        ({"ray_address": "auto"}, "ray_address has no effect without replicas"),
    ],
    ids=str,
)
def test_what_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ServeConfig(**given)


def test_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("model: m\nserve:\n  replicas: 1\n  max_replicas: 4\n  replica_gpus: 0.5\n")
    assert read_engine_file(path).serve == {"replicas": 1, "max_replicas": 4, "replica_gpus": 0.5}
    path.write_text("model: m\nserve:\n  max_replicas: 4\n")
    with pytest.raises(ConfigError, match="without replicas"):
        read_engine_file(path)
