"""The graph as a Ray Serve application: `import_path: shoal.deployments.app:build`, `args`: an AppConfig.

    colocated   Gateway
    separate    Gateway -> Tokenizer, Guard, ShardGroup      (unary handle calls; tokens come back over the data plane)

Separate, each stage may have several replicas, and their number may change while requests run: one more shard group
gets requests as soon as it has loaded; one that is stopped gets no new ones, ends what it runs within
`gateway.drain_s`, and what is left goes on in another.

HTTP comes through whatever ingress Serve runs; or the gateway's one replica listens itself, which needs no proxy at all
(`shoal serve`).

Every stage keeps its name in both wirings, so that the `deployments` section of a YAML file finds it.
"""

# No `from __future__ import annotations` here: Serve looks at the annotation of `build` to validate `args`, and takes a
# string for no annotation at all.
import asyncio
import logging
from functools import partial
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from starlette.types import Message, Receive, Scope, Send

from shoal.configs.app import AppConfig
from shoal.deployments.address import Address
from shoal.deployments.engine_placement import place_engine, ranks_of_replica
from shoal.deployments.gateway import Gateway, build_shard_group, build_tokenizer
from shoal.deployments.guard import Guard
from shoal.deployments.listener import Listener
from shoal.deployments.logs import configure_logging
from shoal.deployments.ray_metrics import RayMirror
from shoal.deployments.router import ROUTER_CLASS
from shoal.deployments.stages import EngineStatus, RemoteEngines, RemoteStage, Route

logger = logging.getLogger("shoal.app")

APP_NAME = "shoal"
GRACE_S = 10.0
"""On top of the drain, for the last bytes and the end of the ranks, before Serve kills a replica."""


async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
    """What Serve calls for each request: the app of this replica's gateway, which exists only once the replica does."""
    if scope["type"] == "lifespan":
        await _lifespan(receive, send)
        return
    gateway: Gateway = serve.get_replica_context().servable_object.gateway
    await gateway.asgi(scope, receive, send)


async def _lifespan(receive: Receive, send: Send) -> None:
    """Nothing to do: the replica's constructor and destructor start and stop the gateway."""
    while True:
        message: Message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def _asgi_app() -> Any:
    return dispatch


@serve.ingress(_asgi_app)
class GatewayReplica:
    """The HTTP side; colocated, also everything else."""

    # Serve awaits constructors and destructors that are coroutines.
    async def __init__(  # type: ignore[misc]
        self,
        config: AppConfig,
        listen: Address | None = None,
        tokenizer: Any = None,
        guard: Any = None,
        shard_group: Any = None,
    ) -> None:
        configure_logging()
        self.gateway = await self._connect(config, tokenizer, guard, shard_group)
        self.listener: Listener | None = None
        if listen is not None:
            listener = Listener(self.gateway.asgi, listen, config.gateway.max_ongoing_requests)
            try:
                await listener.start()
            except BaseException:
                await self.gateway.close()
                raise
            self.listener = listener

    async def _connect(self, config: AppConfig, tokenizer: Any, guard: Any, shard_group: Any) -> Gateway:
        if shard_group is None:
            return await Gateway.colocated(config, RayMirror, partial(ranks_of_replica, config))

        def stage(handle: Any, name: str) -> Any:
            return RemoteStage(handle, name, config.wiring.call_timeout_s)

        return await Gateway.separate(
            config,
            stage(tokenizer, "Tokenizer"),
            stage(guard, "Guard"),
            RemoteEngines(shard_group, "ShardGroup", config.wiring.call_timeout_s),
            mirror=RayMirror,
        )

    async def check_health(self) -> None:
        await self.gateway.check_health()
        if self.listener is not None:
            self.listener.check_health()

    async def drain(self) -> None:
        """Refuses new requests; returns when the running ones have ended or their time is up."""
        await self.gateway.drain()

    async def status(self) -> list[EngineStatus]:
        """Of each engine that this gateway is attached to."""
        return self.gateway.service.links.statuses

    async def __del__(self) -> None:
        if hasattr(self, "gateway"):
            await self.gateway.close()
        listener: Listener | None = getattr(self, "listener", None)
        if listener is not None:
            await listener.stop()


