"""Replicas on Ray Serve: started, asked, watched and ended.

Ray starts them, replaces those that die or fail their health check, and changes their number. Its
own HTTP proxy is not used: it sees no bodies, so it can neither tell which replica has a prompt's
prefix nor send a request again.
"""

import asyncio
import contextlib
import logging
import os
import re
import secrets
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import ObjectLostError, RayActorError, WorkerCrashedError
from ray.serve.config import RequestRouterConfig

from medusa_kit.errors import ConfigError, MedusaKitError
from medusa_kit.serve.replicated import ray_router
from medusa_kit.serve.replicated.relay import Forwarded
from medusa_kit.serve.replicated.replica import Replica, ReplicaState
from medusa_kit.settings.serve import ServeConfig

PATIENCE = 5.0  # seconds in which replicas report their states
HEALTH_PERIOD, HEALTH_TIMEOUT = 5.0, 60.0  # seconds; a long step may hold up the check
MARGIN = 64  # calls to a replica above the requests that it takes: its batch refuses, not Ray
OBJECT_STORE = 128 * 1024 * 1024  # bytes; answers are small
LOCALHOST = "127.0.0.1"
RAISED = re.compile(r"^[\w.]+(?:Error|Exception): ", re.M)  # the last lines of a traceback


class RayReplica(Replica):
    """A replica under the name that Ray gives it."""

    def __init__(
        self, loading: Mapping[str, Any], config: ServeConfig, folder: str, threads: int
    ) -> None:
        name = serve.get_replica_context().replica_id.unique_id
        super().__init__(loading, config, folder, threads, name)


class RaySource:
    """An answer's messages from a replica."""

    def __init__(self, answer: Any) -> None:
        self._answer, self._ended = answer, False

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for message in self._answer:
            yield message
        self._ended = True

    def cancel(self) -> None:
        if not self._ended:
            self._ended = True
            with contextlib.suppress(Exception):  # it has failed before
                self._answer.cancel()


class RayPool:
    """Implements front.Pool."""

    lost: tuple[type[BaseException], ...] = (RayActorError, WorkerCrashedError, ObjectLostError)

    def __init__(self, handle: Any, name: str) -> None:
        self._handle, self._name = handle, name
        self._answers = handle.options(stream=True).answer

    def ask(self, request: Forwarded) -> RaySource:
        return RaySource(self._answers.remote(request))

    async def states(self) -> list[ReplicaState]:
        replies = self._handle.broadcast("state")
        try:
            states = await replies.results_async(timeout_s=PATIENCE, return_exceptions=True)
        except TimeoutError:
            return []
        return sorted(
            (state for state in states if isinstance(state, ReplicaState)),
            key=lambda state: state.name,
        )

    async def running(self) -> int:
        try:
            return await asyncio.wait_for(asyncio.to_thread(self._count), PATIENCE)
        except Exception:  # Ray does not answer, or has ended
            return 0

    def _count(self) -> int:
        if not ray.is_initialized():  # else this would start it
            return 0
        application = serve.status().applications.get(self._name)
        deployments = application.deployments.values() if application is not None else ()
        return sum(deployment.replica_states.get("RUNNING", 0) for deployment in deployments)


def threads_of(config: ServeConfig, cores: int) -> int:
    """How many threads each replica has."""
    num_replicas = config.max_replicas or config.replicas or 1
    return config.replica_threads or max(1, cores // num_replicas)


@contextmanager
def ray_pool(loading: Mapping[str, Any], config: ServeConfig) -> Iterator[tuple[RayPool, str]]:
    """(the replicas, the base's name), once one of them answers. They end with it.

    Raises ConfigError where there is no such cluster, MedusaKitError where no replica starts.
    """
    cores = os.cpu_count() or 1
    threads = threads_of(config, cores)
    _connect(config, max(cores, threads * (config.max_replicas or config.replicas or 1)))
    name = f"medusa-kit-{socket.gethostname()}-{os.getpid()}"
    try:
        serve.start(proxy_location="Disabled", logging_config=_QUIET)
        bound = _deployment(config, threads).bind(dict(loading), config, str(Path.cwd()), threads)
        pool = RayPool(_run(bound, name), name)
        states = asyncio.run(pool.states())
        if not states:
            raise MedusaKitError("no replica answers", hint="the log above may say why")
        yield pool, states[0].served[0]
    finally:
        if config.ray_address is not None:  # else all of it ends
            with contextlib.suppress(Exception):  # Ray itself has ended
                serve.delete(name, _blocking=False)
        ray.shutdown()


_QUIET = {"log_level": "WARNING", "enable_access_log": False}


def _connect(config: ServeConfig, cores: int) -> None:
    # No use is reported to Ray's makers unless somebody asked for it.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if config.ray_address is None:
        # Some of Ray's ports are open to the network: calls to them need this token, which Ray
        # would else write to the home folder.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        ray.init(
            address="local", num_cpus=cores, include_dashboard=False, logging_level="ERROR",
            object_store_memory=OBJECT_STORE, _node_ip_address=LOCALHOST,
        )  # fmt: skip
        return
    try:
        ray.init(address=config.ray_address, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"ray_address {config.ray_address!r}: there is no cluster: {error}",
            hint="ray start --head starts one",
        ) from error


def _deployment(config: ServeConfig, threads: int) -> Any:
    number: dict[str, Any] = {"num_replicas": config.replicas}
    if config.max_replicas is not None:
        scaling = {
            "min_replicas": config.replicas,
            "max_replicas": config.max_replicas,
            "target_ongoing_requests": config.replica_load or config.max_rows,
        }
        number = {"autoscaling_config": scaling}
    return serve.deployment(RayReplica).options(
        **number,
        name="replica",
        max_ongoing_requests=config.max_rows + config.max_queue + MARGIN,
        ray_actor_options={"num_cpus": threads, "num_gpus": config.replica_gpus or 0},
        graceful_shutdown_timeout_s=config.drain_timeout + PATIENCE,
        health_check_period_s=HEALTH_PERIOD,
        health_check_timeout_s=HEALTH_TIMEOUT,
        max_constructor_retry_count=1,
        logging_config=_QUIET,
        request_router_config=RequestRouterConfig(
            request_router_class=ray_router.NAME,
            request_router_kwargs={"slack": max(1, config.max_rows // 2)},
        ),
    )


def _run(bound: Any, name: str) -> Any:
    try:
        return serve.run(bound, name=name, route_prefix=None, logging_config=_QUIET)
    except RuntimeError as error:
        raise MedusaKitError(f"no replica could be started: {_why(name) or error}") from error


def _why(name: str) -> str | None:
    """The error that a replica raised as it began, without the traceback that Ray adds."""
    application = serve.status().applications.get(name)
    for deployment in application.deployments.values() if application is not None else ():
        if raised := list(RAISED.finditer(deployment.message)):
            return deployment.message[raised[-1].end() :].strip()
    return None
