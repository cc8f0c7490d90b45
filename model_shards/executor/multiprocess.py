"""The ranks of a mesh, each a process on this machine."""

from __future__ import annotations

import logging
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from shoal.configs.errors import ConfigError, EngineDeadError, ModelLoadError, ShoalError
from shoal.model_shards.engine.plan import StepOutput, StepPlan
from shoal.model_shards.executor.base import Executor
from shoal.model_shards.executor.channel import Channel, pack
from shoal.model_shards.executor.wire import output_from_wire
from shoal.model_shards.parallel.mesh import MeshPosition
from shoal.model_shards.runner.loading import check_mesh
from shoal.model_shards.runner.settings import RunnerSettings
from shoal.model_shards.weights.open import open_checkpoint

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 900.0
_STOP_TIMEOUT_S = 3.0
_GRACE_S = 0.5
"""When one rank fails, its peers fail a moment later or earlier: how long to wait for the true cause to show."""

_USER_ERRORS: dict[str, type[ShoalError]] = {"ConfigError": ConfigError, "ModelLoadError": ModelLoadError}


@dataclass(slots=True)
class _Rank:
    position: MeshPosition
    process: subprocess.Popen[bytes]
    channel: Channel
    failure: tuple[str, str] | None = None
    """(class of the error, message) as the rank told it."""


