"""Decides what runs in each step. Pure: no torch, no I/O, no clock; `schedule()` and `commit()` are all of it.

One rule: every running sequence advances from its computed tokens towards its known length, within the token budget of
the step. A decode is a sequence one token short; a chunked prefill, one that is many short; a prefix hit, a resumption
after preemption and a fork only differ in where they start.

Steps run on the ranks in the order in which they were planned, and `schedule()` may be called for step N+1 before
`commit()` of step N. Three things make that safe:

- A token that step N will draw is a placeholder in step N+1 (the ranks have its value by then), and the end of a
  sequence by length is foreseen, so no row beyond it is ever planned.
- A result for a sequence that has meanwhile finished or lost its blocks names an old generation and is dropped.
- Blocks may be freed while step N still uses them: whoever gets them writes to them in step N+1 at the earliest, which
  the ranks run after N. For the same reason a block is offered to others (hashed) only once its step is committed.

In a pipeline micro-batches take turns (`SchedulerSettings.micro_batches`): who drew a token is planned again when that
token comes out of the last stage, so stages work on other sequences meanwhile. Pieces of a prompt need no drawn token,
so they may be in consecutive steps, one in each stage.

Its parts: `roster.py` (who is where), `planning.py` (a plan), `pacing.py` (how long a step may take), and the results,
here.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

from shoal.kvcache.manager import BlockLedger, KVCacheManager
from shoal.kvcache.prefix import PrefixChain
from shoal.model_shards.engine.admission import output_limit
from shoal.model_shards.engine.pacing import StepPacer
from shoal.model_shards.engine.plan import ScheduledChunk, StepOutput, StepPlan
from shoal.model_shards.engine.planning import PlannedChunk, PlannedStep, Planner
from shoal.model_shards.engine.policy import Policy
from shoal.model_shards.engine.request import FinishReason, Request
from shoal.model_shards.engine.roster import Roster
from shoal.model_shards.engine.sequence import KnownPrefix, Sequence, SequenceStatus, SequenceUpdate
from shoal.model_shards.engine.settings import SchedulerCounters, SchedulerSettings

__all__ = ["Scheduler", "SchedulerCounters", "SchedulerSettings"]

_TOKENS_AHEAD = 64
"""Work that a sequence is assumed to have before it in its answer, as tokens of a prompt. The longer the prefix that a
part has in its cache, the more sequences it may have above the others before it is passed over."""


class Scheduler:
    """Owner of all sequences and, through the KV cache manager, of all blocks. Not thread-safe, except `limit_of`."""

    def __init__(
        self,
        settings: SchedulerSettings,
        kv: KVCacheManager,
        policy: Policy,
        pacer: StepPacer | None = None,
        *,
        seq_ids: Iterator[int] | None = None,
    ) -> None:
        """`pacer`: bounds steps in time; None: nothing does. `seq_ids`: where sequences get their ids, ascending; one
        for all where several schedulers belong to one engine."""
        self.settings = settings
        self.kv = kv
        self.counters = SchedulerCounters()
        self.expected_step_s: float | None = None
        """How long the step committed last was expected to take; None where nothing is expected."""
        self._pacer = pacer
        self._roster = Roster(kv, policy, self.counters, itertools.count() if seq_ids is None else seq_ids)
        self._planner = Planner(settings, kv, policy, pacer, self._roster, self.counters)
        self._in_flight: deque[PlannedStep] = deque()

    # What others ask ------------------------------------------------------------------------------------------------

    def limit_of(self, request: Request) -> int:
        """Most output tokens the request may get. Raises what `output_limit` raises. Reads settings only: any thread
        may call it."""
        return output_limit(request, self.settings.max_model_len, self.kv.num_total_blocks, self.kv.block_size)

    def has_work(self) -> bool:
        return bool(self._roster.live)

    @property
    def num_running(self) -> int:
        return len(self._roster.running)

    @property
    def num_waiting(self) -> int:
        # Another thread may ask between two changes.
        return max(0, len(self._roster.live) - len(self._roster.running))

    @property
    def num_following(self) -> int:
        """Those of the waiting ones whose prefix a running sequence is computing."""
        return len(self._roster.followers)

    def known_prefix(self, request: Request, chain: PrefixChain | None = None) -> KnownPrefix:
        """How much of its prompt a request would not compute here. `chain`: of the prompt, as another scheduler with
        the same kind of cache made it."""
        chain = chain or self.kv.prefix_chain(request.cache_salt)
        scored = request.sampling.prompt_logprobs is not None
        return KnownPrefix(chain, 0 if scored else self.kv.known_prefix(request.prompt_token_ids, chain))

    def __contains__(self, seq_id: int) -> bool:
        """Whether a live sequence has this id."""
        return seq_id in self._roster.live

    def request_of(self, seq_id: int) -> Request:
        """Of a live sequence."""
        return self._roster.live[seq_id].request

    @property
    def load(self) -> int:
        """Tokens of work ahead: of prompts, and what is assumed of each sequence's answer."""
        return self._roster.outstanding_tokens + _TOKENS_AHEAD * len(self._roster.live)

    @property
    def kv_ledger(self) -> BlockLedger:
        return self.kv.ledger

    @property
    def kv_evictions(self) -> int:
        return self.kv.num_evictions

    # Requests come and go -------------------------------------------------------------------------------------------

    def add(self, request: Request, prefix: KnownPrefix | None = None) -> list[Sequence]:
        """Queues a request; returns its n sequences, in order of their index. Raises what `limit_of` raises.
        `prefix`: what `known_prefix` said, where it was asked."""
        return self._roster.add(request, self.limit_of(request), prefix)

    @property
    def is_short(self) -> bool:
        """Whether a request waits for others to end."""
        return self._planner.is_short

    @property
    def has_room(self) -> bool:
        """Whether a seat is free, and nobody waits for it."""
        return self.num_waiting == 0 and self.num_running < self.settings.max_num_seqs

    def hand_over(self, other: Scheduler) -> None:
        """Moves the request that waits to start next to another scheduler of the same settings, unless it has begun."""
        if family := self._roster.give_up_next():
            other._roster.take_in(family)

    def abort(self, request_id: str) -> list[Sequence]:
        """Ends all that is left of a request and frees its blocks now. Returns the sequences it ended; none when the
        request is unknown or over, so it may be called at any time, any number of times."""
        return self._roster.abort(request_id)

    def abort_all(self) -> list[Sequence]:
        return self._roster.abort_all()

    def finish(self, seq_id: int) -> None:
        """The output side found that this sequence is over (a stop string). Results on their way will be dropped."""
        if seq_id in self._roster.live:
            self._roster.finish(self._roster.live[seq_id])

    # The step -------------------------------------------------------------------------------------------------------

    def schedule(self, step_id: int | None = None) -> StepPlan | None:
        """Plans the next step; None when nothing can run now. `step_id`: of the step that the plan is a part of, more
        than that of the one before; None: they are counted."""
        step = self._planner.plan(self.counters.steps if step_id is None else step_id)
        if step is None:
            return None
        self.counters.steps += 1
        self._in_flight.append(step)
        return step.plan

    def commit(self, output: StepOutput, step_s: float | None = None) -> list[SequenceUpdate]:
        """Takes the results of the oldest step in flight; returns what they changed, in the order of the plan.
        `step_s`: how many seconds it took, where that is known."""
        step = self._in_flight.popleft()
        assert step.plan.step_id == output.step_id, "steps must be committed in the order they were planned"
        if self._pacer is not None and step_s is not None:
            self.expected_step_s = self._pacer.observe(step.shape, step_s)
        columns = output.columns
        updates = []
        for planned in step.chunks:
            sequence = planned.sequence
            if sequence.status is not SequenceStatus.RUNNING or sequence.generation != planned.generation:
                self.counters.dropped_results += planned.chunk.samples
            elif (error := output.errors.get(sequence.seq_id)) is not None:
                self.kv.distrust(sequence.seq_id)
                self._roster.finish(sequence)
                updates.append(SequenceUpdate(sequence, finish_reason=FinishReason.ERROR, error=error))
            elif sequence.seq_id in output.deferred:
                self._retract(sequence, planned.chunk)
            elif update := self._commit_chunk(planned, output, columns.get(sequence.seq_id)):
                updates.append(update)
        return updates

    def _commit_chunk(self, planned: PlannedChunk, output: StepOutput, column: int | None) -> SequenceUpdate | None:
        sequence, chunk = planned.sequence, planned.chunk
        end = chunk.start + chunk.num_tokens
        if end // self.kv.block_size > chunk.start // self.kv.block_size:
            self.kv.commit(sequence.seq_id, sequence.token_ids, end)
            self._roster.lead(sequence, end)
            if chunk.num_tokens > 1:
                self._planner.prefix_filled()
        update = SequenceUpdate(sequence)
        if sequence.wants_prompt_logprobs:
            sequence.prompt_logprobs += output.prompt_logprobs.get(sequence.seq_id, [])
        if not chunk.samples:
            if sequence.limit > 0 or end < sequence.num_prompt_tokens:
                return None
            update.finish_reason = FinishReason.LENGTH
            self._roster.finish(sequence)
            return update
        assert column is not None, f"step {output.step_id} gave nothing for sequence {sequence.seq_id}"
        assert output.generations[column] == sequence.generation
        token_id = output.token_ids[column]
        sequence.token_ids.append(token_id)
        sequence.num_placeholders -= 1
        self.counters.output_tokens += 1
        update.token_ids.append(token_id)
        update.logprobs.append(output.logprobs[column])
        update.finish_reason, update.stop_token_id = self._ending(sequence, token_id)
        if update.finish_reason is not None:
            self._roster.finish(sequence)
        return update

    def _ending(self, sequence: Sequence, token_id: int) -> tuple[FinishReason | None, int | None]:
        """Whether the token just appended ends the sequence. The sampler masks every ending token until `min_tokens`
        others are drawn; an executor that computes nothing does not, hence the check here."""
        sampling = sequence.request.sampling
        if sequence.num_output_tokens > sampling.min_tokens:
            if token_id in self.settings.eos_token_ids and not sampling.ignore_eos:
                return FinishReason.STOP, None
            if token_id in sampling.stop_token_ids:
                return FinishReason.STOP, token_id
        return (FinishReason.LENGTH if sequence.num_output_tokens >= sequence.limit else None), None

    def _retract(self, sequence: Sequence, chunk: ScheduledChunk) -> None:
        """The executor was not ready to draw this token: the chunk is as if it had never been planned. Its blocks
        stay. Legal only for executors that take one step at a time."""
        assert not self._in_flight, "a deferred token while a later step is in flight"
        sequence.num_computed_tokens = chunk.start
        sequence.num_placeholders -= chunk.samples
