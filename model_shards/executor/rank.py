"""The main program of one rank process: `python -m shoal.model_shards.executor.rank FD`.

It is started by MultiprocessExecutor with one end of a socket pair, gets its settings there, and then plans. A reader
thread drains the socket while the main thread computes; when the parent is gone it ends the process at once.
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
from typing import Any

import torch

from shoal.configs.errors import ShoalError
from shoal.model_shards.engine.plan import StepPlan
from shoal.model_shards.executor.channel import Channel
from shoal.model_shards.executor.local import set_compute_threads
from shoal.model_shards.executor.wire import output_to_wire
from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.runner.model_runner import ModelRunner, rank_device
from shoal.model_shards.runner.settings import RunnerSettings

_PARENT_CHECK_S = 1.0

Inbox = queue.SimpleQueue[list[Any]]


class _LogToParent(logging.Handler):
    """Log records of the rank are the parent's to print, in its format."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self.channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.channel.send("log", record.levelno, record.name, record.getMessage())
        except OSError:
            self.handleError(record)


def main(fd: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the parent decides
    channel = Channel(socket.socket(fileno=fd))
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_read, args=(channel, inbox, os.getppid()), daemon=True).start()
    logging.basicConfig(level=logging.INFO, handlers=[_LogToParent(channel)], force=True)
    try:
        _serve(channel, inbox)
    except ShoalError as error:
        channel.send("failed", type(error).__name__, error.message)
        return 1
    except Exception as error:
        logging.getLogger(__name__).exception("the rank failed")
        channel.send("failed", type(error).__name__, f"{type(error).__name__}: {error}")
        return 1
    return 0


def _serve(channel: Channel, inbox: Inbox) -> None:
    _, rank, wire, rendezvous, timeout_s = inbox.get()
    settings = RunnerSettings.from_wire(wire)
    set_compute_threads(settings)
    position = settings.mesh.position(rank)
    device = rank_device(settings.device, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    context = ParallelContext.connect(position, rendezvous, device, timeout_s)
    runner = ModelRunner(settings, context)
    channel.send("ready")
    while True:
        kind, *body = inbox.get()
        if kind == "stop":
            context.close()
            return
        output = runner.execute(StepPlan.from_wire(body[0]))
        if runner.samples:
            channel.send("result", output_to_wire(output))


def _read(channel: Channel, inbox: Inbox, parent: int) -> None:
    """Forwards messages; ends the process when the parent does, even in the middle of a step."""
    try:
        while os.getppid() == parent:  # asked too, since another process may hold a forked copy of the parent's end
            readable, _, _ = select.select([channel], [], [], _PARENT_CHECK_S)
            for message in channel.receive() if readable else ():
                inbox.put(message)
    except EOFError:
        pass  # the usual way of learning that the parent is gone
    finally:
        os._exit(1)


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)  # tearing down torch would take seconds and can hang on a peer that is gone
