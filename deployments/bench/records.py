"""What was observed of one request, and the latencies that follow from it.

All times are seconds on one monotonic clock, taken where the client reads its socket (or, in-process, where the engine
delivers). Zero of a request is `due`, the moment it ought to be sent: a client that falls behind its own schedule must
not make a server look fast.

    due      sent        first token      second        last      end
     |--------|---------------|-------------|---- ... ----|---------|
     |<------- TTFT --------->|<--- ITL --->|
     |        |               |<----------- (N - 1) * TPOT -------->|
     |<---------------------------- E2E -------------------------->|
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestRecord:
    """One request as the client saw it. `E2E == TTFT + TPOT * (N - 1)` holds for every record with N > 1 tokens."""

    wanted_tokens: int
    due: float
    tag: str = ""
    """Which part of a mixed workload it belongs to."""
    sent: float = 0.0
    end: float = 0.0
    """When the last byte arrived: what a server holds back to the end counts against it."""
    token_times: list[float] = field(default_factory=list)
    """Arrival of each event that carried text; empty events (a role, the usage) are not tokens."""
    output_tokens: int = 0
    """N, from the server's usage; an event may carry several tokens."""
    input_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.token_times[0] - self.due

    @property
    def e2e(self) -> float:
        return self.end - self.due

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; undefined for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies, raw: a burst is one gap, however many tokens it brings."""
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]

    def meets(self, slo_ttft: float, slo_tpot: float) -> bool:
        """Both limits kept. A failed request meets none; a single token has only a TTFT to keep."""
        return self.ok and self.ttft <= slo_ttft and (self.tpot is None or self.tpot <= slo_tpot)
