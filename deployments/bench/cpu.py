"""Who used the processors during a run: the load generator, the server, or somebody else, and who that was.

A load generator that needs much of the machine measures itself; other people's processes spoil a comparison. Linux
only (reads /proc); elsewhere only the client's own share is known.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal.deployments.bench.processes import PROC, process_ids, process_name, process_tree, processor_seconds

MOST_NAMED = 5
LEAST_NAMED = 0.002
"""Share of the machine below which nobody is named."""


@dataclass(frozen=True, slots=True)
class CpuShares:
    """Shares of all processors of the machine, 0..1; None where it cannot be known."""

    client: float
    server: float | None = None
    foreign: float | None = None
    foreign_by: dict[str, float] = field(default_factory=dict)
    """Whose, largest first, by the process's name; what ended before the run did is not in it."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Reading:
    wall: float
    client: float
    server: float
    busy: float | None
    others: dict[int, float]
    """Processor seconds of every process that is neither this one nor of the server's tree."""


class CpuMeter:
    """Measures from its making to `shares()`. `server_pid` is the root of the server's process tree."""

    def __init__(self, server_pid: int | None = None) -> None:
        self._server_pid = server_pid
        self._start = self._read()

    def shares(self) -> CpuShares:
        before, after = self._start, self._read()
        total = max(1e-9, (after.wall - before.wall) * (os.cpu_count() or 1))
        client = (after.client - before.client) / total
        if self._server_pid is None:
            return CpuShares(round(client, 4))
        server, foreign = (after.server - before.server) / total, None
        if before.busy is not None and after.busy is not None:
            foreign = round(max(0.0, (after.busy - before.busy) / total - client - server), 4)
        return CpuShares(round(client, 4), round(server, 4), foreign, _named(before, after, total))

    def _read(self) -> _Reading:
        own = os.times()
        tree = process_tree(self._server_pid) if self._server_pid else []
        others = {}
        if self._server_pid:
            known = {*tree, os.getpid()}
            others = {pid: processor_seconds(pid, children=False) for pid in process_ids() if pid not in known}
        server = sum(processor_seconds(pid, children=True) for pid in tree)
        return _Reading(time.perf_counter(), own.user + own.system, server, _busy_seconds(), others)


def _named(before: _Reading, after: _Reading, total: float) -> dict[str, float]:
    shares: defaultdict[str, float] = defaultdict(float)
    for pid, seconds in after.others.items():
        used = (seconds - before.others.get(pid, 0.0)) / total
        if used > 0:
            shares[process_name(pid) or f"process {pid}"] += used
    largest = sorted(shares.items(), key=lambda item: -item[1])[:MOST_NAMED]
    return {name: round(share, 4) for name, share in largest if share >= LEAST_NAMED}


def _busy_seconds() -> float | None:
    """Time all processors spent working since boot: user, nice, system, interrupts, and what a hypervisor took."""
    try:
        with (PROC / "stat").open() as file:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
