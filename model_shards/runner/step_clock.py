"""How a rank spends its time, which says whether a pipeline is balanced. For logs and metrics: it decides nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class RankTimes:
    """Seconds of one rank since its first step; the three add up to all of them."""

    steps: int = 0
    computing_s: float = 0.0
    """In steps; exchanges within a stage are part of it."""
    waiting_s: float = 0.0
    """In steps, for the stage before (hidden states) or the last one (sampled tokens)."""
    idle_s: float = 0.0
    """Without a plan."""

    def __str__(self) -> str:
        total = max(self.computing_s + self.waiting_s + self.idle_s, 1e-9)
        shares = (self.computing_s / total, self.waiting_s / total, self.idle_s / total)
        return "{} steps in {:.1f} s: {:.0%} computing, {:.0%} waiting for other stages, {:.0%} idle".format(
            self.steps, total, *shares
        )


class StepClock:
    """Measures `RankTimes`. Two readings of the clock a step, and two more a wait."""

    def __init__(self) -> None:
        self.times = RankTimes()
        self._since: float | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        self.times.idle_s += self._lap()
        yield
        self.times.computing_s += self._lap()
        self.times.steps += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within a step: for another rank."""
        self.times.computing_s += self._lap()
        yield
        self.times.waiting_s += self._lap()

    def _lap(self) -> float:
        now = time.monotonic()
        passed = 0.0 if self._since is None else now - self._since
        self._since = now
        return passed