class MultiprocessExecutor(Executor):
    """Starts a process for each rank of the mesh, sends every plan to each, and takes the results
    from the one that samples. Plans are computed in order; with several in flight the stages overlap.

    One rank that dies, fails or does not finish a step within `step_timeout_s` ends them all: every future fails with
    an EngineDeadError that names it.
    """

    def __init__(self, settings: RunnerSettings, *, step_timeout_s: float = 300.0) -> None:
        config = open_checkpoint(settings.model).config
        check_mesh(config, settings.mesh)
        self.vocab_size = config.vocab_size
        self._step_timeout_s = step_timeout_s
        self._lock = threading.Lock()
        self._in_flight: deque[tuple[int, Future[StepOutput]]] = deque()
        self._head_since = 0.0
        self._closing = False
        self._ready: Future[None] = Future()
        self._waiting_for_ready = settings.world_size
        self._directory = Path(tempfile.mkdtemp(prefix="shoal-ranks-"))
        self._ranks: list[_Rank] = []
        self._monitor = threading.Thread(target=self._watch, name="shoal-ranks", daemon=True)
        try:
            for rank in range(settings.world_size):
                self._ranks.append(self._start_rank(settings, rank))
            self._monitor.start()
            logger.info("waiting for %d rank processes to load %s", settings.world_size, settings.model.name)
            self._ready.result(_START_TIMEOUT_S)
        except TimeoutError as error:
            self.close()
            raise EngineDeadError(f"The ranks were not ready within {_START_TIMEOUT_S:g} s.") from error
        except BaseException:
            self.close()
            raise

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        future: Future[StepOutput] = Future()
        future.set_running_or_notify_cancel()
        data = pack("plan", plan.to_wire())
        with self._lock:
            if self.failure is not None or self._closing:
                future.set_exception(self.failure or EngineDeadError("The executor is closed."))
                return future
            if not self._in_flight:
                self._head_since = time.monotonic()
            self._in_flight.append((plan.step_id, future))
            for rank in self._ranks:
                try:
                    rank.channel.send_packed(data)
                except OSError as error:  # the monitor reports a dead process; a live one that does not read hangs
                    logger.warning("%s does not take plans: %s", rank.position, error)
        return future

    def close(self) -> None:
        with self._lock:
            already, self._closing = self._closing, True
        if already:
            return
        for rank in self._ranks:
            try:
                rank.channel.send("stop")
            except OSError:
                logger.debug("%s was gone before it was told to stop", rank.position)
        self._reap(_STOP_TIMEOUT_S)
        if (
            self._monitor.is_alive() and threading.current_thread() is not self._monitor
        ):  # a future's callback may close
            self._monitor.join()
        self._fail_all(EngineDeadError("The executor was closed while the step was under way."))
        for rank in self._ranks:
            rank.channel.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    # --- life of the processes ------------------------------------------------------------------------------------

    def _start_rank(self, settings: RunnerSettings, rank: int) -> _Rank:
        ours, theirs = socket.socketpair()
        environment = dict(os.environ)
        if sys.platform == "linux" and settings.device == "cpu":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo would listen on the host's address
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "shoal.model_shards.executor.rank", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        position = settings.mesh.position(rank)
        channel = Channel(ours)
        rendezvous = f"file://{self._directory / 'rendezvous'}"
        channel.send("settings", rank, settings.to_wire(), rendezvous, self._step_timeout_s)
        return _Rank(position, process, channel)

    def _reap(self, timeout_s: float) -> None:
        """Waits for the processes until the time is up, then kills them; none is left."""
        deadline = time.monotonic() + timeout_s
        for rank in self._ranks:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()

    # --- the monitor thread ---------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            self._read_until_all_end()
        except Exception as error:  # a broken message, or a bug of ours: no future may be left waiting
            logger.exception("the ranks cannot be followed any more")
            self._fail_all(EngineDeadError(f"The model's ranks were stopped: {type(error).__name__}: {error}"))
            self._reap(0.0)

    def _read_until_all_end(self) -> None:
        """Reads what the ranks say until all have ended, which they do when one fails or when `close` tells them."""
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.channel, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select(timeout=0.25):
                    if not self._read(key.data):
                        selector.unregister(key.fileobj)
                        if self.failure is None and not self._closing:
                            self._end_all(selector)
                self._check_deadline()

    def _read(self, rank: _Rank) -> bool:
        """Handles the messages of one rank; False when it has ended."""
        try:
            messages = rank.channel.receive()
        except EOFError:
            return False
        for kind, *body in messages:
            if kind == "result":
                self._complete(output_from_wire(body[0]))
            elif kind == "log":
                level, name, text = body
                logging.getLogger(name).log(level, "%s", text)
            elif kind == "ready":
                self._waiting_for_ready -= 1
                if self._waiting_for_ready == 0:
                    self._ready.set_result(None)
            elif kind == "failed":
                rank.failure = (body[0], body[1])
        return True

    def _complete(self, output: StepOutput) -> None:
        with self._lock:
            if not self._in_flight:
                return  # it has failed meanwhile: the result comes after the deadline
            step_id, future = self._in_flight.popleft()
            self._head_since = time.monotonic()
        assert step_id == output.step_id, f"step {step_id} is due, the ranks sent {output.step_id}"
        future.set_result(output)

    def _end_all(self, selector: selectors.BaseSelector) -> None:
        """One rank has ended: gathers why, fails everything, and ends the others."""
        deadline = time.monotonic() + _GRACE_S
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(timeout=left):
                if not self._read(key.data):
                    selector.unregister(key.fileobj)
        self._fail_all(self._diagnose())
        self._reap(0.0)

    def _diagnose(self) -> ShoalError:
        """The error that tells the user most: what a rank refused, what killed it, what it raised, in this order."""
        for rank in self._ranks:
            if rank.failure is not None and rank.failure[0] in _USER_ERRORS:
                return _USER_ERRORS[rank.failure[0]](rank.failure[1])
        causes: list[tuple[int, str]] = []
        for rank in self._ranks:
            code = rank.process.poll()
            if rank.failure is not None:  # a lost peer is a consequence, anything else may be the cause
                causes.append((2 if rank.failure[0] == "EngineDeadError" else 1, f"{rank.position}: {rank.failure[1]}"))
            elif code is not None:
                causes.append((0, f"{rank.position} {_exit_reason(code)}"))
        told = "; ".join(text for _, text in sorted(causes)) or "a rank closed its connection"
        return EngineDeadError(f"The model's ranks have stopped: {told}.")

    def _check_deadline(self) -> None:
        with self._lock:
            late = bool(self._in_flight) and time.monotonic() - self._head_since > self._step_timeout_s
            step_id = self._in_flight[0][0] if late else 0
        if late:
            text = f"Step {step_id} was not done within {self._step_timeout_s:g} s; the ranks hang and were stopped."
            self._fail_all(EngineDeadError(text))
            self._reap(0.0)

    def _fail_all(self, error: ShoalError) -> None:
        with self._lock:
            self.failure = self.failure or error
            failed, self._in_flight = self._in_flight, deque()
        if not self._ready.done():
            self._ready.set_exception(error)
        for _, future in failed:
            future.set_exception(error)


def _exit_reason(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"
