"""Our metrics, reported through Ray's metrics API as well."""

from __future__ import annotations

import logging
import queue
import threading
from typing import Any

from ray.util import metrics as ray_metrics

from shoal.deployments.metrics import TABLE, Metric

logger = logging.getLogger("shoal.metrics")

_MAX_QUEUED = 100_000


class RayMirror:
    """Reports every recorded value to Ray's metrics agent. Only inside a Ray worker or driver.

    A value costs Ray some ten microseconds, and a step records one a sequence: so a thread of its own reports them,
    and the engine only queues. Values that come faster than they can be reported are dropped, with one log line.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._instruments = {metric.name: _instrument(metric) for metric in TABLE}
        self._values: queue.SimpleQueue[tuple[Metric, float, tuple[str, ...]]] = queue.SimpleQueue()
        self._dropped = False
        threading.Thread(target=self._report, name="shoal-ray-metrics", daemon=True).start()

    def record(self, metric: Metric, value: float, labels: tuple[str, ...]) -> None:
        if self._values.qsize() < _MAX_QUEUED:
            self._values.put((metric, value, labels))
        elif not self._dropped:
            self._dropped = True
            logger.warning("Ray's metrics fall behind and miss values from now on; /metrics has them all")

    def _report(self) -> None:
        while True:
            metric, value, labels = self._values.get()
            try:
                self._forward(metric, value, labels)
            except Exception:
                logger.exception("Ray's metrics API failed; /metrics goes on")
                return

    def _forward(self, metric: Metric, value: float, labels: tuple[str, ...]) -> None:
        tags = {"model_name": self._model_name, **dict(zip(metric.labels, labels, strict=True))}
        instrument = self._instruments[metric.name]
        if metric.kind == "histogram":
            instrument.observe(value, tags=tags)
        elif metric.kind == "gauge":
            instrument.set(value, tags=tags)
        elif value > 0:  # Ray's counters refuse to grow by nothing
            instrument.inc(value, tags=tags)


def _instrument(metric: Metric) -> Any:
    keys = ("model_name", *metric.labels)
    if metric.kind == "histogram":
        return ray_metrics.Histogram(metric.name, metric.help, boundaries=list(metric.buckets), tag_keys=keys)
    kind = ray_metrics.Counter if metric.kind == "counter" else ray_metrics.Gauge
    return kind(metric.name, metric.help, tag_keys=keys)
