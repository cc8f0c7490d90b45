"""Who goes first. A policy is one sort key, used for the waiting queue (best first) and for victims (worst first)."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable

from shoal.configs.errors import ConfigError
from shoal.model_shards.engine.sequence import Sequence

Key = tuple[float, ...]

_Entry = tuple[Key, int, Sequence]

_LEFT_KEPT = 64
"""So many who have left do not make a sweep of the waiting queue worth while."""


class Policy(ABC):
    """Pure order over sequences. Keys are unique (they end in the sequence id) and never change while it lives."""

    @abstractmethod
    def key(self, sequence: Sequence) -> Key:
        """Smaller runs first and is preempted last."""

    def piece_key(self, sequence: Sequence) -> Key:
        """Smaller gets a piece of the step first, among prompts that share it: the shortest rest, so that a short
        prompt does not wait for the end of long ones. Changes as a sequence advances, never while it waits. It decides
        in most steps, `key` in the others, so that no long prompt is put off for ever."""
        return (sequence.num_remaining, *self.key(sequence))

    @abstractmethod
    def displaces(self, candidate: Sequence, victim: Sequence) -> bool:
        """May a waiting candidate take a running victim's place? Must be a strict order, or the two would take turns
        for ever."""


class FirstComeFirstServed(Policy):
    """By arrival; `Request.priority` is ignored."""

    def key(self, sequence: Sequence) -> Key:
        return (sequence.request.arrival_time, sequence.seq_id)

    def displaces(self, candidate: Sequence, victim: Sequence) -> bool:
        return False


class PriorityOrder(Policy):
    """By priority number, lower first, then arrival. A better one does not wait behind a full batch of worse ones."""

    def key(self, sequence: Sequence) -> Key:
        return (sequence.request.priority, sequence.request.arrival_time, sequence.seq_id)

    def piece_key(self, sequence: Sequence) -> Key:
        return (sequence.request.priority, *super().piece_key(sequence))

    def displaces(self, candidate: Sequence, victim: Sequence) -> bool:
        return candidate.request.priority < victim.request.priority


POLICIES: dict[str, Callable[[], Policy]] = {"fcfs": FirstComeFirstServed, "priority": PriorityOrder}


def make_policy(name: str) -> Policy:
    if name not in POLICIES:
        raise ConfigError(f"Unknown scheduling policy {name!r}; known: {', '.join(sorted(POLICIES))}.")
    return POLICIES[name]()


class WaitingQueue:
    """Sequences not running (new or preempted), in two orders: by the policy's key, and the shortest first. Removal is
    lazy: who has left is skipped on coming to the top. Some never come there (the worst, while better ones keep
    coming), so those who have left are swept out when they are the most."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._queued: dict[int, Sequence] = {}
        self._by_key: list[_Entry] = []
        self._by_length: list[_Entry] = []
        self._pushed = 0
        self.num_tokens = 0
        """That all queued sequences together have to compute, as far as is known."""

    def __len__(self) -> int:
        return len(self._queued)

    def push(self, sequence: Sequence) -> None:
        assert sequence.seq_id not in self._queued, f"sequence {sequence.seq_id} is queued twice"
        self._queued[sequence.seq_id] = sequence
        self.num_tokens += len(sequence.token_ids) - sequence.num_known_tokens
        self._pushed += 1  # tells an entry from an older one of the same sequence
        heapq.heappush(self._by_key, (self._policy.key(sequence), self._pushed, sequence))
        heapq.heappush(self._by_length, (self._policy.piece_key(sequence), self._pushed, sequence))

    def peek(self) -> Sequence | None:
        """The first by the policy's key."""
        return self._top(self._by_key)

    def shortest(self) -> Sequence | None:
        """The first by the policy's `piece_key`."""
        return self._top(self._by_length)

    def remove(self, sequence: Sequence) -> None:
        del self._queued[sequence.seq_id]
        self.num_tokens -= len(sequence.token_ids) - sequence.num_known_tokens
        if len(self._by_key) > 2 * len(self._queued) + _LEFT_KEPT:
            self._by_key, self._by_length = [], []
            queued, self._queued, self.num_tokens = self._queued, {}, 0
            for member in queued.values():
                self.push(member)

    def _top(self, heap: list[_Entry]) -> Sequence | None:
        while heap and heap[0][2].seq_id not in self._queued:
            heapq.heappop(heap)
        return heap[0][2] if heap else None
