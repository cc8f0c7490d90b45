"""How a rank's time is divided."""

from __future__ import annotations

import itertools

import pytest

from shoal.model_shards.runner import step_clock
from shoal.model_shards.runner.step_clock import RankTimes, StepClock


def test_a_ranks_time_is_computing_waiting_or_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = itertools.accumulate([100, 5, 2, 3, 10, 1])
    monkeypatch.setattr(step_clock.time, "monotonic", lambda: float(next(readings)))
    clock = StepClock()
    with clock.step(), clock.waiting():  # 5 s, then 2 s of waiting, then 3 s
        pass
    with clock.step():  # 10 s later, for 1 s
        pass
    assert clock.times == RankTimes(steps=2, computing_s=9, waiting_s=2, idle_s=10)
    told = "2 steps in 21.0 s: 43% computing, 10% waiting for other stages, 48% idle"
    assert str(clock.times) == told


def test_a_rank_without_a_step_has_no_time() -> None:
    assert str(StepClock().times) == "0 steps in 0.0 s: 0% computing, 0% waiting for other stages, 0% idle"
