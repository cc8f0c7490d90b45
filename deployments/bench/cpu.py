"""Who used the processors during a run: the load generator, the server, or somebody else.

A load generator that needs much of the machine measures itself; other people's processes spoil a comparison. Linux
only (reads /proc); elsewhere only the client's own share is known.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class CpuShares:
    """Shares of all processors of the machine, 0..1; None where it cannot be known."""

    client: float
    server: float | None = None
    foreign: float | None = None

    def to_json(self) -> dict[str, float | None]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Reading:
    wall: float
    client: float
    server: float
    busy: float | None


class CpuMeter:
    """Measures from its making to `shares()`. `server_pid` is the root of the server's process tree."""

    def __init__(self, server_pid: int | None = None) -> None:
        self._server_pid = server_pid
        self._start = self._read()

    def shares(self) -> CpuShares:
        before, after = self._start, self._read()
        total = max(1e-9, (after.wall - before.wall) * (os.cpu_count() or 1))
        client = (after.client - before.client) / total
        server = (after.server - before.server) / total if self._server_pid else None
        foreign = None
        if before.busy is not None and after.busy is not None and server is not None:
            foreign = round(max(0.0, (after.busy - before.busy) / total - client - server), 4)
        return CpuShares(round(client, 4), None if server is None else round(server, 4), foreign)

    def _read(self) -> _Reading:
        own = os.times()
        server = _tree_seconds(self._server_pid) if self._server_pid else 0.0
        return _Reading(time.perf_counter(), own.user + own.system, server, _busy_seconds())


def process_tree(root: int) -> list[int]:
    """`root` and all its descendants that are alive."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if entry.name.isdigit() and (fields := _stat_fields(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += children.get(pid, [])
    return found


def _stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on (the name before it may hold anything); [] when it is gone."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _tree_seconds(root: int) -> float:
    """User and system time of a tree, also of children that ended and were waited for."""
    ticks = 0
    for pid in process_tree(root):
        if fields := _stat_fields(pid):
            ticks += sum(int(value) for value in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def _busy_seconds() -> float | None:
    """Time all processors spent working since boot: user, nice, system, interrupts, and what a hypervisor took."""
    try:
        with (_PROC / "stat").open() as file:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
