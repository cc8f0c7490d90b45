"""What crosses the line between the engine and its executor, once a step.

A sequence is sent whole once (`NewSequence`), then as diffs (`ScheduledChunk`). Every rank keeps the tokens of each
live sequence itself and appends what was sampled, so that a decode step names no token ids at all and the plan of
step N+1 can be made before the tokens of step N are known.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shoal.model_shards.sampling.params import SamplingParams


@dataclass(slots=True)
class NewSequence:
    """A sequence that the ranks do not know yet (new; or resumed after preemption, with its outputs)."""

    seq_id: int
    generation: int
    """Counts preemptions; results of an older generation are dropped by the scheduler."""
    token_ids: list[int]
    num_prompt_tokens: int
    """The first so many of `token_ids` are the prompt; the rest are outputs (penalties and RNG positions need it)."""
    sampling: SamplingParams
    seed: int
    """Resolved 64-bit seed; with `sample_index` and the output position it determines every draw."""
    sample_index: int
    block_ids: list[int]
    """Blocks held before this step, in order (from a prefix hit or a fork)."""

    def to_wire(self) -> list[Any]:
        return [
            self.seq_id,
            self.generation,
            self.token_ids,
            self.num_prompt_tokens,
            self.sampling.to_wire(),
            self.seed,
            self.sample_index,
            self.block_ids,
        ]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> NewSequence:
        seq_id, generation, token_ids, num_prompt_tokens, sampling, *rest = wire
        return cls(seq_id, generation, token_ids, num_prompt_tokens, SamplingParams.from_wire(sampling), *rest)


@dataclass(slots=True)
class ScheduledChunk:
    """`num_tokens` of one sequence, from position `start` on, computed in this step."""

    seq_id: int
    start: int
    num_tokens: int
    new_block_ids: list[int]
    """Appended to the sequence's block table before the step runs; block tables only grow at the end."""
    samples: bool
    """True when the chunk reaches the end of the known tokens, so that the next token is drawn from its last row."""

    def to_wire(self) -> list[Any]:
        return [self.seq_id, self.start, self.num_tokens, self.new_block_ids, self.samples]


@dataclass(slots=True)
class StepPlan:
    """Everything the ranks need for one step. Applied in this order: removed, new, block_copies, chunks."""

    step_id: int
    removed: list[int] = field(default_factory=list)
    """Sequences (finished, aborted, preempted) whose state the ranks drop."""
    new: list[NewSequence] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    """(source block, destination block) pairs of copy-on-write, in all layers. A fork copies the shared, partly filled
    tail block at once (its first step writes there), so the destination stands in the fork's `NewSequence.block_ids`
    and the block table of a sequence that the ranks know is never rewritten."""
    chunks: list[ScheduledChunk] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    def of_part(self, dp_rank: int) -> StepPlan:
        """What the ranks of one data-parallel part are sent."""
        assert dp_rank == 0, "the plan is of one part"
        return self

    def to_wire(self) -> list[Any]:
        return [
            self.step_id,
            self.removed,
            [sequence.to_wire() for sequence in self.new],
            [list(pair) for pair in self.block_copies],
            [chunk.to_wire() for chunk in self.chunks],
        ]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> StepPlan:
        step_id, removed, new, copies, chunks = wire
        return cls(
            step_id,
            removed,
            [NewSequence.from_wire(item) for item in new],
            [(source, target) for source, target in copies],
            [ScheduledChunk(*item) for item in chunks],
        )


@dataclass(slots=True)
class PartedPlan(StepPlan):
    """One step of several data-parallel parts, each with sequences and blocks of its own. Seen as a plan it has all
    their chunks; the ranks get their part's. A part without work has an empty plan, and its ranks still take part in
    the step: experts belong to all parts, so all ranks meet in every layer that has them."""

    parts: list[StepPlan] = field(default_factory=list)

    @classmethod
    def of(cls, step_id: int, parts: list[StepPlan]) -> PartedPlan:
        assert all(part.step_id == step_id for part in parts)
        plan = cls(step_id, parts=parts)
        for part in parts:
            plan.removed += part.removed
            plan.new += part.new
            plan.chunks += part.chunks
        return plan

    def of_part(self, dp_rank: int) -> StepPlan:
        return self.parts[dp_rank]


@dataclass(slots=True)
class TokenLogprobs:
    """Logprobs at one position, of the model's own distribution (before penalties, bias and temperature)."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top: list[tuple[int, float]]
    """The k most likely (token id, logprob), best first; empty when k is 0."""

    def to_wire(self) -> list[Any]:
        return [self.token_id, self.logprob, self.rank, [list(pair) for pair in self.top]]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> TokenLogprobs:
        token_id, logprob, rank, top = wire
        return cls(token_id, logprob, rank, [(t, p) for t, p in top])


@dataclass(slots=True)
class StepOutput:
    """What one step gave, as columns over the chunks that sampled (same order as in the plan)."""

    step_id: int
    seq_ids: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """None where the sequence asked for none."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """seq_id -> entries of prompt positions start+1 .. start+num_tokens of its chunk (clipped to the prompt)."""
    errors: dict[int, str] = field(default_factory=dict)
    """seq_id -> why this sequence failed inside the step (it is in no column then); the others went on."""
    deferred: list[int] = field(default_factory=list)
    """Sequences whose token was not ready: they are in no column and are planned again. Only for executors that run
    one step at a time (the scripted model, whose slow scripts must not delay the others)."""
    _columns: dict[int, int] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def columns(self) -> dict[int, int]:
        """seq_id -> its column; made when first asked for, by whoever commits a complete output."""
        if self._columns is None:
            self._columns = {seq_id: column for column, seq_id in enumerate(self.seq_ids)}
        return self._columns
