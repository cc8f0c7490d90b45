"""One rank: joins the others, loads its part of the model, and runs the plans that come, until it is told to stop.

`serve_rank` is all of that; how the rank is started and reached is given to it. As the main program of a process,
`python -m shoal.model_shards.executor.rank FD`, it is MultiprocessExecutor's: it gets one end of a socket pair. A
reader thread drains the socket while the main thread computes; when the parent is gone it ends the process at once.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import Store

from shoal.configs.errors import ShoalError
from shoal.model_shards.engine.plan import StepPlan
from shoal.model_shards.executor.channel import Channel
from shoal.model_shards.executor.local import set_compute_threads
from shoal.model_shards.executor.wire import output_to_wire
from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.runner.model_runner import ModelRunner, rank_device
from shoal.model_shards.runner.settings import RunnerSettings

_PARENT_CHECK_S = 1.0
_REPORT_S = 1.0
"""How often a rank tells how it spends its time, while steps come."""


class RankLink(Protocol):
    """A rank's end of the way to its executor. Messages are lists [kind, ...]; see `ranked.py`."""

    def send(self, *message: Any) -> None:
        """From any thread. Raises OSError when the executor is gone."""

    def receive(self) -> list[Any]:
        """Waits for the next message."""


@dataclass(frozen=True, slots=True)
class RankStart:
    """What a rank is told before it starts."""

    rank: int
    settings: RunnerSettings
    rendezvous: str | Store
    """A torch init method, or the store that the ranks share."""
    step_timeout_s: float


class _LogToExecutor(logging.Handler):
    """Log records of the rank are the executor's process's to print, in its format."""

    def __init__(self, link: RankLink) -> None:
        super().__init__()
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._link.send("log", record.levelno, record.name, record.getMessage())
        except OSError:
            self.handleError(record)


def serve_rank(link: RankLink, prepare: Callable[[], RankStart]) -> bool:
    """Returns when the executor says stop (True), or when the rank failed (False), which the executor is told; what
    `prepare` raises counts too. Afterwards the process is to end: tearing down torch would take seconds and can hang on
    a peer that is gone."""
    logging.basicConfig(level=logging.INFO, handlers=[_LogToExecutor(link)], force=True)
    try:
        _serve(link, prepare())
    except ShoalError as error:
        link.send("failed", type(error).__name__, error.message)
        return False
    except Exception as error:
        logging.getLogger(__name__).exception("the rank failed")
        link.send("failed", type(error).__name__, f"{type(error).__name__}: {error}")
        return False
    return True


def _serve(link: RankLink, start: RankStart) -> None:
    settings = start.settings
    set_compute_threads(settings)
    device = rank_device(settings.device, start.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    position = settings.mesh.position(start.rank)
    context = ParallelContext.connect(position, start.rendezvous, device, start.step_timeout_s)
    runner = ModelRunner(settings, context)
    link.send("ready")
    reported = time.monotonic()
    while True:
        kind, *body = link.receive()
        if kind == "stop":
            link.send("times", *astuple(runner.clock.times))
            context.close()
            return
        output = runner.execute(StepPlan.from_wire(body[0]))
        if runner.samples:
            link.send("result", output_to_wire(output))
        if time.monotonic() - reported > _REPORT_S:
            reported = time.monotonic()
            link.send("times", *astuple(runner.clock.times))


# --- as a process of its own ------------------------------------------------------------------------------------------


class _ChannelLink:
    """Messages over the socket pair; a thread reads them, so that a sender never waits for a step to end."""

    def __init__(self, channel: Channel) -> None:
        self.send = channel.send
        self._channel = channel
        self._inbox: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(os.getppid(),), daemon=True).start()

    def receive(self) -> list[Any]:
        return self._inbox.get()

    def _read(self, parent: int) -> None:
        """Forwards messages; ends the process when the parent does, even in the middle of a step."""
        try:
            while os.getppid() == parent:  # asked too: another process may hold a forked copy of the parent's end
                readable, _, _ = select.select([self._channel], [], [], _PARENT_CHECK_S)
                for message in self._channel.receive() if readable else ():
                    self._inbox.put(message)
        except EOFError:
            pass  # the usual way of learning that the parent is gone
        finally:
            os._exit(1)


def main(fd: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the parent decides
    link = _ChannelLink(Channel(socket.socket(fileno=fd)))
    _, rank, wire, rendezvous, step_timeout_s = link.receive()
    start = RankStart(rank, RunnerSettings.from_wire(wire), rendezvous, step_timeout_s)
    return 0 if serve_rank(link, lambda: start) else 1


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)
