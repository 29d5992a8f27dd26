"""Options of a server of several replicas on Ray, defined once; ServeConfig has them all.

Nothing is imported here but the standard library, since `--help` is made from it.
"""

import dataclasses
from typing import Annotated

from medusa_kit.errors import ConfigError
from medusa_kit.settings.option import COUNT, Allowed

LOAD = Allowed("a number above 0", lambda load: load > 0)
GPUS = Allowed("0 or more", lambda gpus: gpus >= 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """How many replicas, where, and what each may use. Raises ConfigError for a value that is out
    of range, and for one that has no effect without `replicas`."""

    replicas: Annotated[
        int | None,
        "Replicas of the model on Ray Serve, behind one address (extra ray); default: the model "
        "runs in this process.",
        COUNT,
    ] = None
    max_replicas: Annotated[
        int | None, "Replicas in all that may be started under load.", COUNT
    ] = None  # fmt: skip
    replica_load: Annotated[
        float | None,
        "Running requests per replica that --max-replicas aims at; default: --max-rows.",
        LOAD,
    ] = None
    replica_threads: Annotated[
        int | None,
        "Threads of a replica, and cores that Ray reserves for it; default: this machine's cores "
        "divided by the replicas.",
        COUNT,
    ] = None
    replica_gpus: Annotated[
        float | None, "GPUs that Ray reserves for a replica; default: none.", GPUS
    ] = None  # fmt: skip
    ray_address: Annotated[
        str | None,
        "Ray cluster to run the replicas on: HOST:PORT, or auto for the one that this machine "
        "belongs to; default: Ray is started on this machine and ends with the server.",
    ] = None

    def __post_init__(self) -> None:
        if self.replicas is None:
            self._check_unused()
            return
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError(
                f"max_replicas {self.max_replicas} is less than replicas {self.replicas}",
                hint="--replicas says how many there are at least, --max-replicas at most",
            )
        if self.replica_load is not None and self.max_replicas is None:
            raise ConfigError("replica_load has no effect without max_replicas")
        if self.ray_address is not None:
            _check_address(self.ray_address)

    def _check_unused(self) -> None:
        others = [
            field.name for field in dataclasses.fields(ReplicaOptions) if field.name != "replicas"
        ]
        for name in others:
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"{name} has no effect without replicas", hint="add --replicas 2, for example"
                )


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    if address != "auto" and ("://" in address or not host or not port.isdigit()):
        raise ConfigError(
            f"ray_address {address!r} is no address of a cluster; expected HOST:PORT or auto",
            hint="answers cannot be streamed through Ray's client (ray://)"
            if "://" in address
            else None,
        )
