"""What a workload is sent to: a server over HTTP, or the engine in this process."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from shoal.configs.errors import ConfigError
from shoal.deployments.bench.prompts import PlannedRequest, Ruler
from shoal.deployments.bench.records import RequestRecord

Clock = Callable[[], float]


class Target(ABC):
    """Sends one request at a time (many concurrently) and reports what came back.

    `send` never raises for what a server does wrong: that is a record with `error` set. It is an asynchronous context
    manager; `label` and `describe` go into reports.
    """

    clock: Clock = staticmethod(time.perf_counter)
    in_process: bool = False

    def __init__(self) -> None:
        self.on_event: Callable[[int], None] = lambda tokens: None
        """Called with the number of events (about tokens) that just arrived; for live progress only."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Model and place, for people."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Model, place and settings, for the JSON report."""

    @abstractmethod
    async def ruler(self) -> Ruler:
        """Measures prompts as this target will."""

    async def settle_options(self, request: PlannedRequest) -> list[str]:
        """Sends a first request; raises ConfigError when it fails, returns the optional fields it had to drop."""
        record = await self.send(request)
        if record.error is not None:
            raise ConfigError(f"{self.label} does not serve the first request: {record.error}")
        return []

    @abstractmethod
    async def send(self, request: PlannedRequest, due: float | None = None) -> RequestRecord:
        """Sends now and waits for the last byte. `due` is when it should have been sent (default: now)."""

    async def __aenter__(self) -> Target:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None
