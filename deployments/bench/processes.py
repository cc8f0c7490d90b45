"""The processes of this machine: who descends from whom, what they are called, what they used. Linux only (/proc)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
_MAX_NAME = 60


def process_ids() -> Iterator[int]:
    """Of every process that is alive; nothing where there is no /proc."""
    for entry in PROC.iterdir() if PROC.is_dir() else ():
        if entry.name.isdigit():
            yield int(entry.name)


def process_tree(root: int) -> list[int]:
    """`root` and all its descendants that are alive."""
    children: dict[int, list[int]] = {}
    for pid in process_ids():
        if fields := _stat_fields(pid):
            children.setdefault(int(fields[1]), []).append(pid)
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += children.get(pid, [])
    return found


def process_name(pid: int) -> str:
    """What a person would call it: the title it gave itself, or its program and first words; "" when it is gone."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().rstrip(b"\0").decode(errors="replace").split("\0")
        if words == [""]:  # a thread of the kernel
            return (PROC / str(pid) / "comm").read_text().strip()
    except OSError:
        return ""
    program, *rest = words
    if not program.startswith("/"):
        return program.strip()[:_MAX_NAME]
    told = rest[: rest.index("-c") + 1] if "-c" in rest[:4] else rest[:4]
    plain = [Path(word).name for word in told if not word.startswith("-") or word == "-c"]
    return " ".join([Path(program).name, *plain[:2]])[:_MAX_NAME]


def processor_seconds(pid: int, *, children: bool) -> float:
    """User and system time of a process since its start; with `children` also of those that ended and were waited for.
    0 when it is gone."""
    fields = _stat_fields(pid)
    return sum(int(value) for value in fields[11 : 15 if children else 13]) / os.sysconf("SC_CLK_TCK")


def start_ticks(pid: int) -> int | None:
    """When a process was started, in clock ticks after boot: with the id it names one process for ever. None when it is
    gone."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else None


def _stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on (the name before it may hold anything); [] when it is gone."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
