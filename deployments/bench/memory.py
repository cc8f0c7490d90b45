"""How much memory the processes of a server take, each by its name. Linux only (reads /proc).

PSS (proportional set size) is what counts: a page that n processes share counts 1/n for each, so the sum over a tree is
about what would become free if it ended. Reading it walks a process's page tables: between measurements, not during.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from shoal.deployments.bench.processes import PROC, process_name, process_tree


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """One process. MB are 2**20 bytes."""

    name: str
    pid: int
    pss_mb: float
    peak_rss_mb: float
    """The most that was ever resident, shared pages in full."""


@dataclass(frozen=True, slots=True)
class TreeMemory:
    """A server's processes, largest first."""

    processes: list[ProcessMemory]

    @property
    def pss_mb(self) -> float:
        return round(sum(process.pss_mb for process in self.processes), 1)

    def to_json(self) -> dict[str, Any]:
        return {"pss_mb": self.pss_mb, "processes": [asdict(process) for process in self.processes]}


def tree_memory(root: int) -> TreeMemory | None:
    """Of `root` and its descendants; None where the system does not say."""
    found = [memory for pid in process_tree(root) if (memory := _process_memory(pid)) is not None]
    return TreeMemory(sorted(found, key=lambda memory: -memory.pss_mb)) if found else None


def _process_memory(pid: int) -> ProcessMemory | None:
    folder = PROC / str(pid)
    try:
        pss = _kilobytes((folder / "smaps_rollup").read_text(), "Pss:")
        peak = _kilobytes((folder / "status").read_text(), "VmHWM:")
    except OSError:
        return None
    if pss is None:
        return None
    return ProcessMemory(process_name(pid), pid, round(pss / 1024, 1), round((peak or 0) / 1024, 1))


def _kilobytes(text: str, name: str) -> int | None:
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith(name)), None)
