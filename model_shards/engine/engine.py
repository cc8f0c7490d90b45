"""The engine: schedule, execute, commit, in a thread of its own.

While the ranks compute step N, this thread plans step N+1 and delivers what step N-1 gave.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from shoal.configs.errors import EngineDeadError
from shoal.model_shards.engine.admission import AdmissionGate, AdmissionLimits
from shoal.model_shards.engine.metrics import GuardedMetrics, MetricsSink, StepStats
from shoal.model_shards.engine.output import DeltaSink, OutputProcessor
from shoal.model_shards.engine.parts import SchedulerParts
from shoal.model_shards.engine.plan import StepOutput, StepPlan
from shoal.model_shards.engine.request import FinishReason, Request
from shoal.model_shards.engine.scheduler import Scheduler
from shoal.model_shards.engine.sequence import SequenceUpdate
from shoal.model_shards.executor.base import Executor
from shoal.model_shards.runner.step_clock import RankTimes
from shoal.model_shards.sampling.params import check_token_ids

if TYPE_CHECKING:
    from shoal.kvcache.planner import MemoryPlan
    from shoal.model_shards.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_RATE_SMOOTHING = 0.1
_STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class EngineSettings:
    model_name: str
    admission: AdmissionLimits
    step_timeout_s: float
    """A step that takes longer means that a rank hangs: the engine is dead."""
    steps_in_flight: int = 2
    """2: the next step is planned and submitted while one computes; one more for each further stage of a pipeline. 1:
    one at a time."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A moment's view. Fields ending in `_total` only grow."""

    num_running: int
    num_waiting: int
    num_following: int
    """Those of the waiting ones whose prefix a running sequence is computing."""
    waiting_prompt_tokens: int
    num_live_requests: int
    kv_blocks: int
    kv_blocks_free: int
    """Cached ones included."""
    kv_blocks_cached: int
    kv_usage: float
    steps_total: int
    prompt_tokens_total: int
    cached_prompt_tokens_total: int
    output_tokens_total: int
    preemptions_total: int
    finished_total: dict[FinishReason, int]
    """Requests' sequences by how they ended."""
    last_step_time: float
    rank_times: dict[int, RankTimes]
    """By rank: how it spent its time."""


def _nothing() -> None:
    """Only wakes the engine."""


@dataclass(slots=True)
class _Step:
    plan: StepPlan
    result: Future[StepOutput]
    submitted_at: float
    announced: bool = False
    """Its end is put into the inbox."""


