"""All of the model in this process, on one compute thread."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

import torch

from shoal.configs.errors import EngineDeadError
from shoal.model_shards.engine.plan import StepOutput, StepPlan
from shoal.model_shards.executor.base import Executor
from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.runner.model_runner import ModelRunner
from shoal.model_shards.runner.settings import RunnerSettings
from shoal.model_shards.runner.step_clock import RankTimes

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""How long `close` waits for the step under way."""

_Step = tuple[StepPlan, Future[StepOutput]]


class LocalExecutor(Executor):
    """One rank. Steps run on a thread of their own, so that the engine's thread schedules meanwhile."""

    def __init__(self, settings: RunnerSettings) -> None:
        assert settings.world_size == 1, "several ranks need MultiprocessExecutor"
        self._steps: queue.SimpleQueue[_Step | None] = queue.SimpleQueue()
        """None ends the thread."""
        self._under_way: Future[StepOutput] | None = None
        self._entry = threading.Lock()
        """Held while a step is queued and while the executor closes, so that none is queued behind the end."""
        self._closed = False
        made: Future[ModelRunner] = Future()
        # A daemon, since a thread that hangs in a step cannot be ended, but must not keep the process.
        self._thread = threading.Thread(target=self._run, args=(settings, made), name="shoal-compute", daemon=True)
        self._thread.start()
        try:
            runner = made.result()
            self.vocab_size, self._times = runner.config.vocab_size, runner.clock.times
        except BaseException:
            self.close()
            raise

    @property
    def rank_times(self) -> dict[int, RankTimes]:
        return {0: self._times}

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        future: Future[StepOutput] = Future()
        with self._entry:
            if self._closed:
                future.set_exception(EngineDeadError("The executor is closed."))
            else:
                self._steps.put((plan, future))
        return future

    def close(self) -> None:
        """Steps that wait fail at once; the one under way has `CLOSE_TIMEOUT_S` to end. A thread cannot be killed: one
        that hangs longer is left behind, with a line in the log, and its step fails too."""
        with self._entry:
            if self._closed:
                return
            self._closed = True
        for future in self._take_waiting():
            _fail(future)
        self._steps.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error(
                "The step under way has not ended within %g s of closing; its thread (%s) and its memory are left "
                "until the process ends.", CLOSE_TIMEOUT_S, self._thread.name,
            )  # fmt: skip
            if self._under_way is not None:
                _fail(self._under_way)

    def _take_waiting(self) -> Iterator[Future[StepOutput]]:
        with suppress(queue.Empty):
            while (step := self._steps.get_nowait()) is not None:
                yield step[1]

    def _run(self, settings: RunnerSettings, made: Future[ModelRunner]) -> None:
        try:
            runner = _make_runner(settings)
        except BaseException as error:
            made.set_exception(error)
            return
        made.set_result(runner)
        while (step := self._steps.get()) is not None:
            plan, self._under_way = step
            try:
                _settle(self._under_way, self._step(runner, plan))
            except BaseException as error:
                _fail(self._under_way, error)

    def _step(self, runner: ModelRunner, plan: StepPlan) -> StepOutput:
        if self.failure is not None:
            raise EngineDeadError(f"An earlier step failed: {self.failure}") from self.failure
        try:
            return runner.execute(plan)
        except BaseException as error:
            self.failure = error
            raise


def _settle(future: Future[StepOutput], output: StepOutput) -> None:
    try:
        future.set_result(output)
    except InvalidStateError:  # `close` gave it up
        logger.warning("A step ended after the executor was closed.")


def _fail(future: Future[StepOutput], error: BaseException | None = None) -> None:
    try:
        future.set_exception(error or EngineDeadError("The executor was closed before the step ended."))
    except InvalidStateError:  # its end and the executor's came at once: the first to tell is right
        logger.debug("A step failed after it had been settled: %s", error)


def set_compute_threads(settings: RunnerSettings) -> None:
    """Sets torch's CPU threads for the calling thread's work: as asked, or this rank's share of the CPUs."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(settings.num_threads or max(1, available // settings.world_size))


def _make_runner(settings: RunnerSettings) -> ModelRunner:
    set_compute_threads(settings)
    return ModelRunner(settings, ParallelContext.single())
