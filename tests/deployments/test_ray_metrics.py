"""What Ray is told: counters grow by their sums, gauges are at their last, histograms see values, and not too many."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from shoal.deployments import ray_metrics
from shoal.deployments.metrics import ENGINE_METRICS, GATEWAY_METRICS, Metrics
from shoal.deployments.ray_metrics import MAX_OBSERVATIONS, RayMirror


class Instrument:
    """In place of one of Ray's."""

    calls: list[tuple[str, str, float, dict[str, str]]]

    def __init__(self, name: str, *_: Any, **__: Any) -> None:
        self.name = name

    def inc(self, value: float, tags: dict[str, str]) -> None:
        self.calls.append(("inc", self.name, value, tags))

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.calls.append(("set", self.name, value, tags))

    def observe(self, value: float, tags: dict[str, str]) -> None:
        self.calls.append(("observe", self.name, value, tags))


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> RayMirror:
    Instrument.calls = []
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(ray_metrics.ray_metrics, kind, Instrument)
    monkeypatch.setattr(ray_metrics, "PERIOD_S", 3600.0)
    return RayMirror("m")


def test_a_period_is_one_call_a_counter_and_gauge(mirror: RayMirror) -> None:
    metrics = Metrics(GATEWAY_METRICS)
    metrics.name_model("m", mirror)
    for status in ("200", "200", "499"):
        metrics.add("shoal_http_requests_in_flight", 1)
        metrics.add("shoal_http_requests_total", 1, ("/v1", status))
    metrics.add("shoal_http_requests_in_flight", -1)
    metrics.add("shoal_client_disconnects_total", 0, ("/v1",))
    mirror.flush()
    tags = {"model_name": "m", "route": "/v1"}
    assert Instrument.calls == [
        ("inc", "shoal_http_requests_total", 2, {**tags, "status": "200"}),
        ("inc", "shoal_http_requests_total", 1, {**tags, "status": "499"}),
        ("set", "shoal_http_requests_in_flight", 2, {"model_name": "m"}),
    ]
    mirror.flush()
    assert len(Instrument.calls) == 3


def test_a_histogram_is_whole_while_it_is_small_and_a_fair_sample_beyond(mirror: RayMirror) -> None:
    metrics = Metrics(ENGINE_METRICS)
    metrics.name_model("m", mirror)
    metrics.observe("shoal_time_to_first_token_seconds", (0.5,))
    gaps = [float(n) for n in range(1000)]
    metrics.observe("shoal_inter_token_latency_seconds", gaps)
    mirror.flush()
    seen = Counter(name for _, name, _, _ in Instrument.calls)
    assert seen == {"shoal_time_to_first_token_seconds": 1, "shoal_inter_token_latency_seconds": MAX_OBSERVATIONS}
    sample = [value for _, name, value, _ in Instrument.calls if name == "shoal_inter_token_latency_seconds"]
    assert len(set(sample)) == MAX_OBSERVATIONS
    assert set(sample) <= set(gaps)
    assert max(sample) > 100  # not the first that came


def test_our_own_histogram_counts_every_value() -> None:
    metrics = Metrics(ENGINE_METRICS)
    metrics.name_model("m", None)
    metrics.observe("shoal_inter_token_latency_seconds", [0.0015, 0.0015, 0.02, 0.0015])
    lines = [line for line in metrics.render().splitlines() if line.startswith("shoal_inter_token_latency_seconds")]
    values = {line.rpartition(" ")[0].partition("{")[2]: line.rpartition(" ")[2] for line in lines}
    assert values['model_name="m",le="0.001"}'] == "0"
    assert values['model_name="m",le="0.002"}'] == "3"
    assert values['model_name="m",le="+Inf"}'] == "4"
    assert f"{0.0015 * 3 + 0.02:.9g}" in {line.rpartition(" ")[2] for line in lines}
