"""Our metrics, reported through Ray's metrics API as well."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

from ray.util import metrics as ray_metrics

from shoal.deployments.metrics import TABLE, Metric

logger = logging.getLogger("shoal.metrics")

PERIOD_S = 1.0
MAX_OBSERVATIONS = 20
"""Of one histogram in one period."""
_MAX_WAITING = 100_000

_Series = tuple[str, tuple[str, ...]]
"""A metric's name and label values."""


class RayMirror:
    """Reports to Ray's metrics agent, once a period and from a thread of its own. Only inside a Ray worker or driver.

    Ray takes a histogram value by value: some 10 us in this process and as many again in its agent, which adds up where
    every token and every step has one. So a histogram that sees more than MAX_OBSERVATIONS values a period gives Ray a
    random sample of so many: its quantiles are the same, its count is not. /metrics has every value, and what happens
    once a request rarely comes so often.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._instruments = {metric.name: _instrument(metric) for metric in TABLE}
        self._metrics = {metric.name: metric for metric in TABLE}
        self._lock = threading.Lock()
        self._counts: dict[_Series, float] = {}
        self._levels: dict[_Series, float] = {}
        self._observed: dict[_Series, list[float]] = {}
        threading.Thread(target=self._report, name="shoal-ray-metrics", daemon=True).start()

    def record(self, metric: Metric, value: float, labels: tuple[str, ...]) -> None:
        """A counter has grown by `value`, or a gauge is at it."""
        series = (metric.name, labels)
        with self._lock:
            if metric.kind == "counter":
                self._counts[series] = self._counts.get(series, 0.0) + value
            else:
                self._levels[series] = value

    def observe(self, metric: Metric, values: Sequence[float], labels: tuple[str, ...]) -> None:
        with self._lock:
            waiting = self._observed.setdefault((metric.name, labels), [])
            if len(waiting) < _MAX_WAITING:
                waiting.extend(values)

    def flush(self) -> None:
        """Gives Ray what came since the last time."""
        with self._lock:
            counts, self._counts = self._counts, {}
            levels, self._levels = self._levels, {}
            observed, self._observed = self._observed, {}
        for (name, labels), grown in counts.items():
            if grown > 0:  # Ray's counters refuse to grow by nothing
                self._instruments[name].inc(grown, tags=self._tags(name, labels))
        for (name, labels), level in levels.items():
            self._instruments[name].set(level, tags=self._tags(name, labels))
        for (name, labels), values in observed.items():
            tags = self._tags(name, labels)
            shown = values if len(values) <= MAX_OBSERVATIONS else random.sample(values, MAX_OBSERVATIONS)
            for value in shown:
                self._instruments[name].observe(value, tags=tags)

    def _report(self) -> None:
        while True:
            time.sleep(PERIOD_S)
            try:
                self.flush()
            except Exception:
                logger.exception("Ray's metrics API failed; /metrics goes on")
                return

    def _tags(self, name: str, labels: tuple[str, ...]) -> dict[str, str]:
        return {"model_name": self._model_name, **dict(zip(self._metrics[name].labels, labels, strict=True))}


def _instrument(metric: Metric) -> Any:
    keys = ("model_name", *metric.labels)
    if metric.kind == "histogram":
        return ray_metrics.Histogram(metric.name, metric.help, boundaries=list(metric.buckets), tag_keys=keys)
    kind = ray_metrics.Counter if metric.kind == "counter" else ray_metrics.Gauge
    return kind(metric.name, metric.help, tag_keys=keys)
