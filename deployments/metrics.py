"""Every metric of Shoal, defined once: name, kind, unit, labels, buckets.

The values are kept here and rendered as Prometheus text for /metrics; inside a Ray worker they are also reported
through `ray.util.metrics`, so that the Ray dashboard and whoever scrapes Ray see them (there with the prefix `ray_`).
Kept by ourselves because of what is observed once a token: the sequences of a step mostly have the same gap behind
them, and each different one is a bisection and two additions.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from shoal.model_shards.engine.metrics import FinishedSequence, MetricsSink, StepStats

LATENCY = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
"""Seconds, from one token to a long answer."""
TOKEN_GAP = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05),
    *(0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
"""Seconds between two tokens: fine where service levels are set."""
RATIOS = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 16.0)
SIZES = tuple(float(2**power) for power in range(18))
"""Tokens or sequences."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. Every metric also has the label `model_name`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


ENGINE_METRICS = (
    Metric(
        "shoal_time_to_first_token_seconds",
        "histogram",
        "From a request's arrival at the engine to its first token.",
        (),
        LATENCY,
    ),
    Metric("shoal_inter_token_latency_seconds", "histogram", "Between two tokens of one sequence.", (), TOKEN_GAP),
    Metric(
        "shoal_time_per_output_token_seconds",
        "histogram",
        "Mean time per token after the first, of one sequence.",
        (),
        TOKEN_GAP,
    ),
    Metric(
        "shoal_request_latency_seconds",
        "histogram",
        "From a request's arrival at the engine to the end of a sequence.",
        (),
        LATENCY,
    ),
    Metric(
        "shoal_request_queue_seconds",
        "histogram",
        "From a request's arrival to the first step that runs it.",
        (),
        LATENCY,
    ),
    Metric("shoal_request_prompt_tokens", "histogram", "Prompt tokens of a sequence.", (), SIZES),
    Metric("shoal_request_output_tokens", "histogram", "Generated tokens of a sequence.", (), SIZES),
    Metric("shoal_prompt_tokens_total", "counter", "Prompt tokens of ended requests, once for all n samples."),
    Metric("shoal_cached_prompt_tokens_total", "counter", "Prompt tokens that came from the prefix cache."),
    Metric("shoal_output_tokens_total", "counter", "Generated tokens of ended sequences."),
    Metric("shoal_sequences_finished_total", "counter", "Ended sequences.", ("reason",)),
    Metric("shoal_sequences_running", "gauge", "Sequences that own KV blocks."),
    Metric("shoal_sequences_waiting", "gauge", "Sequences in the waiting queue."),
    Metric("shoal_kv_cache_usage_ratio", "gauge", "Share of the KV pool owned by sequences, 0 to 1."),
    Metric("shoal_kv_blocks", "gauge", "Blocks of the KV pool, by state.", ("state",)),
    Metric("shoal_sequences_following", "gauge", "Waiting sequences whose prefix a running one is computing."),
    Metric("shoal_kv_evictions_total", "counter", "Cached KV blocks overwritten because room was needed."),
    Metric("shoal_preemptions_total", "counter", "Sequences that lost their KV blocks and were recomputed."),
    Metric("shoal_step_seconds", "histogram", "One engine step, from submission to result.", (), TOKEN_GAP),
    Metric(
        "shoal_step_time_ratio",
        "histogram",
        "Time of a step over the time it was expected to take, where steps are bounded in time.",
        (),
        RATIOS,
    ),
    Metric("shoal_step_tokens", "histogram", "Tokens computed in one step.", (), SIZES),
    Metric("shoal_step_prompt_tokens", "histogram", "Prompt tokens in one step that has any.", (), SIZES),
    Metric("shoal_step_sequences", "histogram", "Sequences in one step.", (), SIZES),
)
GATEWAY_METRICS = (
    Metric(
        "shoal_http_requests_total",
        "counter",
        "HTTP requests answered; status 499 is a client that hung up.",
        ("route", "status"),
    ),
    Metric(
        "shoal_http_request_seconds",
        "histogram",
        "From the request's headers to the last byte of the answer.",
        ("route",),
        LATENCY,
    ),
    Metric(
        "shoal_http_first_token_seconds",
        "histogram",
        "From the request's headers to the first token given to the socket.",
        ("route",),
        LATENCY,
    ),
    Metric("shoal_http_requests_in_flight", "gauge", "HTTP requests being answered."),
    Metric("shoal_client_disconnects_total", "counter", "Generations ended by a client that hung up.", ("route",)),
    Metric("shoal_rail_verdicts_total", "counter", "Verdicts of rails.", ("direction", "rail", "verdict")),
    Metric("shoal_engines_attached", "gauge", "Engines (shard groups) that this gateway is attached to."),
    Metric("shoal_engines_lost_total", "counter", "Engines that died or were stopped while attached."),
    Metric(
        "shoal_continuations_total",
        "counter",
        "Requests whose engine was lost: gone on in another (continued), or ended with an error (failed).",
        ("outcome",),
    ),
)
TABLE = (*ENGINE_METRICS, *GATEWAY_METRICS)
_BY_NAME = {metric.name: metric for metric in TABLE}


