"""Ray Serve's choice of a replica, by affinity (affinity.py). Loaded by Ray, by its name."""

import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from medusa_kit.serve.replicated.affinity import Affinity, RoutingKey
from medusa_kit.serve.replicated.relay import Forwarded

NAME = f"{__name__}:AffinityRouter"


class AffinityRouter(RequestRouter):
    """Ray's router by affinity: of the replicas that are preferred Ray takes the one with the
    fewest requests under way."""

    def initialize_state(self, slack: int = 1) -> None:
        self._affinity = Affinity(slack)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:  # all are tried below: Ray waits before the next time
            pending_request.routing_context.should_backoff = True
        # Of several that are as good Ray takes the first.
        shuffled = random.sample(candidate_replicas, len(candidate_replicas))
        known = {replica.replica_id.unique_id: replica for replica in shuffled}
        cache = self.replica_queue_len_cache
        loads = {name: cache.get(replica.replica_id) or 0 for name, replica in known.items()}
        ranks = self._affinity.rank(_key(pending_request), loads)
        return [[known[name] for name in names] for names in ranks]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        self._affinity.sent(_key(pending_request), replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._affinity.keep({replica.replica_id.unique_id for replica in replicas})


def _key(pending: PendingRequest | None) -> RoutingKey:
    request = pending.args[0] if pending is not None and pending.args else None
    return request.key if isinstance(request, Forwarded) else RoutingKey()
