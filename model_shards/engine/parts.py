"""Data-parallel parts of one engine: each has sequences, KV blocks and a scheduler of its own, and all take every step.

Attention knows no other part, so parts share nothing but the layers' experts, in which all ranks meet. A step runs when
any part has work. To the engine the parts look like one scheduler: what it adds goes to one of them, a step is one plan
(`PartedPlan`), and a result is one for all.
"""

from __future__ import annotations

from collections import deque

from shoal.kvcache.manager import BlockLedger
from shoal.model_shards.engine.plan import PartedPlan, StepOutput, StepPlan
from shoal.model_shards.engine.request import Request
from shoal.model_shards.engine.scheduler import Scheduler
from shoal.model_shards.engine.sequence import Sequence, SequenceUpdate
from shoal.model_shards.engine.settings import SchedulerCounters, SchedulerSettings


class SchedulerParts:
    """Has what `Scheduler` has for the engine, and the same rules: not thread-safe, except `limit_of`."""

    def __init__(self, parts: list[Scheduler]) -> None:
        """`parts` by their rank in the mesh (`dp_rank`), alike in settings and size, with one source of ids."""
        self.parts = parts
        self._steps = 0
        self._in_flight: deque[list[Scheduler]] = deque()
        """For each step the parts that have work in it."""

    # What others ask ------------------------------------------------------------------------------------------------

    @property
    def settings(self) -> SchedulerSettings:
        """Of each part."""
        return self.parts[0].settings

    @property
    def counters(self) -> SchedulerCounters:
        """Of all parts together, but for the steps, which they take together."""
        total = SchedulerCounters(steps=self._steps)
        for part in self.parts:
            total.add(part.counters)
        return total

    @property
    def expected_step_s(self) -> float | None:
        """What the part that takes longest was expected to take."""
        return max((part.expected_step_s for part in self.parts if part.expected_step_s is not None), default=None)

    @property
    def num_running(self) -> int:
        return sum(part.num_running for part in self.parts)

    @property
    def num_waiting(self) -> int:
        return sum(part.num_waiting for part in self.parts)

    @property
    def num_following(self) -> int:
        return sum(part.num_following for part in self.parts)

    @property
    def kv_ledger(self) -> BlockLedger:
        """Of all pools together; a sequence gets blocks of one."""
        ledgers = [part.kv_ledger for part in self.parts]
        return BlockLedger(
            sum(ledger.blank for ledger in ledgers),
            sum(ledger.cached for ledger in ledgers),
            sum(ledger.referenced for ledger in ledgers),
            sum(ledger.total for ledger in ledgers),
        )

    @property
    def kv_evictions(self) -> int:
        return sum(part.kv_evictions for part in self.parts)

    def limit_of(self, request: Request) -> int:
        return self.parts[0].limit_of(request)

    def has_work(self) -> bool:
        return any(part.has_work() for part in self.parts)

    def request_of(self, seq_id: int) -> Request:
        return next(part for part in self.parts if seq_id in part).request_of(seq_id)

    # Requests come and go -------------------------------------------------------------------------------------------

    def add(self, request: Request) -> list[Sequence]:
        """Queues a request in the part that has the least work ahead, counting what the request would add: a prefix
        that a part has cached, or is computing, is none. All samples go to the same one, since they share a prompt."""
        first = self.parts[0].known_prefix(request)
        prefixes = [first] + [part.known_prefix(request, first.chain) for part in self.parts[1:]]
        least = min(range(len(self.parts)), key=lambda i: self.parts[i].load - prefixes[i].num_tokens)
        return self.parts[least].add(request, prefixes[least])

    def abort(self, request_id: str) -> list[Sequence]:
        return [sequence for part in self.parts for sequence in part.abort(request_id)]

    def abort_all(self) -> list[Sequence]:
        return [sequence for part in self.parts for sequence in part.abort_all()]

    def finish(self, seq_id: int) -> None:
        for part in self.parts:
            part.finish(seq_id)

    # The step -------------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plans the next step of all parts; None when no part can run anything now."""
        step_id = self._steps
        plans = [part.schedule(step_id) for part in self.parts]
        busy = [part for part, plan in zip(self.parts, plans, strict=True) if plan is not None]
        if not busy:
            return None
        self._steps += 1
        self._in_flight.append(busy)
        self._even_out()
        return PartedPlan.of(step_id, [StepPlan(step_id) if plan is None else plan for plan in plans])

    def _even_out(self) -> None:
        """What a request takes is only guessed when it comes. Where one waits for others to end while another part has
        room, it goes there; it has computed nothing yet that it could lose."""
        for part in self.parts:
            crowded = next((other for other in self.parts if other.is_short), None)
            if crowded is None:
                return
            if part.has_room:
                crowded.hand_over(part)

    def commit(self, output: StepOutput, step_s: float | None = None) -> list[SequenceUpdate]:
        """`output`: of all parts. A part's model of what steps cost learns from the time that the step took for all:
        the ranks wait for each other in it."""
        return [update for part in self._in_flight.popleft() for update in part.commit(output, step_s)]
