"""Decides what runs in each step. Pure: no torch, no I/O, no clock; `schedule()` and `commit(output)` are all of it.

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
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field

from shoal.kvcache.manager import KVCacheManager
from shoal.model_shards.engine.admission import output_limit
from shoal.model_shards.engine.budget import StepBudget
from shoal.model_shards.engine.plan import ScheduledChunk, StepOutput, StepPlan
from shoal.model_shards.engine.policy import Policy, WaitingQueue
from shoal.model_shards.engine.request import FinishReason, Request
from shoal.model_shards.engine.sequence import Sequence, SequenceStatus, SequenceUpdate


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
    """Sequences that may be in the middle of their prompt at once; more would hold blocks without progress."""

    def __post_init__(self) -> None:
        assert self.max_num_batched_tokens >= self.max_num_seqs > 0
        assert self.max_partial_prefills > 0
        assert self.prefill_chunk_size is None or self.prefill_chunk_size > 0


@dataclass(slots=True)
class SchedulerCounters:
    """Monotonic totals."""

    steps: int = 0
    prompt_tokens: int = 0
    """Of requests when they first ran, cached ones included; a prompt counts once, whatever n is."""
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    dropped_results: int = 0
    """Results of steps whose sequence had ended or been preempted meanwhile."""


@dataclass(slots=True)
class _Planned:
    """One chunk of a step in flight."""

    sequence: Sequence
    generation: int
    chunk: ScheduledChunk


@dataclass(slots=True)
class _InFlight:
    step_id: int
    planned: list[_Planned] = field(default_factory=list)


class Scheduler:
    """Owner of all sequences and, through the KV cache manager, of all blocks. Not thread-safe, except `limit_of`."""

    def __init__(self, settings: SchedulerSettings, kv: KVCacheManager, policy: Policy) -> None:
        self.settings = settings
        self.kv = kv
        self.counters = SchedulerCounters()
        self._policy = policy
        self._waiting = WaitingQueue(policy)
        self._running: list[Sequence] = []
        """Best first by the policy's key, so the victim of a preemption is the last."""
        self._live: dict[int, Sequence] = {}
        self._by_request: dict[str, list[Sequence]] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._removed: list[int] = []
        """Sequences that the ranks still know and must forget with the next plan."""
        self._stuck: tuple[int, int] | None = None
        """(waiting sequence, free blocks) of the last failed admission: no use in trying again with no more blocks."""
        self._new_prefixes = False
        """Prefills have filled blocks since then: now the one that failed may share them and so need fewer."""
        self._next_seq_id = 0

    # What others ask ------------------------------------------------------------------------------------------------

    def limit_of(self, request: Request) -> int:
        """Most output tokens the request may get. Raises what `output_limit` raises. Reads settings only: any thread
        may call it."""
        return output_limit(request, self.settings.max_model_len, self.kv.num_total_blocks, self.kv.block_size)

    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return max(0, len(self._live) - len(self._running))  # another thread may ask between two changes

    def request_of(self, seq_id: int) -> Request:
        """Of a live sequence."""
        return self._live[seq_id].request

    # Requests come and go -------------------------------------------------------------------------------------------

    def add(self, request: Request) -> list[Sequence]:
        """Queues a request; returns its n sequences, in order of their index. Raises what `limit_of` raises."""
        family = Sequence.family(request, self._next_seq_id, self.limit_of(request))
        self._next_seq_id += len(family)
        self._by_request[request.request_id] = family
        self._live.update((sequence.seq_id, sequence) for sequence in family)
        self._waiting.push(family[0])
        return family

    def abort(self, request_id: str) -> list[Sequence]:
        """Ends all that is left of a request and frees its blocks now. Returns the sequences it ended; none when the
        request is unknown or over, so it may be called at any time, any number of times."""
        alive = [s for s in self._by_request.get(request_id, ()) if s.status is not SequenceStatus.FINISHED]
        for sequence in alive:
            sequence.held = []
        for sequence in alive:
            self._finish(sequence)
        return alive

    def abort_all(self) -> list[Sequence]:
        return [sequence for request_id in list(self._by_request) for sequence in self.abort(request_id)]

    def finish(self, seq_id: int) -> None:
        """The output side found that this sequence is over (a stop string). Results on their way will be dropped."""
        if seq_id in self._live:
            self._finish(self._live[seq_id])

    # The step -------------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plans the next step; None when nothing can run now."""
        settings = self.settings
        self._displace()
        plan = StepPlan(self.counters.steps)
        step = _InFlight(plan.step_id)
        budget = StepBudget(
            tokens=settings.max_num_batched_tokens,
            seats=settings.max_num_seqs - len(self._running),
            partial_prefills=settings.max_partial_prefills,
            chunk_size=settings.prefill_chunk_size or settings.max_num_batched_tokens,
        )
        self._decode(plan, step, budget)
        self._fork(plan, step, budget)
        self._continue_prefills(plan, step, budget)
        self._admit(plan, step, budget)
        if not plan.chunks:
            return None
        plan.removed, self._removed = self._removed, []
        self.counters.steps += 1
        self._in_flight.append(step)
        return plan

    def commit(self, output: StepOutput) -> list[SequenceUpdate]:
        """Takes the results of the oldest step in flight; returns what they changed, in the order of the plan."""
        step = self._in_flight.popleft()
        assert step.step_id == output.step_id, "steps must be committed in the order they were planned"
        columns = {seq_id: column for column, seq_id in enumerate(output.seq_ids)}
        updates = []
        for planned in step.planned:
            sequence = planned.sequence
            if sequence.status is not SequenceStatus.RUNNING or sequence.generation != planned.generation:
                self.counters.dropped_results += planned.chunk.samples
            elif (error := output.errors.get(sequence.seq_id)) is not None:
                self.kv.distrust(sequence.seq_id)
                self._finish(sequence)
                updates.append(SequenceUpdate(sequence, finish_reason=FinishReason.ERROR, error=error))
            elif sequence.seq_id in output.deferred:
                self._retract(sequence, planned.chunk)
            elif update := self._commit_chunk(planned, output, columns.get(sequence.seq_id)):
                updates.append(update)
        return updates

    # Planning -------------------------------------------------------------------------------------------------------

    def _displace(self) -> None:
        """A waiting sequence that outranks a running one does not wait for it to end: it takes its place. The order is
        strict, so the two never take turns."""
        candidate = self._waiting.peek()
        if candidate is None:
            return
        short_of_room = self._is_stuck(candidate)
        while self._running and (short_of_room or len(self._running) >= self.settings.max_num_seqs):
            if not self._policy.displaces(candidate, self._running[-1]):
                return
            self._preempt(self._running[-1])
            short_of_room = short_of_room and self.kv.num_free_blocks < self._room_for(candidate)

    def _decode(self, plan: StepPlan, step: _InFlight, budget: StepBudget) -> None:
        """Sequences one token short, best first. Only here can a block be missing (a prefill got all of its blocks
        when it was admitted), and the victim is the worst of all running ones: it comes later in this order or is a
        prefill, so it is never already in the plan. The best one is never a victim of others, and alone it fits
        (`output_limit`), so it always gets to its end: no livelock."""
        for sequence in list(self._running):
            if sequence.status is not SequenceStatus.RUNNING or sequence.num_remaining != 1:
                continue
            blocks = self.kv.allocate(sequence.seq_id, sequence.num_computed_tokens + 1)
            while blocks is None:
                victim = self._running[-1]
                self._preempt(victim)
                budget.seats += 1
                if victim is sequence:
                    break
                blocks = self.kv.allocate(sequence.seq_id, sequence.num_computed_tokens + 1)
            if blocks is not None:
                self._take(sequence, 1, blocks, plan, step)
                budget.spend(1, 1)

    def _fork(self, plan: StepPlan, step: _InFlight, budget: StepBudget) -> None:
        """Held samples share the prompt once it is computed in earlier steps. All but its last token: that one the
        child computes again, for the logits it draws from. The copy of a partly filled tail block runs before the
        chunks of this step, and after the parent's prefill, which is in an earlier one. A child takes neither seat
        nor room from a waiting sequence that comes before it."""
        first = self._waiting.peek()
        for parent in list(self._running):
            shared = parent.num_prompt_tokens - 1
            while parent.held and parent.num_computed_tokens >= shared and budget.tokens > 0 and budget.seats > 0:
                child = parent.held[0]
                if first is not None and self._policy.key(first) < self._policy.key(child):
                    return
                if self.kv.num_free_blocks < len(self._running) + 2:
                    return
                copies = self.kv.fork(parent.seq_id, child.seq_id, shared)
                assert copies is not None, "a fork takes at most one block"
                introduced = self.kv.block_ids(child.seq_id)
                blocks = self.kv.allocate(child.seq_id, shared + 1)
                assert blocks is not None, "a fork and its first token take at most two blocks"
                parent.held.pop(0)
                plan.block_copies += copies
                self._run(child, shared, introduced, plan, budget)
                self._take(child, 1, blocks, plan, step)
                budget.spend(1, 1)

    def _continue_prefills(self, plan: StepPlan, step: _InFlight, budget: StepBudget) -> None:
        for sequence in self._running:
            wanted = sequence.num_remaining
            if wanted > 1 and (granted := budget.grant(wanted)):
                self._take(sequence, granted, [], plan, step)
                budget.spend(granted, wanted)

    def _admit(self, plan: StepPlan, step: _InFlight, budget: StepBudget) -> None:
        """Waiting sequences, best first; the first that does not fit ends the pass, so that none is overtaken for
        ever. One is admitted only when its whole known length fits and every running sequence could still grow by a
        block: a prefill never stops half-way, and what was just preempted does not come back to be preempted again."""
        while budget.tokens > 0 and budget.seats > 0 and (sequence := self._waiting.peek()) is not None:
            hopeless = self._is_stuck(sequence) and not self._new_prefixes
            if hopeless or budget.grant(len(sequence.token_ids)) == 0:
                return
            seq_id, free_before = sequence.seq_id, self.kv.num_free_blocks
            salt, use_cache = sequence.request.cache_salt, not sequence.wants_prompt_logprobs
            cached = self.kv.start(seq_id, sequence.token_ids, salt, use_cache=use_cache)
            introduced = self.kv.block_ids(seq_id)
            blocks = self.kv.allocate(seq_id, len(sequence.token_ids))
            if blocks is None or self.kv.num_free_blocks < len(self._running):
                self.kv.free(seq_id)
                self._stuck, self._new_prefixes = (seq_id, free_before), False
                return
            self._waiting.pop()
            self._run(sequence, cached, introduced, plan, budget)
            wanted = sequence.num_remaining
            granted = budget.grant(wanted)
            self._take(sequence, granted, blocks, plan, step)
            budget.spend(granted, wanted)

    def _run(self, sequence: Sequence, start: int, block_ids: list[int], plan: StepPlan, budget: StepBudget) -> None:
        """A sequence becomes running at position `start`, with the blocks it already holds."""
        if not sequence.has_run and sequence.index == 0:
            self.counters.prompt_tokens += sequence.num_prompt_tokens
            self.counters.cached_prompt_tokens += start
        sequence.transition(SequenceStatus.RUNNING)
        sequence.restart(start)
        sequence.on_ranks = True
        insort(self._running, sequence, key=self._policy.key)
        plan.new.append(sequence.introduction(block_ids))
        budget.seats -= 1

    def _take(self, sequence: Sequence, count: int, blocks: list[int], plan: StepPlan, step: _InFlight) -> None:
        """Puts `count` tokens of a running sequence into the plan, and counts them as computed from here on."""
        samples = sequence.limit > 0 and count == sequence.num_remaining
        chunk = ScheduledChunk(sequence.seq_id, sequence.num_computed_tokens, count, blocks, samples)
        plan.chunks.append(chunk)
        step.planned.append(_Planned(sequence, sequence.generation, chunk))
        sequence.num_computed_tokens += count
        sequence.num_placeholders += samples

    def _is_stuck(self, sequence: Sequence) -> bool:
        if self._stuck is None or self._stuck[0] != sequence.seq_id:
            return False
        return self.kv.num_free_blocks <= self._stuck[1]

    def _room_for(self, sequence: Sequence) -> int:
        """Free blocks that admission of a waiting sequence may need (a cached prefix would make it less)."""
        return self.kv.blocks_for(len(sequence.token_ids)) + len(self._running)

    # Results --------------------------------------------------------------------------------------------------------

    def _commit_chunk(self, planned: _Planned, output: StepOutput, column: int | None) -> SequenceUpdate | None:
        sequence, chunk = planned.sequence, planned.chunk
        end = chunk.start + chunk.num_tokens
        if end // self.kv.block_size > chunk.start // self.kv.block_size:
            self.kv.commit(sequence.seq_id, sequence.token_ids, end)
            self._new_prefixes |= chunk.num_tokens > 1
        update = SequenceUpdate(sequence)
        if sequence.wants_prompt_logprobs:
            sequence.prompt_logprobs += output.prompt_logprobs.get(sequence.seq_id, [])
        if not chunk.samples:
            if sequence.limit > 0 or end < sequence.num_prompt_tokens:
                return None
            update.finish_reason = FinishReason.LENGTH
            self._finish(sequence)
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
            self._finish(sequence)
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

    # Leaving --------------------------------------------------------------------------------------------------------

    def _preempt(self, victim: Sequence) -> None:
        """Takes a running sequence's blocks; it will be recomputed from its prompt and outputs."""
        self._leave_ranks(victim)
        victim.transition(SequenceStatus.PREEMPTED)
        victim.forget_progress()
        self._waiting.push(victim)
        self.counters.preemptions += 1

    def _finish(self, sequence: Sequence) -> None:
        """The only way out, from any state."""
        was = sequence.status
        if was is SequenceStatus.RUNNING:
            self._leave_ranks(sequence)
        sequence.transition(SequenceStatus.FINISHED)
        if was in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED):
            self._waiting.forget(sequence)
        del self._live[sequence.seq_id]
        family = self._by_request[sequence.request.request_id]
        if all(member.status is SequenceStatus.FINISHED for member in family):
            del self._by_request[sequence.request.request_id]

    def _leave_ranks(self, sequence: Sequence) -> None:
        """Frees a running sequence's blocks. Siblings that it still holds go their own way (their prompt may well hit
        the prefix cache)."""
        self._running.remove(sequence)
        self.kv.free(sequence.seq_id)
        if sequence.on_ranks:
            self._removed.append(sequence.seq_id)
            sequence.on_ranks = False
        for sibling in sequence.held:
            sibling.transition(SequenceStatus.WAITING)
            self._waiting.push(sibling)
        sequence.held = []
