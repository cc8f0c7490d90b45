"""What executors of several ranks have in common: steps under way, their order and deadline, and one end for all.

How the ranks are started, reached and ended is for the classes below (`multiprocess.py`, and the one on Ray in
`deployments/`). Messages are lists `[kind, ...]` of plain values: to the ranks "plan" and "stop", from them "ready",
"result", "times", "log" and "failed" (`rank.py`).
"""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from shoal.configs.errors import ConfigError, EngineDeadError, ModelLoadError, ShoalError
from shoal.model_shards.engine.plan import StepOutput, StepPlan
from shoal.model_shards.executor.base import Executor
from shoal.model_shards.executor.channel import pack
from shoal.model_shards.executor.wire import merge_outputs, output_from_wire
from shoal.model_shards.parallel.mesh import MeshShape
from shoal.model_shards.runner.step_clock import RankTimes

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 900.0
_STOP_TIMEOUT_S = 3.0
_LAST_WORDS_S = 5.0
_GRACE_S = 0.5
"""When one rank fails, its peers fail a moment later or earlier: how long to wait for the true cause to show."""
_LONGEST_TICK_S = 1.0
"""How often the deadline is looked at, at least."""

_USER_ERRORS: dict[str, type[ShoalError]] = {"ConfigError": ConfigError, "ModelLoadError": ModelLoadError}

RankEvent = tuple[int, list[Any] | None]
"""(rank, its message); None: the rank has ended."""


@dataclass(slots=True)
class _Step:
    """A step under way, with what its sampling ranks have sent so far."""

    future: Future[StepOutput]
    parts: dict[int, StepOutput] = field(default_factory=dict)