class Mirror(Protocol):
    """A second place for the same values."""

    def record(self, metric: Metric, value: float, labels: tuple[str, ...]) -> None:
        """A counter has grown by `value`, or a gauge is at it."""

    def observe(self, metric: Metric, values: Sequence[float], labels: tuple[str, ...]) -> None:
        """A histogram has seen these."""


class Metrics:
    """The values of one table in one process. Thread-safe; never raises into its callers for a value it is given."""

    def __init__(self, table: Sequence[Metric]) -> None:
        self._table = table
        self._model_name = ""
        self._mirror: Mirror | None = None
        self._lock = threading.Lock()
        self._values: dict[str, dict[tuple[str, ...], Any]] = {metric.name: {} for metric in table}
        for metric in table:
            if not metric.labels:
                self._values[metric.name][()] = _Histogram(metric.buckets) if metric.buckets else 0.0

    def name_model(self, model_name: str, mirror: Mirror | None) -> None:
        """Once it is known which model this is about; before anything is recorded."""
        self._model_name, self._mirror = model_name, mirror

    def add(self, name: str, value: float = 1.0, labels: tuple[str, ...] = ()) -> None:
        """A counter grows (a gauge may shrink by a negative value)."""
        with self._lock:
            series = self._values[name]
            series[labels] = total = series.get(labels, 0.0) + value
        if self._mirror is not None:
            metric = _BY_NAME[name]
            self._mirror.record(metric, value if metric.kind == "counter" else total, labels)

    def set(self, name: str, value: float, labels: tuple[str, ...] = ()) -> None:
        with self._lock:
            self._values[name][labels] = value
        if self._mirror is not None:
            self._mirror.record(_BY_NAME[name], value, labels)

    def observe(self, name: str, values: Sequence[float], labels: tuple[str, ...] = ()) -> None:
        metric = _BY_NAME[name]
        with self._lock:
            series = self._values[name]
            histogram = series.get(labels)
            if histogram is None:
                histogram = series[labels] = _Histogram(metric.buckets)
            if len(values) == 1:
                histogram.observe(values[0], 1)
            else:
                for value, count in Counter(values).items():
                    histogram.observe(value, count)
        if self._mirror is not None:
            self._mirror.observe(metric, values, labels)

    def get(self, name: str, labels: tuple[str, ...] = ()) -> float:
        """The value of a counter or gauge; 0 where nothing was recorded."""
        with self._lock:
            return float(self._values[name].get(labels, 0.0))

    def render(self) -> str:
        """Prometheus text exposition, version 0.0.4."""
        lines: list[str] = []
        with self._lock:
            for metric in self._table:
                series = self._values[metric.name]
                if not series:
                    continue
                lines += (f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}")
                for labels, value in series.items():
                    lines += self._render_series(metric, labels, value)
        return "\n".join(lines) + "\n"

    def _render_series(self, metric: Metric, labels: tuple[str, ...], value: Any) -> list[str]:
        pairs = [("model_name", self._model_name), *zip(metric.labels, labels, strict=True)]
        shown = ",".join(f'{key}="{_escape(text)}"' for key, text in pairs)
        if not isinstance(value, _Histogram):
            return [
                f"{metric.name}{{{shown}}} {value:g}"
                if value != int(value)
                else f"{metric.name}{{{shown}}} {int(value)}"
            ]
        lines, running = [], 0
        for bound, count in zip((*value.bounds, math.inf), value.counts, strict=True):
            running += count
            edge = "+Inf" if bound == math.inf else f"{bound:g}"
            lines.append(f'{metric.name}_bucket{{{shown},le="{edge}"}} {running}')
        return [*lines, f"{metric.name}_sum{{{shown}}} {value.sum:.9g}", f"{metric.name}_count{{{shown}}} {running}"]


