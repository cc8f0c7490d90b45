"""Who goes first. A policy is one sort key, used for the waiting queue (best first) and for victims (worst first)."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable

from shoal.configs.errors import ConfigError
from shoal.model_shards.engine.sequence import Sequence, SequenceStatus

Key = tuple[float, ...]

_FINISHED_KEPT = 64
"""So many finished sequences do not make a sweep of the waiting queue worth while."""


class Policy(ABC):
    """Pure order over sequences. Keys are unique (they end in the sequence id) and never change while it lives."""

    @abstractmethod
    def key(self, sequence: Sequence) -> Key:
        """Smaller runs first and is preempted last."""

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

    def displaces(self, candidate: Sequence, victim: Sequence) -> bool:
        return candidate.request.priority < victim.request.priority


POLICIES: dict[str, Callable[[], Policy]] = {"fcfs": FirstComeFirstServed, "priority": PriorityOrder}


def make_policy(name: str) -> Policy:
    if name not in POLICIES:
        raise ConfigError(f"Unknown scheduling policy {name!r}; known: {', '.join(sorted(POLICIES))}.")
    return POLICIES[name]()


class WaitingQueue:
    """Sequences not running (new or preempted), best first. Removal is lazy: a finished one is skipped when it comes
    to the top, so an abort costs next to nothing. Some never come there (the worst, while better ones keep coming), so
    the finished ones are swept out when they are the most."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[Key, Sequence]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (self._policy.key(sequence), sequence))
        self._count += 1

    def peek(self) -> Sequence | None:
        while self._heap and self._heap[0][1].status is SequenceStatus.FINISHED:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        sequence = self.peek()
        assert sequence is not None, "pop from an empty queue"
        heapq.heappop(self._heap)
        self._count -= 1
        return sequence

    def forget(self, sequence: Sequence) -> None:
        """The sequence, still queued, was just finished."""
        assert sequence.status is SequenceStatus.FINISHED
        self._count -= 1
        if len(self._heap) > 2 * self._count + _FINISHED_KEPT:
            self._heap = [entry for entry in self._heap if entry[1].status is not SequenceStatus.FINISHED]
            heapq.heapify(self._heap)