class RankedExecutor(Executor):
    """Sends every plan to each rank and takes the results from those that sample (one a data-parallel part). Plans are
    computed in order; with several in flight the stages overlap.

    One rank that dies, fails or does not finish a step within `step_timeout_s` ends them all: every future fails with
    an EngineDeadError that names it.

    A subclass starts its ranks in its constructor, then calls `_await_ready`.
    """

    def __init__(self, mesh: MeshShape, vocab_size: int, step_timeout_s: float) -> None:
        self.vocab_size = vocab_size
        self._positions = mesh.positions()
        self._sampling_ranks = [position.rank for position in self._positions if position.samples]
        self._step_timeout_s = step_timeout_s
        self._lock = threading.Lock()
        self._in_flight: dict[int, _Step] = {}
        """By step id, in the order in which they were submitted."""
        self._head_since = 0.0
        self._closing = self._over = False
        self._ready: Future[None] = Future()
        self._not_ready = {position.rank for position in self._positions}
        self._times: dict[int, RankTimes] = {}
        self._reasons: dict[int, tuple[str, str]] = {}
        """Rank -> (class of the error, message) as the rank told it."""
        self._monitor = threading.Thread(target=self._watch, name="shoal-ranks", daemon=True)

    @property
    def rank_times(self) -> dict[int, RankTimes]:
        return dict(self._times)

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        future: Future[StepOutput] = Future()
        future.set_running_or_notify_cancel()
        parts = range(self._positions[0].dp_size)
        messages = [pack("plan", plan.of_part(part).to_wire()) for part in parts]
        with self._lock:
            if self.failure is not None or self._closing:
                future.set_exception(self.failure or EngineDeadError("The executor is closed."))
                return future
            if not self._in_flight:
                self._head_since = time.monotonic()
            self._in_flight[plan.step_id] = _Step(future)
            self._broadcast(messages)
        return future

    def close(self) -> None:
        with self._lock:
            already, self._closing = self._closing, True
            if already:
                return
            self._broadcast([pack("stop")] * self._positions[0].dp_size)
        self._end(_STOP_TIMEOUT_S)
        # A future's callback may close, in the monitor's thread.
        if self._monitor.is_alive() and threading.current_thread() is not self._monitor:
            self._monitor.join(_LAST_WORDS_S)
            self._over = True  # whatever has not said that it ended by now is on a machine that is gone
            self._monitor.join()
        self._fail_all(EngineDeadError("The executor was closed while the step was under way."))
        for rank, times in sorted(self._times.items()):
            logger.info("%s: %s", self._positions[rank], times)
        self._release()

    # --- where the ranks are ----------------------------------------------------------------------------------------

    @abstractmethod
    def _broadcast(self, messages: list[bytes]) -> None:
        """Sends every rank the packed message of its data-parallel part, `messages[position.dp_rank]`. Called under the
        lock; does not raise for a rank that is gone."""

    @abstractmethod
    def _events(self, timeout_s: float) -> Iterable[RankEvent]:
        """Waits until something happens, at most so long, and says what. Each rank ends once."""

    @abstractmethod
    def _ended_how(self, rank: int) -> str | None:
        """What is known from outside of a rank that ended, as in "was killed by SIGKILL"; None: it runs."""

    @abstractmethod
    def _end(self, timeout_s: float) -> None:
        """Waits for the ranks to end until the time is up, then kills those that are left; none is."""

    @abstractmethod
    def _release(self) -> None:
        """Gives back sockets and files; all ranks have ended and the monitor too."""

    # --- start --------------------------------------------------------------------------------------------------------

    def _await_ready(self) -> None:
        """Follows the ranks from here on, and waits until they have loaded the model. Raises what they refused."""
        self._monitor.start()
        try:
            self._ready.result(_START_TIMEOUT_S)
        except TimeoutError as error:
            late = ", ".join(str(self._positions[rank]) for rank in sorted(self._not_ready))
            raise EngineDeadError(f"Not ready within {_START_TIMEOUT_S:g} s: {late}.") from error

    # --- the monitor thread -------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            self._follow()
        except Exception as error:  # a broken message, or a bug of ours: no future may be left waiting
            logger.exception("the ranks cannot be followed any more")
            self._fail_all(EngineDeadError(f"The model's ranks were stopped: {type(error).__name__}: {error}"))
            self._end(0.0)

    def _follow(self) -> None:
        """Reads what the ranks say until all have ended, which they do when one fails or when `close` tells them."""
        running = {position.rank for position in self._positions}
        tick_s = min(_LONGEST_TICK_S, self._step_timeout_s / 4)
        while running and not self._over:
            self._handle(running, tick_s)
            if len(running) < len(self._positions) and self.failure is None and not self._closing:
                self._end_all(running)
            self._check_deadline(running)

    def _handle(self, running: set[int], timeout_s: float) -> None:
        for rank, message in self._events(timeout_s):
            if message is None:
                running.discard(rank)
            else:
                self._take(rank, *message)

    def _take(self, rank: int, kind: str, *body: Any) -> None:
        if kind == "result":
            self._complete(rank, output_from_wire(body[0]))
        elif kind == "log":
            level, name, text = body
            logging.getLogger(name).log(level, "%s", text)
        elif kind == "ready":
            self._not_ready.discard(rank)
            if not self._not_ready and not self._ready.done():
                self._ready.set_result(None)
        elif kind == "times":
            self._times[rank] = RankTimes(*body)
        elif kind == "failed":
            self._reasons[rank] = (body[0], body[1])

    def _complete(self, rank: int, output: StepOutput) -> None:
        with self._lock:
            step = self._in_flight.get(output.step_id)
            if step is None:
                return  # it has failed meanwhile: the result comes after the deadline
            step.parts[rank] = output
            if len(step.parts) < len(self._sampling_ranks):
                return
            # Each rank sends its results in order, so whoever has all parts is the first of those under way.
            assert next(iter(self._in_flight)) == output.step_id, f"step {output.step_id} overtook another"
            del self._in_flight[output.step_id]
            self._head_since = time.monotonic()
        step.future.set_result(merge_outputs([step.parts[rank] for rank in self._sampling_ranks]))

    def _end_all(self, running: set[int]) -> None:
        """One rank has ended: gathers why, fails everything, and ends the others."""
        self._gather(running)
        self._fail_all(self._diagnose())
        self._end(0.0)

    def _gather(self, running: set[int]) -> None:
        deadline = time.monotonic() + _GRACE_S
        while running and (left := deadline - time.monotonic()) > 0:
            self._handle(running, left)

    def _diagnose(self) -> ShoalError:
        """The error that tells the user most: what a rank refused, what killed it, what it raised, in this order."""
        for name, message in self._reasons.values():
            if name in _USER_ERRORS:
                return _USER_ERRORS[name](message)
        causes: list[tuple[int, str]] = []
        for position in self._positions:
            reason, end = self._reasons.get(position.rank), self._ended_how(position.rank)
            if reason is not None:  # a lost peer is a consequence, anything else may be the cause
                causes.append((2 if reason[0] == "EngineDeadError" else 1, f"{position}: {reason[1]}"))
            elif end is not None:
                causes.append((0, f"{position} {end}"))
        told = "; ".join(text for _, text in sorted(causes)) or "a rank closed its connection"
        return EngineDeadError(f"The model's ranks have stopped: {told}.")

    def _check_deadline(self, running: set[int]) -> None:
        with self._lock:
            late = bool(self._in_flight) and time.monotonic() - self._head_since > self._step_timeout_s
            step_id = next(iter(self._in_flight)) if late else 0
        if late and self.failure is None:
            self._gather(running)  # whoever waits for the rank that hangs gives up now too, and says so
            silent = [str(position) for position in self._positions if position.rank not in self._reasons]
            text = f"Step {step_id} was not done within {self._step_timeout_s:g} s; the ranks hang and were stopped."
            named = f" Nothing came from {', '.join(silent)}." if len(silent) < len(self._positions) else ""
            self._fail_all(EngineDeadError(text + named))
            self._end(0.0)

    def _fail_all(self, error: ShoalError) -> None:
        with self._lock:
            self.failure = self.failure or error
            failed, self._in_flight = self._in_flight, {}
        if not self._ready.done():
            self._ready.set_exception(error)
        for step in failed.values():
            step.future.set_exception(error)
