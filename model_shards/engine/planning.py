"""The planning half of the scheduler: which sequences run in the next step, and how many tokens of each."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.kvcache.manager import KVCacheManager
from shoal.model_shards.engine.budget import StepBudget
from shoal.model_shards.engine.plan import ScheduledChunk, StepPlan
from shoal.model_shards.engine.policy import Policy
from shoal.model_shards.engine.roster import Roster
from shoal.model_shards.engine.sequence import Sequence, SequenceStatus
from shoal.model_shards.engine.settings import SchedulerCounters, SchedulerSettings


@dataclass(slots=True)
class PlannedChunk:
    """One chunk of a step in flight."""

    sequence: Sequence
    generation: int
    chunk: ScheduledChunk


@dataclass(slots=True)
class PlannedStep:
    """A step from its planning to its commit."""

    plan: StepPlan
    budget: StepBudget
    chunks: list[PlannedChunk] = field(default_factory=list)


class Planner:
    """Makes the plans of one scheduler. Its passes, in order: displace, decode, fork, continue prompts, admit."""

    def __init__(
        self,
        settings: SchedulerSettings,
        kv: KVCacheManager,
        policy: Policy,
        roster: Roster,
        counters: SchedulerCounters,
    ) -> None:
        self._settings = settings
        self._kv = kv
        self._policy = policy
        self._roster = roster
        self._counters = counters
        self._stuck: tuple[int, int] | None = None
        """(waiting sequence, free blocks) of the last failed admission: no use in trying again with no more blocks."""
        self._new_prefixes = False
        """Prefills have filled blocks since then: now the one that failed may share them and so need fewer."""

    def plan(self, step_id: int) -> PlannedStep | None:
        """The next step; None when nothing can run now."""
        settings = self._settings
        self._displace()
        budget = StepBudget(
            tokens=settings.max_num_batched_tokens,
            seats=settings.max_num_seqs - len(self._roster.running),
            partial_prefills=settings.max_partial_prefills,
            chunk_size=settings.prefill_chunk_size or settings.max_num_batched_tokens,
        )
        step = PlannedStep(StepPlan(step_id), budget)
        self._decode(step)
        self._fork(step)
        self._continue_prefills(step)
        self._admit(step)
        if not step.chunks:
            return None
        step.plan.removed = self._roster.take_removed()
        return step

    def prefix_filled(self) -> None:
        """A prefill's blocks can be matched from now on."""
        self._new_prefixes = True

    def _displace(self) -> None:
        """A waiting sequence that outranks a running one does not wait for it to end: it takes its place. The order is
        strict, so the two never take turns."""
        running = self._roster.running
        candidate = self._roster.waiting.peek()
        if candidate is None:
            return
        short_of_room = self._is_stuck(candidate)
        while running and (short_of_room or len(running) >= self._settings.max_num_seqs):
            if not self._policy.displaces(candidate, running[-1]):
                return
            self._roster.preempt(running[-1])
            short_of_room = short_of_room and self._kv.num_free_blocks < self._room_for(candidate)

    def _decode(self, step: PlannedStep) -> None:
        """Sequences one token short, best first. Only here can a block be missing (a prefill got all of its blocks
        when it was admitted), and the victim is the worst of all running ones: it comes later in this order or is a
        prefill, so it is never already in the plan. The best one is never a victim of others, and alone it fits
        (`output_limit`), so it always gets to its end: no livelock."""
        running = self._roster.running
        for sequence in list(running):
            if sequence.status is not SequenceStatus.RUNNING or sequence.num_remaining != 1:
                continue
            blocks = self._kv.allocate(sequence.seq_id, sequence.num_computed_tokens + 1)
            while blocks is None:
                victim = running[-1]
                self._roster.preempt(victim)
                step.budget.seats += 1
                if victim is sequence:
                    break
                blocks = self._kv.allocate(sequence.seq_id, sequence.num_computed_tokens + 1)
            if blocks is not None:
                self._take(sequence, 1, blocks, step)
                step.budget.spend(1, 1)

    def _fork(self, step: PlannedStep) -> None:
        """Held samples share the prompt once it is computed in earlier steps. All but its last token: that one the
        child computes again, for the logits it draws from. The copy of a partly filled tail block runs before the
        chunks of this step, and after the parent's prefill, which is in an earlier one. A child takes neither seat
        nor room from a waiting sequence that comes before it."""
        budget, running = step.budget, self._roster.running
        first = self._roster.waiting.peek()
        for parent in list(running):
            shared = parent.num_prompt_tokens - 1
            while parent.held and parent.num_computed_tokens >= shared and budget.tokens > 0 and budget.seats > 0:
                child = parent.held[0]
                if first is not None and self._policy.key(first) < self._policy.key(child):
                    return
                if self._kv.num_free_blocks < len(running) + 2:
                    return
                copies = self._kv.fork(parent.seq_id, child.seq_id, shared)
                assert copies is not None, "a fork takes at most one block"
                introduced = self._kv.block_ids(child.seq_id)
                blocks = self._kv.allocate(child.seq_id, shared + 1)
                assert blocks is not None, "a fork and its first token take at most two blocks"
                parent.held.pop(0)
                step.plan.block_copies += copies
                self._run(child, shared, introduced, step)
                self._take(child, 1, blocks, step)
                budget.spend(1, 1)

    def _continue_prefills(self, step: PlannedStep) -> None:
        for sequence in self._roster.running:
            wanted = sequence.num_remaining
            if wanted > 1 and (granted := step.budget.grant(wanted)):
                self._take(sequence, granted, [], step)
                step.budget.spend(granted, wanted)

    def _admit(self, step: PlannedStep) -> None:
        """Waiting sequences, best first; the first that does not fit ends the pass, so that none is overtaken for
        ever. One is admitted only when its whole known length fits and every running sequence could still grow by a
        block: a prefill never stops half-way, and what was just preempted does not come back to be preempted again."""
        budget, waiting = step.budget, self._roster.waiting
        while budget.tokens > 0 and budget.seats > 0 and (sequence := waiting.peek()) is not None:
            hopeless = self._is_stuck(sequence) and not self._new_prefixes
            if hopeless or budget.grant(len(sequence.token_ids)) == 0:
                return
            seq_id, free_before = sequence.seq_id, self._kv.num_free_blocks
            salt, use_cache = sequence.request.cache_salt, not sequence.wants_prompt_logprobs
            cached = self._kv.start(seq_id, sequence.token_ids, salt, use_cache=use_cache)
            introduced = self._kv.block_ids(seq_id)
            blocks = self._kv.allocate(seq_id, len(sequence.token_ids))
            if blocks is None or self._kv.num_free_blocks < len(self._roster.running):
                self._kv.free(seq_id)
                self._stuck, self._new_prefixes = (seq_id, free_before), False
                return
            waiting.pop()
            self._run(sequence, cached, introduced, step)
            wanted = sequence.num_remaining
            granted = budget.grant(wanted)
            self._take(sequence, granted, blocks, step)
            budget.spend(granted, wanted)

    def _run(self, sequence: Sequence, start: int, block_ids: list[int], step: PlannedStep) -> None:
        """A sequence becomes running at position `start`, and the ranks are told of it."""
        if not sequence.has_run and sequence.index == 0:
            self._counters.prompt_tokens += sequence.num_prompt_tokens
            self._counters.cached_prompt_tokens += start
        self._roster.run(sequence, start)
        sequence.on_ranks = True
        step.plan.new.append(sequence.introduction(block_ids))
        step.budget.seats -= 1

    def _take(self, sequence: Sequence, count: int, blocks: list[int], step: PlannedStep) -> None:
        """Puts `count` tokens of a running sequence into the plan, and counts them as computed from here on."""
        samples = sequence.limit > 0 and count == sequence.num_remaining
        chunk = ScheduledChunk(sequence.seq_id, sequence.num_computed_tokens, count, blocks, samples)
        step.plan.chunks.append(chunk)
        step.chunks.append(PlannedChunk(sequence, sequence.generation, chunk))
        sequence.num_computed_tokens += count
        sequence.num_placeholders += samples

    def _is_stuck(self, sequence: Sequence) -> bool:
        if self._stuck is None or self._stuck[0] != sequence.seq_id:
            return False
        return self._kv.num_free_blocks <= self._stuck[1]

    def _room_for(self, sequence: Sequence) -> int:
        """Free blocks that admission of a waiting sequence may need (a cached prefix would make it less)."""
        return self._kv.blocks_for(len(sequence.token_ids)) + len(self._roster.running)
