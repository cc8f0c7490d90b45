"""One generated continuation of one request: its tokens, how far they are computed, and its closed set of states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from shoal.kvcache.prefix import PrefixChain
from shoal.model_shards.engine.plan import NewSequence, TokenLogprobs
from shoal.model_shards.engine.request import FinishReason, Request
from shoal.model_shards.sampling.params import SamplingParams


class SequenceStatus(Enum):
    HELD = auto()
    """A further sample of an n > 1 request, waiting to be forked off its parent's prompt. Owns no blocks."""
    WAITING = auto()
    """Not started. Owns no blocks."""
    RUNNING = auto()
    """Owns blocks; the ranks know it."""
    PREEMPTED = auto()
    """Gave its blocks back and waits to be recomputed from prompt and outputs."""
    FINISHED = auto()


_LEGAL: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.HELD: frozenset({SequenceStatus.RUNNING, SequenceStatus.WAITING, SequenceStatus.FINISHED}),
    SequenceStatus.WAITING: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.RUNNING: frozenset({SequenceStatus.PREEMPTED, SequenceStatus.FINISHED}),
    SequenceStatus.PREEMPTED: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.FINISHED: frozenset(),
}


class IllegalTransitionError(AssertionError):
    """A bug of ours: the state machine was asked for a step that it does not have."""


@dataclass(frozen=True, slots=True)
class KnownPrefix:
    """Of a prompt, when it came."""

    chain: PrefixChain
    num_tokens: int
    """From the front: cached, or computed by a running sequence at that moment."""


@dataclass(slots=True, eq=False)
class Sequence:
    """The scheduler's own record of a sequence; nobody else writes to it.

    Positions, from 0:

        | computed (in steps already planned) | to compute | placeholders |
        0 ............. num_computed_tokens ............ len(token_ids) ... known length

    A placeholder is a token that a step in flight will draw: it counts as known, so that the next step can be planned
    before it has a value; the ranks put the value in.
    """

    seq_id: int
    request: Request
    index: int
    limit: int
    """Most output tokens it may get: max_tokens or what is left of the context. 0: the prompt is scored only."""
    token_ids: list[int]
    status: SequenceStatus
    num_prompt_tokens: int
    generation: int = 0
    num_computed_tokens: int = 0
    num_placeholders: int = 0
    turn: int = 0
    """The first step in which it may draw its next token, while the one before is on its way."""
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache when it first ran. 0 for the further samples of a request: what they
    share is the prompt that the first one brought in."""
    num_known_tokens: int = 0
    """Prompt tokens that it probably need not compute, as far as was known when it came."""
    prefix_chain: PrefixChain | None = None
    """Hashes of its full blocks, from when it is first considered: kept over waits and preemptions."""
    on_ranks: bool = False
    has_run: bool = False
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    held: list[Sequence] = field(default_factory=list)
    """Siblings that wait to be forked from this one."""

    @classmethod
    def family(cls, request: Request, seq_ids: Iterator[int], limit: int) -> list[Sequence]:
        """The n sequences of a request: the first prefills the prompt, the others are held until they can share it.
        Resumed ones differ in their outputs, so each waits on its own (the prompt is shared through the prefix cache);
        those that were over are left out."""
        prompt, resumed = request.prompt_token_ids, request.resumed
        members: list[Sequence] = []
        for index in request.open_indices:
            tokens = [*prompt, *resumed[index].token_ids] if resumed else list(prompt)
            status = SequenceStatus.HELD if members and not resumed else SequenceStatus.WAITING
            members.append(cls(next(seq_ids), request, index, limit, tokens, status, len(prompt)))
        if not resumed:
            members[0].held = members[1:]
        return members

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining(self) -> int:
        """Tokens that can be computed now: 1 for a decode, more for a prefill, 0 when its last token is on its way."""
        known = len(self.token_ids) + self.num_placeholders
        if self.limit and known - self.num_prompt_tokens >= self.limit:
            return 0
        return known - self.num_computed_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Still collecting: such a sequence needs the logits of its whole prompt, so it may not skip cached blocks."""
        asked = self.index == 0 and self.request.sampling.prompt_logprobs is not None
        return asked and len(self.prompt_logprobs) < self.num_prompt_tokens

    def transition(self, to: SequenceStatus) -> None:
        """The only place where a status changes."""
        if to not in _LEGAL[self.status]:
            raise IllegalTransitionError(f"sequence {self.seq_id}: {self.status.name} -> {to.name}")
        self.status = to

    def restart(self, num_cached_tokens: int) -> None:
        """It runs (again) from a cached prefix of `num_cached_tokens`."""
        self.num_computed_tokens = num_cached_tokens
        if not self.has_run and self.index == 0:
            self.num_cached_tokens = min(num_cached_tokens, self.num_prompt_tokens)
        if self.wants_prompt_logprobs:
            self.prompt_logprobs = [None]
        self.has_run = True

    def forget_progress(self) -> None:
        """It lost its blocks. Results still on their way belong to the old generation and will be dropped; the tokens
        are drawn again and come out the same, since a draw depends on seed, sample index and position only."""
        self.generation += 1
        self.num_computed_tokens = 0
        self.num_placeholders = 0

    def introduction(self, block_ids: list[int]) -> NewSequence:
        """What the ranks are told once; afterwards they get diffs."""
        return NewSequence(
            seq_id=self.seq_id,
            generation=self.generation,
            token_ids=list(self.token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            sampling=self._sampling(),
            seed=self.request.seed,
            sample_index=self.index,
            block_ids=block_ids,
        )

    def _sampling(self) -> SamplingParams:
        sampling = self.request.sampling
        if sampling.prompt_logprobs is None or self.wants_prompt_logprobs:
            return sampling
        return replace(sampling, prompt_logprobs=None)


@dataclass(slots=True)
class SequenceUpdate:
    """What one committed step changed for one sequence. The last one carries `finish_reason`."""

    sequence: Sequence
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The id in `stop_token_ids` that ended it; None for end-of-sequence."""
    error: str | None = None
