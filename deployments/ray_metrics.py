"""Our metrics, reported through Ray's metrics API as well."""

from __future__ import annotations

from typing import Any

from ray.util import metrics as ray_metrics

from shoal.deployments.metrics import TABLE, Metric


class RayMirror:
    """Reports every recorded value to Ray's metrics agent. Only inside a Ray worker or driver."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._instruments = {metric.name: _instrument(metric) for metric in TABLE}

    def record(self, metric: Metric, value: float, labels: tuple[str, ...]) -> None:
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
