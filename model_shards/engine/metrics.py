"""What the engine reports of itself, and to whom. `deployments/` implements the sink; alone, nothing is recorded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.model_shards.engine.request import FinishReason

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepStats:
    """One committed step."""

    num_tokens: int
    """Rows of the forward pass: prompt tokens and decodes."""
    num_prompt_tokens: int
    """Those of them in pieces of prompts."""
    num_sequences: int
    """Sequences in the step (the batch size)."""
    num_running: int
    num_waiting: int
    num_following: int
    """The waiting sequences whose prefix a running one is computing."""
    kv_usage: float
    """Share of the KV pool owned by sequences, 0 .. 1."""
    step_s: float
    """From submission to result."""
    expected_s: float | None
    """What `step_s` was expected to be; None where steps are not bounded in time."""
    preemptions_total: int
    kv_evictions_total: int
    """Cached KV blocks overwritten because room was needed."""


@dataclass(frozen=True, slots=True)
class FinishedSequence:
    """One sequence that ended, for whatever reason."""

    reason: FinishReason
    index: int
    """Which of its request's samples: they share one prompt, which counts once."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    e2e_s: float
    """Arrival to end."""
    decode_s: float
    """First token to end; 0 when there was none."""


class MetricsSink:
    """Receives measurements on the engine's thread; must not block. This one drops them."""

    def request_started(self, queue_s: float) -> None:
        """A request ran for the first time, `queue_s` after its arrival."""

    def first_token(self, ttft_s: float) -> None:
        """The first token of a sequence was drawn, `ttft_s` after the request's arrival."""

    def inter_token(self, gaps_s: list[float]) -> None:
        """Seconds between two tokens of a sequence: one entry for each sequence that got a further token."""

    def sequence_finished(self, sequence: FinishedSequence) -> None:
        """A sequence ended."""

    def step(self, stats: StepStats) -> None:
        """A step was committed."""


class GuardedMetrics(MetricsSink):
    """Stands between the engine and a sink: what the sink raises is logged once a method, and goes no further."""

    def __init__(self, sink: MetricsSink) -> None:
        self._sink = sink
        self._failed: set[str] = set()

    def request_started(self, queue_s: float) -> None:
        self._call(self._sink.request_started, queue_s)

    def first_token(self, ttft_s: float) -> None:
        self._call(self._sink.first_token, ttft_s)

    def inter_token(self, gaps_s: list[float]) -> None:
        self._call(self._sink.inter_token, gaps_s)

    def sequence_finished(self, sequence: FinishedSequence) -> None:
        self._call(self._sink.sequence_finished, sequence)

    def step(self, stats: StepStats) -> None:
        self._call(self._sink.step, stats)

    def _call(self, method: Callable[[Any], None], value: object) -> None:
        try:
            method(value)
        except Exception:
            if method.__name__ not in self._failed:
                self._failed.add(method.__name__)
                logger.exception("The metrics sink failed in %s; it is not logged again.", method.__name__)