def join_metrics(texts: dict[str, str]) -> str:
    """The Prometheus texts of several engines as one, each series with the engine's name as label `engine`. The text
    of a single one stays as it is."""
    if len(texts) == 1:
        return next(iter(texts.values()))
    families: dict[str, list[str]] = {}
    """The comments of a family -> its series, of all engines."""
    for name, text in texts.items():
        comments = ""
        series: list[str] = []
        for line in text.splitlines():
            if line.startswith("# HELP"):
                comments, series = line, []
            elif line.startswith("#"):
                comments += f"\n{line}"
                series = families.setdefault(comments, [])
            else:
                metric, _, rest = line.partition("{")
                series.append(f'{metric}{{engine="{_escape(name)}",{rest}')
    return "".join("\n".join((comments, *series, "")) for comments, series in families.items())


class _Histogram:
    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count


class EngineMetrics(MetricsSink):
    """The engine's measurements, recorded in a `Metrics`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._preemptions = self._evictions = 0

    def request_started(self, queue_s: float) -> None:
        self._metrics.observe("shoal_request_queue_seconds", (queue_s,))

    def first_token(self, ttft_s: float) -> None:
        self._metrics.observe("shoal_time_to_first_token_seconds", (ttft_s,))

    def inter_token(self, gaps_s: list[float]) -> None:
        self._metrics.observe("shoal_inter_token_latency_seconds", gaps_s)

    def sequence_finished(self, sequence: FinishedSequence) -> None:
        metrics = self._metrics
        metrics.add("shoal_sequences_finished_total", 1, (sequence.reason.value,))
        if sequence.index == 0:
            metrics.add("shoal_prompt_tokens_total", sequence.num_prompt_tokens)
            metrics.add("shoal_cached_prompt_tokens_total", sequence.num_cached_tokens)
        metrics.add("shoal_output_tokens_total", sequence.num_output_tokens)
        metrics.observe("shoal_request_prompt_tokens", (sequence.num_prompt_tokens,))
        metrics.observe("shoal_request_output_tokens", (sequence.num_output_tokens,))
        metrics.observe("shoal_request_latency_seconds", (sequence.e2e_s,))
        if sequence.num_output_tokens > 1:
            per_token = sequence.decode_s / (sequence.num_output_tokens - 1)
            metrics.observe("shoal_time_per_output_token_seconds", (per_token,))

    def step(self, stats: StepStats) -> None:
        metrics = self._metrics
        metrics.observe("shoal_step_seconds", (stats.step_s,))
        metrics.observe("shoal_step_tokens", (stats.num_tokens,))
        if stats.num_prompt_tokens:
            metrics.observe("shoal_step_prompt_tokens", (stats.num_prompt_tokens,))
        if stats.expected_s:
            metrics.observe("shoal_step_time_ratio", (stats.step_s / stats.expected_s,))
        metrics.observe("shoal_step_sequences", (stats.num_sequences,))
        metrics.set("shoal_sequences_running", stats.num_running)
        metrics.set("shoal_sequences_waiting", stats.num_waiting)
        metrics.set("shoal_sequences_following", stats.num_following)
        metrics.set("shoal_kv_cache_usage_ratio", stats.kv_usage)
        if stats.preemptions_total > self._preemptions:
            metrics.add("shoal_preemptions_total", stats.preemptions_total - self._preemptions)
            self._preemptions = stats.preemptions_total
        if stats.kv_evictions_total > self._evictions:
            metrics.add("shoal_kv_evictions_total", stats.kv_evictions_total - self._evictions)
            self._evictions = stats.kv_evictions_total


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
