"""The request router of the ShardGroup deployment: a call reaches the replica that it is for.

Which engine gets a request is decided in the gateway, which knows each engine's load and what it has sent it
(deployments/balancing.py); all calls that concern an engine afterwards (its tokens, its health, aborts) must reach the
same one. Serve calls this class in the gateway's process for each call of a handle.
"""

from __future__ import annotations

from collections.abc import Sequence

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from shoal.deployments.stages import Route

ROUTER_CLASS = f"{__name__}:ShardGroupRouter"


class ShardGroupRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Honours the `Route` that comes as the third argument of `answer`."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of candidates, best first; Serve takes the one with the fewest calls of the first rank. A replica that
        gets a call for another one answers `EngineGoneError`: so a caller learns at once that its own is gone."""
        args: Sequence[object] = ()
        if pending_request is not None:
            args = pending_request.args
            # Else Serve asks again without a pause while a replica that is busy does not say how many calls it has.
            pending_request.routing_context.should_backoff = True
        route = next((arg for arg in args if isinstance(arg, Route)), Route())
        names = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if route.to:
            fitting = [names[route.to]] if route.to in names else []
        else:
            fitting = [replica for name, replica in names.items() if name not in route.unlike]
        return [fitting or candidate_replicas]
