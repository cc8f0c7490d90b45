"""The planning half of the scheduler: which sequences run in the next step, and how many tokens of each."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from shoal.kvcache.manager import KVCacheManager
from shoal.model_shards.engine.budget import StepBudget
from shoal.model_shards.engine.pacing import SMALLEST_PIECE, StepPacer
from shoal.model_shards.engine.plan import ScheduledChunk, StepPlan
from shoal.model_shards.engine.policy import Policy
from shoal.model_shards.engine.roster import Roster
from shoal.model_shards.engine.sequence import Sequence, SequenceStatus
from shoal.model_shards.engine.settings import SchedulerCounters, SchedulerSettings
from shoal.model_shards.engine.step_cost import StepShape

_TURN = 4
"""Every so many steps prompts are served in the policy's order, in the others the shortest rest first: the first by the
policy has at least this part of what prompts get."""
_LEAST = 8
"""A micro-batch takes this part of its token budget of prompts, if there are so many: smaller pieces cost more in steps
than even steps gain."""


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
    shape: StepShape = field(default_factory=StepShape)
    chunks: list[PlannedChunk] = field(default_factory=list)


class Planner:
    """Makes the plans of one scheduler. Its passes, in order: displace, decode, fork, pieces of prompts."""

    def __init__(
        self,
        settings: SchedulerSettings,
        kv: KVCacheManager,
        policy: Policy,
        pacer: StepPacer | None,
        roster: Roster,
        counters: SchedulerCounters,
    ) -> None:
        self._settings = settings
        self._chunk_size = settings.prefill_chunk_size or settings.max_num_batched_tokens
        self._kv = kv
        self._policy = policy
        self._pacer = pacer
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
            chunk_size=self._chunk_size,
        )
        step = PlannedStep(StepPlan(step_id), budget)
        self._decode(step)
        self._fork(step)
        if self._pacer is not None:
            budget.allowance = self._pacer.allowance(step.shape)
        self._prompts(step)
        if not step.chunks:
            return None
        step.plan.removed = self._roster.take_removed()
        return step

    @property
    def is_short(self) -> bool:
        """Whether the first of the waiting queue waits for somebody to leave: for a seat, or for blocks."""
        first = self._roster.waiting.peek()
        if first is None:
            return False
        return len(self._roster.running) >= self._settings.max_num_seqs or self._is_stuck(first)

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
        """Sequences one token short whose turn it is, best first. Only here can a block be missing (a prefill got all
        of its blocks when it was admitted), and the victim is the worst of all running ones: it comes later in this
        order, is a prefill, or in another micro-batch, so it is never already in the plan. The best one is never a
        victim of others, and alone it fits (`output_limit`), so it always gets to its end: no livelock."""
        running = self._roster.running
        for sequence in self._whose_turn_it_is(step.plan.step_id):
            if sequence.status is not SequenceStatus.RUNNING:
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

    def _whose_turn_it_is(self, step_id: int) -> list[Sequence]:
        """Of the sequences one token short: an m-th, where m micro-batches take turns, and of them those whose turn
        came first, so that batches are even and stay so whoever comes and goes. In m steps each has one turn: where m
        does not divide them, the shares of the steps add up to all. In the policy's order."""
        short = [sequence for sequence in self._roster.running if sequence.num_remaining == 1]
        ready = [sequence for sequence in short if sequence.num_placeholders == 0 or sequence.turn <= step_id]
        count, batches = len(short), self._settings.micro_batches
        share = max(1, (step_id + 1) * count // batches - step_id * count // batches)
        if len(ready) > share:
            first = sorted(ready, key=lambda sequence: sequence.turn)[:share]
            ready = sorted(first, key=self._policy.key)
        return ready

    def _fork(self, step: PlannedStep) -> None:
        """Held samples share the prompt once it is computed in earlier steps. All but its last token: that one the
        child computes again, for the logits it draws from. The copy of a partly filled tail block runs before the
        chunks of this step, and after the parent's prefill, which is in an earlier one. A child takes neither seat
        nor room from a waiting sequence that comes before it."""
        budget, running = step.budget, self._roster.running
        first = self._roster.waiting.peek()
        for parent in list(running):
            shared = parent.num_prompt_tokens - 1
            while parent.held and parent.num_computed_tokens >= shared and budget.tokens > 0:
                child = parent.held[0]
                if first is not None and self._policy.key(first) < self._policy.key(child):
                    return
                if budget.seats - self._roster.followers.before(child) <= 0:
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

    def _prompts(self, step: PlannedStep) -> None:
        """Pieces of what is longer than a token: of sequences in the middle of their prompt, and of waiting ones. A
        waiting one that does not fit ends the admissions of the step, so that nobody takes what it waits for."""
        budget = step.budget
        in_turn = step.plan.step_id % _TURN == 0
        order = self._policy.key if in_turn else self._policy.piece_key
        in_progress = deque(sorted((s for s in self._roster.running if s.num_remaining > 1), key=order))
        budget.partial_prefills -= sum(not self._is_short(sequence) for sequence in in_progress)
        if self._settings.micro_batches > 1:
            budget.tokens = min(budget.tokens, self._share_of_prompts())
        candidate = self._candidate(step, in_turn)
        while budget.tokens > 0:
            if candidate is not None and not (in_progress and order(in_progress[0]) < order(candidate)):
                candidate = self._candidate(step, in_turn) if self._admit(candidate, step) else None
            elif in_progress:
                sequence = in_progress.popleft()
                if granted := budget.grant(sequence.num_remaining, sequence.num_computed_tokens):
                    budget.partial_prefills += granted == sequence.num_remaining and not self._is_short(sequence)
                    self._take_piece(sequence, granted, [], step)
            else:
                return

    def _share_of_prompts(self) -> int:
        """Tokens of prompts in one micro-batch, of all that there are to compute. Stages wait for the longest step in
        the pipeline, so no step takes much more than the next ones will; and pieces in consecutive steps, which need
        no drawn token of each other, are computed by all stages at once. The last piece, which the first token waits
        for through all stages, is a small one."""
        settings = self._settings
        share = -(-self._roster.outstanding_tokens // settings.micro_batches)
        share = max(share, settings.max_num_batched_tokens // _LEAST)
        return -(-share // SMALLEST_PIECE) * SMALLEST_PIECE

    def _candidate(self, step: PlannedStep, in_turn: bool) -> Sequence | None:
        """The waiting sequence that may start now: the first by the policy, or a short one that overtakes it. One whose
        next blocks a running sequence is computing follows that one instead, and keeps its seat against all who come
        after it."""
        waiting, followers = self._roster.waiting, self._roster.followers
        while (sequence := waiting.peek()) is not None:
            if self._is_stuck(sequence) and not self._new_prefixes:
                return None
            if not in_turn:
                sequence = self._overtaking(sequence, step) or sequence
            if step.budget.seats - followers.before(sequence) <= 0:
                return None
            leader = self._leader_of(sequence)
            if leader is None:
                return sequence
            self._roster.follow(sequence, *leader)
        return None

    def _overtaking(self, first: Sequence, step: PlannedStep) -> Sequence | None:
        """A short prompt that need not wait for the first of the queue, since it takes nothing that this one waits for:
        a seat and blocks are left for it, short prompts take no slot of a partial prefill, and its turn comes."""
        shortest = self._roster.waiting.shortest()
        seats = step.budget.seats - len(self._roster.followers)
        if shortest is None or shortest is first or not self._is_short(shortest) or seats < 2:
            return None
        room = self._room_for(first) + self._kv.blocks_for(len(shortest.token_ids))
        return shortest if self._kv.num_free_blocks >= room else None

    def _is_short(self, sequence: Sequence) -> bool:
        """It fits in one piece."""
        return len(sequence.token_ids) <= self._chunk_size

    def _leader_of(self, sequence: Sequence) -> tuple[int, int] | None:
        """The running sequence that computes a prefix of this one, and how many tokens they share. Nobody waits for a
        sequence whose place it may take."""
        if sequence.prefix_chain is None:
            sequence.prefix_chain = self._kv.prefix_chain(sequence.request.cache_salt)
        if sequence.wants_prompt_logprobs:
            return None
        found = self._kv.prefix_in_the_making(sequence.token_ids, sequence.prefix_chain)
        if found is None or self._policy.displaces(sequence, self._roster.live[found[0]]):
            return None
        return found

    def _admit(self, sequence: Sequence, step: PlannedStep) -> bool:
        """Starts the first of the waiting queue, if it fits. It is admitted only when its whole known length fits and
        every running sequence could still grow by a block: a prefill never stops half-way, and what was just preempted
        does not come back to be preempted again."""
        budget, seq_id, tokens = step.budget, sequence.seq_id, sequence.token_ids
        if budget.partial_prefills <= 0 and not self._is_short(sequence):
            return False
        free_before = self._kv.num_free_blocks
        cached = self._kv.start(seq_id, tokens, sequence.prefix_chain, use_cache=not sequence.wants_prompt_logprobs)
        introduced = self._kv.block_ids(seq_id)
        granted = budget.grant(len(tokens) - cached, cached)
        if granted == 0:
            self._kv.free(seq_id)
            return False
        blocks = self._kv.allocate(seq_id, len(tokens))
        if blocks is None or self._kv.num_free_blocks < len(self._roster.running):
            self._kv.free(seq_id)
            self._stuck, self._new_prefixes = (seq_id, free_before), False
            return False
        self._kv.announce(seq_id, tokens)
        self._roster.waiting.remove(sequence)
        self._run(sequence, cached, introduced, step)
        budget.partial_prefills -= granted < sequence.num_remaining and not self._is_short(sequence)
        self._take_piece(sequence, granted, blocks, step)
        return True

    def _run(self, sequence: Sequence, start: int, block_ids: list[int], step: PlannedStep) -> None:
        """A sequence becomes running at position `start`, and the ranks are told of it."""
        if not sequence.has_run and sequence.index == 0:
            self._counters.prompt_tokens += sequence.num_prompt_tokens
            self._counters.cached_prompt_tokens += start
        self._roster.run(sequence, start)
        sequence.on_ranks = True
        step.plan.new.append(sequence.introduction(block_ids))
        step.budget.seats -= 1

    def _take_piece(self, sequence: Sequence, count: int, blocks: list[int], step: PlannedStep) -> None:
        if step.budget.allowance is not None:
            step.budget.allowance.spend(count, sequence.num_computed_tokens)
        self._take(sequence, count, blocks, step)

    def _take(self, sequence: Sequence, count: int, blocks: list[int], step: PlannedStep) -> None:
        """Puts `count` tokens of a running sequence into the plan, and counts them as computed from here on."""
        samples = sequence.limit > 0 and count == sequence.num_remaining
        chunk = ScheduledChunk(sequence.seq_id, sequence.num_computed_tokens, count, blocks, samples)
        step.budget.tokens -= count
        step.plan.chunks.append(chunk)
        step.shape.add(chunk.start, count)
        step.chunks.append(PlannedChunk(sequence, sequence.generation, chunk))
        sequence.num_computed_tokens += count
        sequence.num_placeholders += samples
        sequence.turn = step.plan.step_id + self._settings.micro_batches

    def _is_stuck(self, sequence: Sequence) -> bool:
        if self._stuck is None or self._stuck[0] != sequence.seq_id:
            return False
        return self._kv.num_free_blocks <= self._stuck[1]

    def _room_for(self, sequence: Sequence) -> int:
        """Free blocks that admission of a waiting sequence may need (a cached prefix would make it less)."""
        return self._kv.blocks_for(len(sequence.token_ids)) + len(self._roster.running)