class TokenizerReplica:
    def __init__(self, config: AppConfig) -> None:
        configure_logging()
        self._stage = build_tokenizer(config)

    async def answer(self, method: str, args: tuple[Any, ...]) -> tuple[bool, Any]:
        return await self._stage.answer(method, args)


class GuardReplica:
    def __init__(self, config: AppConfig) -> None:
        configure_logging()
        self._stage = Guard(config.guard)

    async def answer(self, method: str, args: tuple[Any, ...]) -> tuple[bool, Any]:
        return await self._stage.answer(method, args)


class ShardGroupReplica:
    async def __init__(self, config: AppConfig) -> None:  # type: ignore[misc]
        configure_logging()
        # The router finds a replica by this name.
        name = serve.get_replica_context().replica_tag
        self._stage = await asyncio.to_thread(
            build_shard_group, config, RayMirror, partial(ranks_of_replica, config), name
        )

    async def answer(self, method: str, args: tuple[Any, ...], route: Route) -> tuple[bool, Any]:
        return await self._stage.answer(method, args, route)

    async def check_health(self) -> None:
        await self._stage.check_health()

    async def __del__(self) -> None:
        if hasattr(self, "_stage"):
            await self._stage.shutdown()


def build(args: AppConfig) -> serve.Application:
    """The application graph of a configuration, for `serve deploy`. Starts nothing. Raises ConfigError for what the
    cluster cannot hold."""
    return build_graph(args)


def build_graph(
    args: AppConfig, listen: Address | None = None, *, ranks_as_processes: bool = False
) -> serve.Application:
    """With `listen` the gateway's replica is its own ingress, at that address; then it must stay the only one."""
    placed = place_engine(args, as_processes=ranks_as_processes)
    args = placed.config
    shard_options = {**_engine_options(args), **placed.options, "name": "ShardGroup"}
    gateway_options: dict[str, Any] = {
        "name": "Gateway",
        "max_ongoing_requests": args.gateway.max_ongoing_requests,
        # When all is stopped at once, what outlives the engines' drain waits for another before it ends with an error.
        "graceful_shutdown_timeout_s": args.gateway.drain_s + args.gateway.continuation_timeout_s + GRACE_S,
    }
    # Stage calls are short; how many wait is bounded by the stages themselves, with errors that a client can read.
    small = {"max_ongoing_requests": args.gateway.max_ongoing_requests, "ray_actor_options": {"num_cpus": 0.25}}
    if listen is not None:
        # Serve waits so long for requests that its routers may have under way to a replica that is to end (2 s
        # otherwise); here they do not come that way.
        for options in (shard_options, gateway_options, small):
            options["graceful_shutdown_wait_loop_s"] = 0.1
    if args.wiring.mode == "colocated":
        both = {**shard_options, **gateway_options}
        return serve.deployment(GatewayReplica, **both).bind(args, listen)
    return serve.deployment(GatewayReplica, **gateway_options, ray_actor_options={"num_cpus": 0.5}).bind(
        args,
        listen,
        serve.deployment(TokenizerReplica, name="Tokenizer", **small).bind(args),
        serve.deployment(GuardReplica, name="Guard", **small).bind(args),
        serve.deployment(
            ShardGroupReplica,
            **shard_options,
            request_router_config=RequestRouterConfig(request_router_class=ROUTER_CLASS),
        ).bind(args),
    )


def _engine_options(args: AppConfig) -> dict[str, Any]:
    """Of the deployment that holds an engine. One that cannot be made (a file that is not there) will not be made at
    the twentieth try either; one that died is looked at every two seconds."""
    return {
        "max_ongoing_requests": args.gateway.max_ongoing_requests,
        "graceful_shutdown_timeout_s": args.gateway.drain_s + GRACE_S,
        "health_check_period_s": 2,
        "health_check_timeout_s": 30,
        "max_constructor_retry_count": 2,
    }
