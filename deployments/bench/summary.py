"""From records to figures: percentiles, throughput, goodput. Pure functions of what was recorded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal.deployments.bench.records import RequestRecord

QUANTILES = 100
"""A distribution is kept as its values at 0/100, 1/100 ... 100/100 of its observations: enough to draw it, and of the
same size for three hundred requests and for three million."""
GOOD_SHARE = 0.9
"""A rate is sustained when at least this share of the requests meets both objectives (DistServe's convention)."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Latency objectives in milliseconds."""

    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True, slots=True)
class Distribution:
    """Milliseconds over requests (or, for ITL, over gaps)."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    quantiles: tuple[float, ...]
    """Evenly spaced from the least to the largest value; every value when there are at most `QUANTILES` + 1."""

    @classmethod
    def of_seconds(cls, values: Sequence[float]) -> Distribution | None:
        if not values:
            return None
        ordered = sorted(value * 1e3 for value in values)
        p50, p90, p99 = (round(percentile(ordered, share), 3) for share in (0.5, 0.9, 0.99))
        mean = round(math.fsum(ordered) / len(ordered), 3)
        steps = min(len(ordered) - 1, QUANTILES)
        quantiles = tuple(round(percentile(ordered, i / max(1, steps)), 3) for i in range(steps + 1))
        return cls(len(ordered), mean, p50, p90, p99, quantiles[-1], quantiles)


@dataclass(frozen=True, slots=True)
class Goodput:
    """How much of the load was served within the objectives; requests that failed count as misses."""

    objective: Objective
    attainment: float
    """Share of all requests that met both objectives, 0..1."""
    requests_per_s: float
    sustained: bool


@dataclass(frozen=True, slots=True)
class Summary:
    """One measured run. Rates are over its whole wall time, ramp-up and tail included."""

    requests: int
    errors: int
    early_stops: int
    """Answers shorter than asked for: they flatter E2E, so they are counted."""
    wall_s: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    input_tokens_per_s: float
    requests_per_s: float
    tokens_per_event: float
    send_lag_ms: float
    """Longest delay between a request's due time and its sending: the client's own tardiness."""
    ttft_ms: Distribution | None
    itl_ms: Distribution | None
    tpot_ms: Distribution | None
    e2e_ms: Distribution | None
    goodput: Goodput | None = None
    first_error: str | None = None
    by_tag: dict[str, Summary] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between the closest ranks (numpy's default); `ordered` ascends and is not empty."""
    place = (len(ordered) - 1) * share
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(records: Sequence[RequestRecord], wall_s: float, objective: Objective | None = None) -> Summary:
    """Figures of one run; records of several tags are summarised together and each tag by itself as well."""
    tags = sorted({record.tag for record in records})
    by_tag = {}
    if len(tags) > 1:
        by_tag = {tag: summarize([r for r in records if r.tag == tag], wall_s, objective) for tag in tags}
    done = [record for record in records if record.ok]
    errors = [record.error for record in records if record.error is not None]
    output_tokens = sum(record.output_tokens for record in done)
    input_tokens = sum(record.input_tokens or 0 for record in done)
    return Summary(
        requests=len(records),
        errors=len(errors),
        early_stops=sum(record.output_tokens < record.wanted_tokens for record in done),
        wall_s=round(wall_s, 4),
        input_tokens=input_tokens,
        cached_tokens=sum(record.cached_tokens or 0 for record in done),
        output_tokens=output_tokens,
        output_tokens_per_s=round(output_tokens / wall_s, 3),
        input_tokens_per_s=round(input_tokens / wall_s, 3),
        requests_per_s=round(len(done) / wall_s, 5),
        tokens_per_event=round(output_tokens / max(1, sum(len(record.token_times) for record in done)), 3),
        send_lag_ms=round(max((record.sent - record.due for record in records), default=0.0) * 1e3, 3),
        ttft_ms=Distribution.of_seconds([record.ttft for record in done]),
        itl_ms=Distribution.of_seconds([gap for record in done for gap in record.gaps]),
        tpot_ms=Distribution.of_seconds([record.tpot for record in done if record.tpot is not None]),
        e2e_ms=Distribution.of_seconds([record.e2e for record in done]),
        goodput=None if objective is None else _goodput(records, wall_s, objective),
        first_error=errors[0] if errors else None,
        by_tag=by_tag,
    )


def _goodput(records: Sequence[RequestRecord], wall_s: float, objective: Objective) -> Goodput:
    good = sum(record.meets(objective.ttft_ms / 1e3, objective.tpot_ms / 1e3) for record in records)
    attainment = good / len(records) if records else 0.0
    return Goodput(objective, round(attainment, 4), round(good / wall_s, 5), attainment >= GOOD_SHARE)