class Engine:
    """`submit`, `abort`, `stats`, `healthy` and `shutdown` may be called from any thread."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler | SchedulerParts,
        tokenizer: Tokenizer,
        settings: EngineSettings,
        *,
        metrics: MetricsSink | None = None,
        memory_plan: MemoryPlan | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tokenizer = tokenizer
        self.model_name = settings.model_name
        self.max_model_len = scheduler.settings.max_model_len
        self.vocab_size = executor.vocab_size
        self.memory_plan = memory_plan
        self.last_step_time = clock()
        """Heartbeat: when the engine last committed a step or was idle, on its clock."""
        self._executor = executor
        self._scheduler = scheduler
        self._settings = settings
        self._metrics = GuardedMetrics(metrics or MetricsSink())
        self._clock = clock
        self._gate = AdmissionGate(settings.admission)
        self._output = OutputProcessor(tokenizer, self._metrics, clock, self._gate.ended)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._entry = threading.Lock()
        """Held while a request passes the gate into the inbox, and while the gate is closed: so whatever was accepted
        is in the inbox before the engine looks there for the last time."""
        self._steps: deque[_Step] = deque()
        """Submitted and not yet committed, oldest first."""
        self._updates: list[SequenceUpdate] = []
        """Committed and not yet delivered."""
        self._last_commit = 0.0
        self._stopping = False
        self._dead: str | None = None
        self._thread = threading.Thread(target=self._run, name="shoal-engine", daemon=True)

    # From any thread ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def check(self, request: Request) -> None:
        """Raises InvalidRequestError or ContextLengthError for a request that this engine can never serve."""
        request.sampling.check(self.vocab_size)
        check_token_ids("prompt", request.prompt_token_ids, self.vocab_size)
        request.check_resumed(self.vocab_size, self._scheduler.limit_of(request))

    def submit(self, request: Request, sink: DeltaSink) -> None:
        """Checks and queues a request; its deltas go to `sink` from here on. Raises what `check` raises,
        OverloadedError or EngineDeadError at once; then `sink` hears nothing."""
        self.check(request)
        if not request.arrival_time:
            request = replace(request, arrival_time=self._clock())
        with self._entry:
            if not self._thread.is_alive() and self._dead is None:
                raise EngineDeadError("The engine is not running.")
            self._gate.enter(request)
            self._inbox.put(partial(self._add, request, sink))

    def abort(self, request_id: str) -> None:
        """Ends a request within a step; its sink gets a last delta (`finish_reason` abort) for each open sequence.
        Unknown and finished ids are ignored."""
        if self._thread.is_alive():
            self._inbox.put(partial(self._abort, request_id))

    def shutdown(self, drain_s: float = 0.0) -> None:
        """Refuses new requests, lets the old ones run for at most `drain_s` seconds, ends the rest with an error delta
        and stops the ranks. Idempotent."""
        with self._entry:
            self._gate.close_for_shutdown()
        if self._thread.is_alive():
            self._gate.wait_until_empty(drain_s)
            self._inbox.put(self._stop)
            self._thread.join(timeout=_STOP_TIMEOUT_S)
        # A step that hangs keeps the thread; closing the executor fails its future and so frees it.
        self._executor.close()
        if self._thread.is_alive():
            self._thread.join(timeout=_STOP_TIMEOUT_S)

    @property
    def healthy(self) -> bool:
        """False when the engine or its ranks have stopped, and when it has work but no step has ended for the step
        timeout."""
        if self._dead is not None or self._executor.failure is not None or not self._thread.is_alive():
            return False
        return not self._steps or self._clock() - self.last_step_time < self._settings.step_timeout_s

    def stats(self) -> EngineStats:
        scheduler, kv, counters = self._scheduler, self._scheduler.kv_ledger, self._scheduler.counters
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_following=scheduler.num_following,
            waiting_prompt_tokens=self._gate.waiting_tokens,
            num_live_requests=self._gate.num_live,
            kv_blocks=kv.total,
            kv_blocks_free=kv.blank + kv.cached,
            kv_blocks_cached=kv.cached,
            kv_usage=kv.usage,
            steps_total=counters.steps,
            prompt_tokens_total=counters.prompt_tokens,
            cached_prompt_tokens_total=counters.cached_prompt_tokens,
            output_tokens_total=counters.output_tokens,
            preemptions_total=counters.preemptions,
            finished_total=dict(self._output.finished),
            last_step_time=self.last_step_time,
            rank_times=self._executor.rank_times,
        )

    # The loop -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_commands():
                plan = self._scheduler.schedule()
                if plan is not None:
                    self._execute(plan)
                self._deliver()
                if self._is_full or (plan is None and self._waited_for_a_step()):
                    self._commit()
        except Exception as error:
            self._die(error)

    def _take_commands(self) -> bool:
        """Applies what came in; sleeps until something comes when there is nothing else to do. False: stop."""
        if not (self._steps or self._updates or self._scheduler.has_work()):
            self._inbox.get()()
            self.last_step_time = self._clock()
        while not self._inbox.empty():
            self._inbox.get()()
        return not self._stopping

    def _execute(self, plan: StepPlan) -> None:
        now = self._clock()
        self._steps.append(_Step(plan, self._executor.submit(plan), now))
        for introduced in plan.new:
            request = self._scheduler.request_of(introduced.seq_id)
            if self._gate.started(request.request_id):
                self._metrics.request_started(now - request.arrival_time)

    def _deliver(self) -> None:
        updates, self._updates = self._updates, []
        for seq_id in self._output.process(updates):
            self._scheduler.finish(seq_id)

    @property
    def _is_full(self) -> bool:
        return len(self._steps) == self._settings.steps_in_flight

    def _waited_for_a_step(self) -> bool:
        """With nothing to plan: waits until the oldest step has ended or its time is up (True), or something comes
        that may run beside it."""
        if not self._steps:
            assert not self._scheduler.has_work(), "sequences wait and nothing can run"
            return False
        step = self._steps[0]
        if not step.announced:
            step.announced = True
            step.result.add_done_callback(lambda _: self._inbox.put(_nothing))
        try:
            self._inbox.get(timeout=self._time_left(step))()
        except queue.Empty:
            return True
        return step.result.done()

    def _time_left(self, step: _Step) -> float:
        """Seconds that the oldest step may still take."""
        return max(0.0, self._settings.step_timeout_s - (self._clock() - max(step.submitted_at, self._last_commit)))

    def _commit(self) -> None:
        """Waits for the oldest step and takes its results."""
        step = self._steps.popleft()
        try:
            output = step.result.result(timeout=self._time_left(step))
        except TimeoutError as error:
            raise EngineDeadError(
                f"Step {step.plan.step_id} has no result after {self._settings.step_timeout_s:g} s: a rank hangs."
            ) from error
        now = self.last_step_time = self._clock()
        step_s = max(now - max(step.submitted_at, self._last_commit), 1e-9)
        self._last_commit = now
        self._updates = self._scheduler.commit(output, step_s)
        self._record(step, step_s)

    def _record(self, step: _Step, step_s: float) -> None:
        scheduler = self._scheduler
        prefilled = sum(chunk.num_tokens for chunk in step.plan.chunks if chunk.num_tokens > 1)
        if prefilled:
            gate = self._gate
            smoothing = _RATE_SMOOTHING if gate.prompt_tokens_per_s else 1.0
            gate.prompt_tokens_per_s += smoothing * (prefilled / step_s - gate.prompt_tokens_per_s)
        self._metrics.step(
            StepStats(
                num_tokens=step.plan.num_tokens,
                num_prompt_tokens=prefilled,
                num_sequences=len(step.plan.chunks),
                num_running=scheduler.num_running,
                num_waiting=scheduler.num_waiting,
                num_following=scheduler.num_following,
                kv_usage=scheduler.kv_ledger.usage,
                step_s=step_s,
                expected_s=scheduler.expected_step_s,
                preemptions_total=scheduler.counters.preemptions,
                kv_evictions_total=scheduler.kv_evictions,
            )
        )

    # Commands, on the engine's thread -------------------------------------------------------------------------------

    def _add(self, request: Request, sink: DeltaSink) -> None:
        self._output.add(self._scheduler.add(request), sink)

    def _abort(self, request_id: str) -> None:
        self._output.end(self._scheduler.abort(request_id), FinishReason.ABORT)

    def _stop(self) -> None:
        self._end_all("The server is shutting down; this answer is not complete.")
        self._stopping = True

    def _end_all(self, reason: str) -> None:
        self._scheduler.abort_all()
        self._output.end_all(reason)
        self._output.deliver()

    def _die(self, error: Exception) -> None:
        """The ranks' state is unknown: every request ends with the reason, and no new one is taken."""
        logger.error("The engine stopped.", exc_info=error)
        self._dead = f"The engine has stopped: {error}"
        with self._entry:
            self._gate.close_for_death(self._dead)
        self._steps.clear()
        self._updates.clear()
        while not self._inbox.empty():
            self._attempt(self._inbox.get())
        self._attempt(self._scheduler.abort_all)
        self._attempt(partial(self._output.end_all, self._dead))
        self._attempt(self._output.deliver)

    def _attempt(self, work: Callable[[], object]) -> None:
        """For a dead engine: what broke it may have left its state broken too, and still every sink must be told."""
        try:
            work()
        except Exception:
            logger.exception("The engine's state is broken.")
