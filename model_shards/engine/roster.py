"""Who is where: every sequence from its arrival to its end, and the only place where one starts to run or stops."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from shoal.kvcache.manager import KVCacheManager
from shoal.model_shards.engine.followers import Followers
from shoal.model_shards.engine.policy import Policy, WaitingQueue
from shoal.model_shards.engine.request import Request
from shoal.model_shards.engine.sequence import KnownPrefix, Sequence, SequenceStatus
from shoal.model_shards.engine.settings import SchedulerCounters

_NOT_BEGUN = (SequenceStatus.WAITING, SequenceStatus.HELD)


class Roster:
    """Owner of all live sequences. Whoever leaves the ranks gives its blocks back here."""

    def __init__(self, kv: KVCacheManager, policy: Policy, counters: SchedulerCounters, seq_ids: Iterator[int]) -> None:
        self.running: list[Sequence] = []
        """Best first by the policy's key, so the victim of a preemption is the last."""
        self.waiting = WaitingQueue(policy)
        self.followers = Followers(policy)
        """They wait too, but not in the queue."""
        self.live: dict[int, Sequence] = {}
        self._kv = kv
        self._policy = policy
        self._counters = counters
        self._by_request: dict[str, list[Sequence]] = {}
        self._removed: list[int] = []
        self._seq_ids = seq_ids

    def add(self, request: Request, limit: int, prefix: KnownPrefix | None) -> list[Sequence]:
        """Queues a request; returns its sequences (n, but those that were over), in order of their index."""
        family = Sequence.family(request, self._seq_ids, limit)
        if prefix is not None:
            family[0].prefix_chain, family[0].num_known_tokens = prefix.chain, prefix.num_tokens
        self.take_in(family)
        return family

    def take_in(self, family: list[Sequence]) -> None:
        """The sequences of a request that has not begun."""
        self._by_request[family[0].request.request_id] = family
        self.live.update((sequence.seq_id, sequence) for sequence in family)
        for sequence in family:
            if sequence.status is SequenceStatus.WAITING:
                self.waiting.push(sequence)

    def give_up_next(self) -> list[Sequence]:
        """Takes out the request that is to start next, for another roster to take in; none when it has begun."""
        first = self.waiting.peek()
        family = [] if first is None else self._by_request[first.request.request_id]
        if any(sequence.status not in _NOT_BEGUN for sequence in family):
            return []
        for sequence in family:
            del self.live[sequence.seq_id]
            if sequence.status is SequenceStatus.WAITING and not self.followers.discard(sequence):
                self.waiting.remove(sequence)
            sequence.num_known_tokens = 0
        if first is not None:
            del self._by_request[first.request.request_id]
        return family

    def run(self, sequence: Sequence, start: int) -> None:
        """A sequence becomes running at position `start`, with the blocks it already holds."""
        sequence.transition(SequenceStatus.RUNNING)
        sequence.restart(start)
        insort(self.running, sequence, key=self._policy.key)

    def follow(self, sequence: Sequence, leader_id: int, shared: int) -> None:
        """A waiting sequence waits for a running one to compute the `shared` tokens that both begin with."""
        self.waiting.remove(sequence)
        self.followers.add(sequence, leader_id, shared)
        self._counters.followers += 1

    def lead(self, leader: Sequence, num_computed: int | None) -> None:
        """A running sequence has computed so many tokens; None: it computes no more. Its followers queue again, in
        the place that the policy gives them."""
        for sequence in self.followers.release(leader.seq_id, num_computed):
            self.waiting.push(sequence)

    def preempt(self, victim: Sequence) -> None:
        """Takes a running sequence's blocks; it will be recomputed from its prompt and outputs."""
        self._leave_ranks(victim)
        victim.transition(SequenceStatus.PREEMPTED)
        victim.forget_progress()
        self.waiting.push(victim)
        self._counters.preemptions += 1

    def finish(self, sequence: Sequence) -> None:
        """The only way out, from any state."""
        was = sequence.status
        if was is SequenceStatus.RUNNING:
            self._leave_ranks(sequence)
        sequence.transition(SequenceStatus.FINISHED)
        if was in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED) and not self.followers.discard(sequence):
            self.waiting.remove(sequence)
        del self.live[sequence.seq_id]
        family = self._by_request[sequence.request.request_id]
        if all(member.status is SequenceStatus.FINISHED for member in family):
            del self._by_request[sequence.request.request_id]

    def abort(self, request_id: str) -> list[Sequence]:
        """Finishes all that is left of a request; returns the sequences it ended."""
        alive = [s for s in self._by_request.get(request_id, ()) if s.status is not SequenceStatus.FINISHED]
        for sequence in alive:
            sequence.held = []
        for sequence in alive:
            self.finish(sequence)
        return alive

    def abort_all(self) -> list[Sequence]:
        return [sequence for request_id in list(self._by_request) for sequence in self.abort(request_id)]

    @property
    def outstanding_tokens(self) -> int:
        """Tokens of prompts still to compute, waiting or begun; those of followers are not counted."""
        return self.waiting.num_tokens + sum(s.num_remaining for s in self.running if s.num_remaining > 1)

    def take_removed(self) -> list[int]:
        """Sequences that the ranks still know and must forget with the next plan; each is named once."""
        removed, self._removed = self._removed, []
        return removed

    def _leave_ranks(self, sequence: Sequence) -> None:
        """Frees a running sequence's blocks. Siblings that it still holds go their own way (their prompt may well hit
        the prefix cache)."""
        self.running.remove(sequence)
        self._kv.free(sequence.seq_id)
        self.lead(sequence, None)
        if sequence.on_ranks:
            self._removed.append(sequence.seq_id)
            sequence.on_ranks = False
        for sibling in sequence.held:
            sibling.transition(SequenceStatus.WAITING)
            self.waiting.push(sibling)
        sequence.held = []
