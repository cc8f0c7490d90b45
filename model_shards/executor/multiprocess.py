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
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.model_shards.executor.channel import Channel
from shoal.model_shards.executor.ranked import RankedExecutor, RankEvent
from shoal.model_shards.runner.loading import check_mesh
from shoal.model_shards.runner.settings import RunnerSettings
from shoal.model_shards.weights.open import open_checkpoint

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Rank:
    process: subprocess.Popen[bytes]
    channel: Channel


class MultiprocessExecutor(RankedExecutor):
    """Starts a process for each rank of the mesh; each is reached over a socket pair."""

    def __init__(self, settings: RunnerSettings, *, step_timeout_s: float = 300.0) -> None:
        config = open_checkpoint(settings.model).config
        check_mesh(config, settings.mesh)
        super().__init__(settings.mesh, config.vocab_size, step_timeout_s)
        self._directory = Path(tempfile.mkdtemp(prefix="shoal-ranks-"))
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        try:
            for rank in range(settings.world_size):
                self._ranks.append(self._start_rank(settings, rank))
                self._selector.register(self._ranks[rank].channel, selectors.EVENT_READ, rank)
            logger.info("waiting for %d rank processes to load %s", settings.world_size, settings.model.name)
            self._await_ready()
        except BaseException:
            self.close()
            raise

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
        channel = Channel(ours)
        rendezvous = f"file://{self._directory / 'rendezvous'}"
        channel.send("start", rank, settings.to_wire(), rendezvous, self._step_timeout_s)
        return _Rank(process, channel)

    def _broadcast(self, messages: list[bytes]) -> None:
        for position, rank in zip(self._positions, self._ranks, strict=False):  # fewer while they are being started
            try:
                rank.channel.send_packed(messages[position.dp_rank])
            except OSError as error:  # the monitor reports a dead process; a live one that does not read hangs
                logger.debug("%s takes no messages: %s", position, error)

    def _events(self, timeout_s: float) -> Iterator[RankEvent]:
        for key, _ in self._selector.select(timeout_s):
            rank: int = key.data
            try:
                for message in self._ranks[rank].channel.receive():
                    yield rank, message
            except EOFError:
                self._selector.unregister(key.fileobj)
                yield rank, None

    def _ended_how(self, rank: int) -> str | None:
        code = self._ranks[rank].process.poll()
        if code is None:
            return None
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def _end(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for rank in self._ranks:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()

    def _release(self) -> None:
        self._selector.close()
        for rank in self._ranks:
            rank.channel.close()
        shutil.rmtree(self._directory, ignore_errors=True)
