"""Where an engine's ranks run: what it is built with, so that it need not know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from shoal.configs.resolve import Machine

if TYPE_CHECKING:
    from shoal.model_shards.executor.base import Executor
    from shoal.model_shards.runner.settings import RunnerSettings


class RankSource(Protocol):
    """Owns nothing once `start` was called: the executor does."""

    def machine(self) -> Machine:
        """What the ranks may use."""

    def start(self, settings: RunnerSettings, step_timeout_s: float) -> Executor:
        """Loads the model on every rank. Called once at most. Raises ConfigError or ModelLoadError, with nothing left
        running."""

    def close(self) -> None:
        """For a source that is not started after all. Idempotent."""


class ThisMachine:
    """One rank in this process, or several in processes of their own."""

    def machine(self) -> Machine:
        from shoal.model_shards.engine.machine import measure_machine

        return measure_machine()

    def start(self, settings: RunnerSettings, step_timeout_s: float) -> Executor:
        from shoal.model_shards.executor.local import LocalExecutor
        from shoal.model_shards.executor.multiprocess import MultiprocessExecutor

        if settings.world_size == 1:
            return LocalExecutor(settings)
        return MultiprocessExecutor(settings, step_timeout_s=step_timeout_s)

    def close(self) -> None:
        """Nothing runs before `start`."""
