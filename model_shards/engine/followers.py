"""Waiting sequences that follow a running one: it computes a prefix of theirs, which they will find in the cache."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.model_shards.engine.policy import Policy
from shoal.model_shards.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class _Follower:
    sequence: Sequence
    shared: int
    """Tokens from the front that it has in common with its leader."""


class Followers:
    """Keeps followers out of the waiting queue until their leader has computed what they share, or computes no more.
    The leader runs, and a running prompt always progresses, so nobody follows for ever."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._by_leader: dict[int, dict[int, _Follower]] = {}
        self._leader_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._leader_of)

    def before(self, sequence: Sequence) -> int:
        """How many followers come before a sequence by the policy: those keep their seats against it."""
        if not self._leader_of:
            return 0
        key = self._policy.key(sequence)
        groups = self._by_leader.values()
        return sum(self._policy.key(follower.sequence) < key for group in groups for follower in group.values())

    def add(self, sequence: Sequence, leader_id: int, shared: int) -> None:
        self._by_leader.setdefault(leader_id, {})[sequence.seq_id] = _Follower(sequence, shared)
        self._leader_of[sequence.seq_id] = leader_id

    def release(self, leader_id: int, num_computed: int | None = None) -> list[Sequence]:
        """Takes out those whose shared tokens the leader has computed by now; None: all, for it leaves."""
        group = self._by_leader.get(leader_id, {})
        ready = [f.sequence for f in group.values() if num_computed is None or f.shared <= num_computed]
        for sequence in ready:
            self.discard(sequence)
        return ready

    def discard(self, sequence: Sequence) -> bool:
        """Takes one out; False when it follows nobody."""
        leader_id = self._leader_of.pop(sequence.seq_id, None)
        if leader_id is None:
            return False
        group = self._by_leader[leader_id]
        del group[sequence.seq_id]
        if not group:
            del self._by_leader[leader_id]
        return True
