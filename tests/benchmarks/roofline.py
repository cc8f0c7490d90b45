"""What the machine allows: read bandwidth and fp32 matrix rate, measured here, and the tokens/s that follow.

A decode step of B sequences reads every weight once and B caches, and computes 2 * parameters * B multiply-adds; the
bound is the slower of the two, as if they overlapped perfectly. A fraction of it says how far an engine is from the
machine's limit, whatever its peers do.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class MachineLimits:
    read_gb_s: dict[int, float]
    """Buffer size in bytes -> GB/s; smaller buffers stay partly in the last-level cache."""
    fp32_gflop_s: float
    threads: int
    probe: str

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> MachineLimits:
        """JSON makes text of the sizes."""
        return cls(**{**found, "read_gb_s": {int(size): rate for size, rate in found["read_gb_s"].items()}})


def measure(sizes: list[int], threads: int) -> MachineLimits:
    """Runs the C probe, or numpy where there is no compiler (one thread, so a lower figure)."""
    rates, probe = _compiled(sizes, threads)
    return MachineLimits(dict(zip(sizes, rates, strict=True)), round(_matrix_rate(threads), 1), threads, probe)


def decode_bound(limits: MachineLimits, weight_bytes: int, kv_bytes: float, batch: int, parameters: int) -> float:
    """Tokens/s of a batch whose sequences each hold `kv_bytes` of cache."""
    read = limits.read_gb_s[min(limits.read_gb_s, key=lambda size: abs(size - weight_bytes))] * 1e9
    reading = (weight_bytes + batch * kv_bytes) / read
    computing = batch * 2 * parameters / (limits.fp32_gflop_s * 1e9)
    return batch / max(reading, computing)


def _compiled(sizes: list[int], threads: int) -> tuple[list[float], str]:
    program = _probe()
    if program is None:
        return [_numpy_rate(size) for size in sizes], "numpy, one thread"
    environment = {"OMP_NUM_THREADS": str(threads)}
    command = [str(program), *map(str, sizes)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [float(line) for line in done.stdout.split()], "C"


@functools.cache
def _probe() -> Path | None:
    """Compiled once; None without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    folder = tempfile.TemporaryDirectory(prefix="roofline-")
    atexit.register(folder.cleanup)
    program = Path(folder.name) / "read_bandwidth"
    flags = ["-O3", "-march=native", "-fopenmp"]
    subprocess.run([compiler, *flags, str(HERE / "read_bandwidth.c"), "-o", str(program)], check=True)
    return program


def _numpy_rate(size: int) -> float:
    words = numpy.ones(size // 8, numpy.uint64)
    best = 0.0
    for _ in range(8):
        start = time.perf_counter()
        words.sum()
        best = max(best, size / (time.perf_counter() - start) / 1e9)
    return best


def _matrix_rate(threads: int) -> float:
    """GFLOP/s of a large fp32 matrix product."""
    import torch

    torch.set_num_threads(threads)
    side = 1536
    left, right = torch.randn(side, side), torch.randn(side, side)
    best = 0.0
    for _ in range(8):
        start = time.perf_counter()
        left @ right
        best = max(best, 2 * side**3 / (time.perf_counter() - start) / 1e9)
    return best
