"""Measures the machine that the engine is to run on."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.configs.resolve import Machine


def measure_machine() -> Machine:
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    free = min((torch.cuda.mem_get_info(index)[0] for index in range(num_gpus)), default=0)
    return Machine(num_gpus, available_ram(), free)


def available_ram() -> int:
    """Bytes that this process can still use without swapping: the kernel's estimate, or what is left of the
    container's limit if that is less."""
    return min(_kernel_estimate(), _left_of_cgroup_limit(Path("/sys/fs/cgroup")))


def _kernel_estimate() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _left_of_cgroup_limit(root: Path) -> int:
    """Control groups v2 (`memory.max`) and v1; page cache that can be dropped counts as free."""
    unlimited = 1 << 62
    for limit_file, usage_file, stat_file, cache_key in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        try:
            limit = (root / limit_file).read_text().strip()
            usage = int((root / usage_file).read_text())
            stat = dict(line.split() for line in (root / stat_file).read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit == "max":
            return unlimited
        return max(0, int(limit) - usage + int(stat.get(cache_key, 0)))
    return unlimited
