"""A whole benchmark: warm up, then every workload as often as asked, with live progress."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.configs.errors import ConfigError
from shoal.deployments.bench.cpu import CpuMeter, CpuShares
from shoal.deployments.bench.drive import Prepared, Run, drive, prepare
from shoal.deployments.bench.memory import TreeMemory, tree_memory
from shoal.deployments.bench.prompts import PlannedRequest, PromptMaker, Ruler
from shoal.deployments.bench.records import RequestRecord
from shoal.deployments.bench.summary import Objective, Summary, summarize
from shoal.deployments.bench.target import Target
from shoal.deployments.bench.workloads import Workload

REPORT_VERSION = 2
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    workloads: Sequence[Workload]
    repetitions: int = 1
    seed: str = "shoal"
    objective: Objective | None = None
    warm_up: int = 2
    """Requests before each first pass of a workload; never measured, never the text of a measured one."""
    capacity: float | None = None
    """Requests a second that W3 reached, for workloads that ask for a share of it; measured when W3 is in the plan."""
    server_pid: int | None = None


@dataclass(frozen=True, slots=True)
class Measurement:
    """One pass of one workload."""

    workload: Workload
    repetition: int
    summary: Summary
    cpu: CpuShares
    in_process: bool = False
    """The engine ran in the load generator's own process, so the client's share of the CPU holds both."""
    memory: TreeMemory | None = None
    """Of the server's processes right after the pass, when they are known."""

    def to_json(self) -> dict[str, Any]:
        shape = {
            "input_tokens": self.workload.input_tokens,
            "output_tokens": self.workload.output_tokens,
            "concurrency": None if self.workload.open_loop else self.workload.concurrency,
            "rate": self.workload.rate,
            "shared_prefix_tokens": self.workload.shared_prefix_tokens,
        }
        return {
            "workload": self.workload.name,
            "repetition": self.repetition,
            "shape": shape,
            "cpu": self.cpu.to_json(),
            "memory": None if self.memory is None else self.memory.to_json(),
            **self.summary.to_json(),
        }


@dataclass(slots=True)
class Report:
    """All passes against one target."""

    target: dict[str, Any]
    exact_prompts: bool
    """Whether prompt lengths were measured in the model's own tokens (else: estimated from its usage)."""
    dropped_options: list[str]
    """Request fields that the server refused; without ignore_eos answers may stop early."""
    started: str
    measurements: list[Measurement] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "shoal_bench": REPORT_VERSION,
            "started": self.started,
            "machine": {"processors": os.cpu_count(), "system": platform.platform(), "cpu": platform.machine()},
            "target": self.target,
            "exact_prompts": self.exact_prompts,
            "dropped_options": self.dropped_options,
            "runs": [measurement.to_json() for measurement in self.measurements],
        }


class Watcher(Protocol):
    """Sees a benchmark as it goes (a progress bar, a test)."""

    def begin(self, title: str, total: int | None) -> None: ...

    def event(self, tokens: int) -> None: ...

    def record(self, record: RequestRecord) -> None: ...

    def end(self) -> None: ...


class Session:
    """Measures workloads against one target that has been entered."""

    def __init__(self, target: Target, ruler: Ruler, watcher: Watcher) -> None:
        self._target = target
        self._ruler = ruler
        self._watcher = watcher
        target.on_event = watcher.event

    async def run(self, plan: Plan, on_measurement: Callable[[Measurement], None]) -> Report:
        """All passes of the plan; each is handed to `on_measurement` as soon as it is there."""
        dropped = await self._first_request()
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        report = Report(self._target.describe(), self._ruler.exact, dropped, started)
        capacities = [plan.capacity] if plan.capacity else []
        for repetition in range(plan.repetitions):
            for workload in plan.workloads:
                if workload.capacity_share is not None and not capacities:
                    raise ConfigError(
                        f"{workload.name} needs a capacity: run W3 in the same command before it, or pass --capacity.",
                        param="capacity",
                    )
                ready = workload.at_capacity(sorted(capacities)[len(capacities) // 2]) if capacities else workload
                measurement = await self._measure(ready, repetition, plan)
                if workload.name == "W3" and plan.capacity is None:
                    capacities.append(measurement.summary.requests_per_s)
                report.measurements.append(measurement)
                on_measurement(measurement)
        return report

    async def _measure(self, workload: Workload, repetition: int, plan: Plan) -> Measurement:
        seed = f"{plan.seed}/{workload.name}/{repetition}"
        self._watcher.begin(f"{workload.name} prompts", None)
        prepared = await prepare(workload, PromptMaker(self._ruler, seed), seed)
        if repetition == 0 and plan.warm_up:
            await self._warm_up(workload, plan)
        title = workload.name if plan.repetitions == 1 else f"{workload.name} {repetition + 1}/{plan.repetitions}"
        self._watcher.begin(title, workload.total_requests)
        meter = CpuMeter(plan.server_pid)
        run = await self._drive(prepared)
        shares = meter.shares()
        self._watcher.end()
        summary = summarize(run.records, run.wall_s, plan.objective)
        memory = None if plan.server_pid is None else tree_memory(plan.server_pid)
        return Measurement(workload, repetition, summary, shares, self._target.in_process, memory)

    async def _drive(self, prepared: Prepared) -> Run:
        return await drive(self._target, prepared, self._watcher.record)

    async def _warm_up(self, workload: Workload, plan: Plan) -> None:
        """Lets the server reach its steady state (lazy compilation, page faults) at this workload's lengths."""
        shape = Workload(
            f"{workload.name} warm-up",
            "",
            plan.warm_up,
            workload.input_tokens,
            min(workload.output_tokens, WARM_UP_TOKENS),
            concurrency=min(2, plan.warm_up),
        )
        seed = f"{plan.seed}/warm-up/{workload.name}"
        self._watcher.begin(shape.name, plan.warm_up)
        await self._drive(await prepare(shape, PromptMaker(self._ruler, seed), seed))

    async def _first_request(self) -> list[str]:
        """Fails early, with the server's own words, before minutes are spent on a target that does not answer."""
        self._watcher.begin("first request", 1)
        request = PlannedRequest([{"role": "user", "content": "Say something about the sea."}], WARM_UP_TOKENS)
        return await self._target.settle_options(request)
