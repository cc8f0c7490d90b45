"""All of the model in this process, on one compute thread."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from shoal.configs.errors import EngineDeadError
from shoal.model_shards.engine.plan import StepOutput, StepPlan
from shoal.model_shards.executor.base import Executor
from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.runner.model_runner import ModelRunner
from shoal.model_shards.runner.settings import RunnerSettings


class LocalExecutor(Executor):
    """One rank. Steps run on a thread of their own, so that the engine's thread schedules meanwhile."""

    def __init__(self, settings: RunnerSettings) -> None:
        assert settings.world_size == 1, "several ranks need MultiprocessExecutor"
        self._closed = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shoal-compute")
        try:
            self._runner = self._thread.submit(_make_runner, settings).result()
        except BaseException:
            self._thread.shutdown(wait=True)
            raise
        self.vocab_size = self._runner.config.vocab_size

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        if self._closed:
            closed: Future[StepOutput] = Future()
            closed.set_exception(EngineDeadError("The executor is closed."))
            return closed
        return self._thread.submit(self._step, plan)

    def close(self) -> None:
        self._closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _step(self, plan: StepPlan) -> StepOutput:
        if self.failure is not None:
            raise EngineDeadError(f"An earlier step failed: {self.failure}") from self.failure
        try:
            return self._runner.execute(plan)
        except BaseException as error:
            self.failure = error
            raise


def set_compute_threads(settings: RunnerSettings) -> None:
    """Sets torch's CPU threads for the calling thread's work: as asked, or this rank's share of the CPUs."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(settings.num_threads or max(1, available // settings.world_size))


def _make_runner(settings: RunnerSettings) -> ModelRunner:
    set_compute_threads(settings)
    return ModelRunner(settings, ParallelContext.single())
