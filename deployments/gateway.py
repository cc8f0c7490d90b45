"""Gateway: the process that answers HTTP, with its neighbours in the same process or behind Serve handles.

Nothing here knows Ray: the Serve deployments around these classes are in deployments/app.py, and tests and embedders
run the same gateway under any ASGI server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp

from shoal.configs.app import AppConfig
from shoal.configs.schema import SCRIPTED
from shoal.deployments.data_plane import DeltaReceiver
from shoal.deployments.engine_links import EngineLinks
from shoal.deployments.guard import Guard
from shoal.deployments.http.app import create_app
from shoal.deployments.metrics import ENGINE_METRICS, GATEWAY_METRICS, EngineMetrics, Metrics, Mirror
from shoal.deployments.service import GatewayService, Stages
from shoal.deployments.stages import EngineDirectory, GuardStage, OneEngine, TokenizerStage, package_version
from shoal.deployments.streams import StreamHub
from shoal.deployments.tokenizer import Tokenizer
from shoal.guardrails.pipeline import load_rails

if TYPE_CHECKING:
    from shoal.deployments.shard_group import ShardGroup
    from shoal.model_shards.executor.source import RankSource

logger = logging.getLogger("shoal.gateway")

_LAST_WORDS_S = 2.0

AsyncCall = Callable[[], Coroutine[Any, Any, None]]
MirrorFactory = Callable[[str], Mirror]
"""Model name -> where its metrics are reported as well."""
RankSourceFactory = Callable[[], "RankSource | None"]
"""Where the model's ranks run (None: on this machine); called in a thread, since it may wait for them."""


@dataclass(frozen=True, slots=True)
class Resident:
    """What lives in the gateway's own process beside it."""

    closers: tuple[AsyncCall, ...] = ()
    checks: tuple[AsyncCall, ...] = ()


class Gateway:
    """Made by `colocated` or `separate`; closed by `close`."""

    def __init__(self, service: GatewayService, resident: Resident) -> None:
        self.service = service
        self.asgi: ASGIApp = create_app(service, package_version())
        self._closers, self._checks = list(resident.closers), resident.checks

    @classmethod
    async def colocated(
        cls, config: AppConfig, mirror: MirrorFactory | None = None, ranks: RankSourceFactory | None = None
    ) -> Gateway:
        """Loads the model, on this machine unless `ranks` says where, and connects to it. Raises ConfigError or
        ModelLoadError, with nothing left running."""
        guard = Guard(config.guard)
        group = await asyncio.to_thread(build_shard_group, config, mirror, ranks)
        tokenizer = Tokenizer(group.engine.tokenizer, config.tokenizer, config.gateway.limits)

        async def close() -> None:
            await group.shutdown()
            tokenizer.close()
            guard.close()

        stages = Stages(tokenizer, guard if _has_input_rails(config) else None)
        resident = Resident((close,), (group.check_health,))
        return await cls._connected(config, stages, OneEngine(group), mirror, resident)

    @classmethod
    async def separate(
        cls,
        config: AppConfig,
        tokenizer: TokenizerStage,
        guard: GuardStage,
        engines: EngineDirectory,
        mirror: MirrorFactory | None = None,
    ) -> Gateway:
        """Connects to stages in other processes. Their tokens come over the data plane."""
        stages = Stages(tokenizer, guard if _has_input_rails(config) else None)
        return await cls._connected(config, stages, engines, mirror, None)

    @classmethod
    async def _connected(
        cls,
        config: AppConfig,
        stages: Stages,
        engines: EngineDirectory,
        mirror: MirrorFactory | None,
        resident: Resident | None,
    ) -> Gateway:
        """`resident` is None when the engines are elsewhere."""
        hub = StreamHub()
        receiver = DeltaReceiver(hub, config.wiring) if resident is None else None
        metrics = Metrics(GATEWAY_METRICS)
        links = EngineLinks(engines, hub, config.gateway, metrics, receiver)
        resident = resident or Resident()
        try:
            await links.connect()
            name = links.info.model_name
            metrics.name_model(name, None if mirror is None else mirror(name))
            links.count_attached()
            _, output_rails = load_rails(config.guard)
            return cls(GatewayService(config.gateway, stages, links, hub, output_rails, metrics), resident)
        except BaseException:
            links.close()
            for close in resident.closers:
                await close()
            raise

    async def check_health(self) -> None:
        """Raises when this process must be restarted: only what lives here counts, not a stage elsewhere."""
        for check in self._checks:
            await check()

    async def drain(self) -> None:
        """Refuses new requests; returns when the running ones have ended, or `drain_s` is over."""
        self.service.draining = True
        await self.service.in_flight.wait_until_idle(self.service.config.drain_s)

    async def close(self) -> None:
        """Drains, then stops everything made here; what still runs ends with an error. Idempotent."""
        closers, self._closers = self._closers, []
        await self.drain()
        for close in closers:
            await close()
        self.service.links.end_all("The server is shutting down; this answer is not complete.")
        # Errors that the stopped engine just delivered still have to become bytes.
        await self.service.in_flight.wait_until_idle(_LAST_WORDS_S)
        self.service.links.close()


def _has_input_rails(config: AppConfig) -> bool:
    return config.guard.check_input and config.guard.deny_list is not None


def build_shard_group(
    config: AppConfig,
    mirror: MirrorFactory | None = None,
    ranks: RankSourceFactory | None = None,
    instance_id: str = "",
) -> ShardGroup:
    """Loads the model and starts its engine; takes seconds. `instance_id`: by which calls find this group among others.
    Raises ConfigError or ModelLoadError."""
    from shoal.deployments.shard_group import GroupTimes, ShardGroup
    from shoal.model_shards.engine.build import build_engine

    metrics = Metrics(ENGINE_METRICS)
    engine = build_engine(config.engine, EngineMetrics(metrics), ranks() if ranks is not None else None)
    metrics.name_model(engine.model_name, None if mirror is None else mirror(engine.model_name))
    engine.start()
    times = GroupTimes(config.wiring.gateway_lease_s, config.gateway.heartbeat_s, config.gateway.drain_s)
    return ShardGroup(engine, metrics, times, instance_id)


def build_tokenizer(config: AppConfig) -> Tokenizer:
    """The Tokenizer stage for a process of its own. Raises ConfigError or ModelLoadError."""
    from shoal.model_shards.executor.script_file import read_script_file
    from shoal.model_shards.tokenizer.tokenizer import load_tokenizer
    from shoal.model_shards.weights.sources import resolve_model

    model = config.engine.model
    if model.startswith(SCRIPTED):
        model = read_script_file(Path(model.removeprefix(SCRIPTED)).expanduser()).tokenizer
    tokenizer = load_tokenizer(resolve_model(model, progress=False))
    return Tokenizer(tokenizer, config.tokenizer, config.gateway.limits)
