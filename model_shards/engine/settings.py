"""What the scheduler is told once, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    max_num_seqs: int
    max_num_batched_tokens: int
    """Token budget of one step. At least `max_num_seqs`, so that no decode ever waits for another."""
    max_model_len: int
    eos_token_ids: frozenset[int]
    prefill_chunk_size: int | None = None
    """Most tokens of one sequence in a step; None: the whole budget."""
    max_partial_prefills: int = 4
    """Prompts longer than a chunk that may be in their middle at once; more would hold blocks without progress."""
    micro_batches: int = 1
    """Batches that take turns, for a pipeline of so many stages: whoever draws a token in step N draws its next one in
    step N + micro_batches at the earliest, which starts when the token of step N has left the last stage."""

    def __post_init__(self) -> None:
        assert self.max_num_batched_tokens >= self.max_num_seqs > 0
        assert self.max_partial_prefills > 0
        assert self.micro_batches > 0
        assert self.prefill_chunk_size is None or self.prefill_chunk_size > 0


@dataclass(slots=True)
class SchedulerCounters:
    """Monotonic totals."""

    steps: int = 0
    prompt_tokens: int = 0
    """Of requests when they first ran, cached ones included; a prompt counts once, whatever n is."""
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    followers: int = 0
    """Times that a sequence was kept waiting for a prefix that another was computing."""
    preemptions: int = 0
    dropped_results: int = 0
    """Results of steps whose sequence had ended or been preempted meanwhile."""

    def add(self, other: SchedulerCounters) -> None:
        """Adds another scheduler's totals, but for the steps: schedulers of one engine take the same."""
        self.prompt_tokens += other.prompt_tokens
        self.cached_prompt_tokens += other.cached_prompt_tokens
        self.output_tokens += other.output_tokens
        self.followers += other.followers
        self.preemptions += other.preemptions
        self.dropped_results += other.dropped_results
