"""The real scheduler on a simulated machine: steps take what a cost model says, on a clock of their own.

The loop is the engine's (one step is planned while others run), so what is measured here is what the scheduler does to
latencies; nobody draws tokens. `python tests/benchmarks/scheduling.py` prints tables of it.

A machine may be a pipeline: each stage takes its part of a step's time, one step after the other, and the first stage
starts a step when the tokens that it needs have left the last.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.kvcache.manager import KVCacheManager
from shoal.model_shards.engine.pacing import StepPacer
from shoal.model_shards.engine.plan import StepOutput, StepPlan
from shoal.model_shards.engine.policy import Policy, make_policy
from shoal.model_shards.engine.request import Request
from shoal.model_shards.engine.scheduler import Scheduler, SchedulerSettings
from shoal.model_shards.engine.step_cost import StepShape
from shoal.model_shards.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Machine:
    """Seconds that a step takes for itself, and for what is in it."""

    base_s: float = 0.012
    decode_s: float = 0.0014
    decode_position_s: float = 1.9e-6
    token_s: float = 0.0014
    pair_s: float = 0.9e-6
    noise: float = 0.0
    """Mean of the share (exponentially distributed) by which steps take longer."""
    stalls: float = 0.0
    """Share of steps that take three times as long."""

    def slower(self, factor: float) -> Machine:
        return replace(
            self,
            base_s=factor * self.base_s,
            decode_s=factor * self.decode_s,
            decode_position_s=factor * self.decode_position_s,
            token_s=factor * self.token_s,
            pair_s=factor * self.pair_s,
        )

    def seconds(self, plan: StepPlan, rng: random.Random) -> float:
        shape = StepShape()
        for chunk in plan.chunks:
            shape.add(chunk.start, chunk.num_tokens)
        exact = (
            self.base_s
            + self.decode_s * shape.decodes
            + self.decode_position_s * shape.decode_context
            + self.token_s * shape.prompt_tokens
            + self.pair_s * shape.prompt_context
        )
        noise = rng.expovariate(1 / self.noise) if self.noise else 0.0
        return exact * (1 + noise) * (3 if rng.random() < self.stalls else 1)


BF16 = Machine()
"""SmolLM2-135M on two cores: what docs/benchmarks.md measured."""
FOUR_BIT = Machine(base_s=0.005, decode_s=0.00055, token_s=0.00055)


@dataclass(slots=True)
class Client:
    """One request: when it came, and when each of its tokens did."""

    request: Request
    label: str = ""
    times: list[float] = field(default_factory=list)
    cached_tokens: int = 0

    @property
    def ttft(self) -> float:
        return self.times[0] - self.request.arrival_time

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]

    @property
    def tpot(self) -> float:
        return (self.times[-1] - self.times[0]) / max(1, len(self.times) - 1)


class Simulation:
    """`submit` at any time; `run` until all is done. `on_end` may submit more (closed loops)."""

    def __init__(
        self,
        machine: Machine = BF16,
        *,
        target_s: float | None = None,
        policy: str | Policy = "fcfs",
        num_blocks: int = 10_000,
        seed: int = 0,
        stages: int = 1,
        host_s: float = 0.0,
        **settings: Any,
    ) -> None:
        """`host_s`: from the end of a step until the next plan is with the first stage."""
        options = {"max_num_seqs": 64, "max_num_batched_tokens": 128, "max_model_len": 8192, **settings}
        self.scheduler = Scheduler(
            SchedulerSettings(eos_token_ids=frozenset(), **options),
            KVCacheManager(num_blocks + 1, 16),
            make_policy(policy) if isinstance(policy, str) else policy,
            StepPacer(target_s) if target_s else None,
        )
        self.machine = machine
        self.now = 0.0
        self.host_s = host_s
        self.step_times: list[float] = []
        """Of each step, over all stages."""
        self.busy_s = [0.0] * stages
        """Of each stage."""
        self.plans: list[StepPlan] = []
        self.clients: dict[str, Client] = {}
        self.on_end: Callable[[Client], None] = lambda client: None
        self._rng = random.Random(seed)
        self._arrivals: list[tuple[float, int, Client]] = []
        self._steps_in_flight = self.scheduler.settings.micro_batches + 1
        self._in_flight: deque[tuple[StepPlan, float, float]] = deque()
        """With the moments when each was submitted and when it ends."""
        self._free_at = [0.0] * stages
        """When each stage has done what it was given."""
        self._drawn_at: dict[int, float] = {}
        """When the last token of each sequence leaves the last stage."""
        self._last_commit = 0.0

    def submit(self, prompt: list[int], max_tokens: int, *, at: float | None = None, label: str = "") -> Client:
        arrival = self.now if at is None else at
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(f"r{len(self.clients)}", prompt, sampling, 0, 0, arrival)
        client = self.clients[request.request_id] = Client(request, label)
        heapq.heappush(self._arrivals, (arrival, len(self.clients), client))
        return client

    def run(self, until: float = float("inf")) -> None:
        while self.now < until and (self._arrivals or self.scheduler.has_work()):
            if not self._in_flight and not self.scheduler.has_work():
                self.now = max(self.now, self._arrivals[0][0])
            while self._arrivals and self._arrivals[0][0] <= self.now:
                client = heapq.heappop(self._arrivals)[2]
                self.scheduler.add(client.request)
            plan = self.scheduler.schedule()
            if plan is not None:
                self._start(plan)
            if len(self._in_flight) == self._steps_in_flight or (plan is None and self._waited_for_a_step()):
                self._commit()

    def _start(self, plan: StepPlan) -> None:
        moment = self.now + self.host_s
        for chunk in plan.chunks:
            if chunk.num_tokens == 1:
                moment = max(moment, self._drawn_at.get(chunk.seq_id, 0.0))
        took = 0.0
        for stage, free_at in enumerate(self._free_at):
            share = self.machine.seconds(plan, self._rng) / len(self._free_at)
            moment = self._free_at[stage] = max(moment, free_at) + share
            self.busy_s[stage] += share
            took += share
        self._drawn_at.update((chunk.seq_id, moment) for chunk in plan.chunks if chunk.samples)
        self._in_flight.append((plan, self.now, moment))
        self.step_times.append(took)
        self.plans.append(plan)

    def _waited_for_a_step(self) -> bool:
        """False when a request comes before the oldest step ends: it may run beside it."""
        assert self._in_flight, "sequences wait and nothing can run"
        if self._arrivals and self._arrivals[0][0] < self._in_flight[0][2]:
            self.now = max(self.now, self._arrivals[0][0])
            return False
        return True

    def _commit(self) -> None:
        plan, submitted, ended = self._in_flight.popleft()
        self.now = max(self.now, ended)
        took = self.now - max(submitted, self._last_commit)
        self._last_commit = self.now
        sampled = [chunk for chunk in plan.chunks if chunk.samples]
        output = StepOutput(
            plan.step_id,
            [chunk.seq_id for chunk in sampled],
            [0 for _ in sampled],
            [7 for _ in sampled],
            [None for _ in sampled],
        )
        for update in self.scheduler.commit(output, took):
            client = self.clients[update.sequence.request.request_id]
            client.times += [self.now] * len(update.token_ids)
            client.cached_tokens = update.sequence.num_cached_tokens
            if update.finish_reason is not None:
                self.on_end(client)

    @property
    def done(self) -> list[Client]:
        return [client for client in self.clients.values() if len(client.times) == client.request.sampling.max_tokens]

    @property
    def utilisation(self) -> float:
        """Share of the time that stages were busy."""
        return sum(self.busy_s) / len(self.busy_s) / self.now

    def tokens_per_s(self) -> float:
        return sum(len(client.times) for client in self.clients.values()) / self.now


def prompts(seed: int = 0) -> Iterator[Callable[[int], list[int]]]:
    """Endless makers of random prompts: maker(length) -> tokens."""
    rng = random.Random(seed)
    while True:
        yield lambda length: [rng.randrange(1000) for _ in range(length)]


def closed_loop(simulation: Simulation, streams: int, requests: int, length: int, max_tokens: int, label: str) -> None:
    """`streams` clients that send `requests` in all, each its next one when the last has ended."""
    make, left = next(prompts(len(label))), requests - streams
    before = simulation.on_end

    def next_one(client: Client) -> None:
        nonlocal left
        before(client)
        if client.label == label and left > 0:
            left -= 1
            simulation.submit(make(length), max_tokens, label=label)

    simulation.on_end = next_one
    for _ in range(streams):
        simulation.submit(make(length), max_tokens, label=label)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
