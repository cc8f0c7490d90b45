"""The shapes of load: how many requests, how long, and when they arrive."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.configs.errors import ConfigError

WAVES = 3
LEAST_REQUESTS = 4


@dataclass(frozen=True, slots=True)
class LongStreams:
    """Long prompts sent beside the workload's own, which then last exactly as long as these."""

    streams: int = 2
    requests: int = 4
    input_tokens: int = 4096
    output_tokens: int = 32


@dataclass(frozen=True, slots=True)
class Workload:
    """One shape of load. Closed loop when `rate` and `capacity_share` are None, else Poisson arrivals."""

    name: str
    summary: str
    requests: int
    input_tokens: int = 128
    """Of the whole rendered prompt, template included."""
    output_tokens: int = 128
    concurrency: int = 1
    rate: float | None = None
    """Requests a second, open loop."""
    capacity_share: float | None = None
    """Open loop at this share of the requests a second that W3 reached; becomes `rate` by `at_capacity`."""
    shared_prefix_tokens: int = 0
    """A system prompt that requests have in common, on top of `input_tokens`."""
    prefixes: int = 1
    """How many such system prompts, each for an equal share of the requests, one after the other. The first
    `concurrency` requests of each are tagged `cold` (nobody has computed it yet), the others `hit`."""
    long: LongStreams | None = None

    def __post_init__(self) -> None:
        for field in ("requests", "input_tokens", "output_tokens", "concurrency", "prefixes"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field} must be at least 1; got {getattr(self, field)}.", param=field)
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ConfigError(f"rate must be a positive number of requests a second; got {self.rate}.", param="rate")

    @property
    def open_loop(self) -> bool:
        return self.rate is not None or self.capacity_share is not None

    @property
    def total_requests(self) -> int | None:
        """How many requests a run sends; None when the short streams last as long as the long ones."""
        return None if self.long else self.requests

    def scaled(self, factor: float) -> Workload:
        """The same shape with `factor` times as many requests, but never so few that a stream has none or a prefix is
        not hit."""
        long = self.long and replace(self.long, requests=max(1, round(self.long.requests * factor)))
        least = 1 if self.open_loop or self.long else self.concurrency
        if self.shared_prefix_tokens:
            least = self.prefixes * (self.concurrency + 1)
        return replace(self, requests=max(least, round(self.requests * factor)), long=long)

    def at_concurrency(self, streams: int, requests: int | None = None) -> Workload:
        """A point of a sweep: closed loop of `streams`, `WAVES` requests each unless `requests` are asked for."""
        count = requests or max(LEAST_REQUESTS, WAVES * streams)
        return replace(self, name=f"{self.name}@{streams}", requests=count, concurrency=streams)

    def at_capacity(self, requests_per_s: float) -> Workload:
        """With `capacity_share` turned into a rate."""
        if self.capacity_share is None:
            return self
        return replace(self, rate=self.capacity_share * requests_per_s, capacity_share=None)


_PRESETS: dict[str, list[Workload]] = {
    "W1": [Workload("W1", "one stream, 128 tokens in, 128 out: the speed one user sees", 3)],
    "W2": [Workload("W2", "8 streams, 128 in, 128 out: a small batch", 24, concurrency=8)],
    "W3": [Workload("W3", "32 streams, 128 in, 128 out: throughput", 64, concurrency=32)],
    "W4": [
        Workload(
            "W4",
            "8 streams that share a 1,024-token system prompt, 64 out: the prefix cache",
            32,
            input_tokens=64,
            output_tokens=64,
            concurrency=8,
            shared_prefix_tokens=1024,
        ),
        Workload(
            "W4@1",
            "one stream, three such prompts in turn, 8 out: what a prefix hit saves of the TTFT",
            12,
            input_tokens=64,
            output_tokens=8,
            shared_prefix_tokens=1024,
            prefixes=3,
        ),
    ],
    "W5": [
        Workload(
            "W5",
            "4 short streams beside two of 4,096-token prompts: do long prompts stall the others?",
            1,
            input_tokens=64,
            output_tokens=64,
            concurrency=4,
            long=LongStreams(),
        )
    ],
    "W6": [
        Workload(f"W6@{share:.0%}", f"Poisson arrivals at {share:.0%} of what W3 sustained", 32, capacity_share=share)
        for share in (0.5, 0.8)
    ],
}
PRESETS = tuple(_PRESETS)


def describe_presets() -> list[tuple[str, str]]:
    """(name, summary) of each preset, for help texts."""
    return [(name, "; ".join(workload.summary for workload in group)) for name, group in _PRESETS.items()]


def preset(name: str, scale: float = 1.0) -> list[Workload]:
    """The workloads of one preset (W4 and W6 are two). `scale` multiplies the number of requests."""
    group = _PRESETS.get(name.upper())
    if group is None:
        raise ConfigError(f"Unknown workload {name!r}; there are {', '.join(PRESETS)}.", param="workload")
    return [workload.scaled(scale) for workload in group]
