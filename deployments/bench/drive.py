"""Sends the requests of a workload at their times: closed loop, open loop, or short streams beside long ones."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shoal.deployments.bench.prompts import PlannedRequest, PromptMaker
from shoal.deployments.bench.records import RequestRecord
from shoal.deployments.bench.target import Target
from shoal.deployments.bench.workloads import Workload

LEAD_IN_S = 1.0
"""How long the short streams of a mixed workload run before the long prompts arrive."""

OnRecord = Callable[[RequestRecord], None]


@dataclass(frozen=True, slots=True)
class Run:
    """What one pass of a workload gave. `wall_s` is from the first request due to the last byte received."""

    records: list[RequestRecord]
    wall_s: float


@dataclass(frozen=True, slots=True)
class Prepared:
    """The prompts of a workload, made and measured before the clock starts."""

    workload: Workload
    requests: list[PlannedRequest]
    endless: Iterator[PlannedRequest] | None
    """Short prompts of a mixed workload, whose `requests` are the long ones."""
    arrivals: list[float]
    """Open loop: seconds after the start at which each request is due."""


async def prepare(workload: Workload, maker: PromptMaker, seed: str) -> Prepared:
    """Makes everything that depends on chance, from `seed` alone."""
    if workload.long is not None:
        return Prepared(
            workload, await maker.long_requests(workload), await maker.short_requests(workload), arrivals=[]
        )
    requests = await maker.requests(workload)
    arrivals = []
    if workload.rate is not None:
        chance, at = random.Random(f"{seed}/arrivals"), 0.0
        for _ in requests:
            arrivals.append(at)
            at += chance.expovariate(workload.rate)
    return Prepared(workload, requests, None, arrivals)


async def drive(target: Target, prepared: Prepared, on_record: OnRecord) -> Run:
    """One measured pass. Whatever happens to single requests is in their records."""
    start = target.clock()
    records: list[RequestRecord] = []

    def keep(record: RequestRecord) -> None:
        records.append(record)
        on_record(record)

    async with asyncio.TaskGroup() as group:
        if prepared.endless is not None:
            group.create_task(_mixed(target, prepared, keep))
        elif prepared.arrivals:
            group.create_task(_open_loop(target, prepared, start, keep))
        else:
            group.create_task(_closed_loop(target, iter(prepared.requests), prepared.workload.concurrency, keep))
    return Run(records, max(record.end for record in records) - min(record.due for record in records))


async def _closed_loop(target: Target, requests: Iterator[PlannedRequest], streams: int, keep: OnRecord) -> None:
    async def stream() -> None:
        for request in requests:
            keep(await target.send(request))

    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(stream())


async def _open_loop(target: Target, prepared: Prepared, start: float, keep: OnRecord) -> None:
    async def one(request: PlannedRequest, due: float) -> None:
        keep(await target.send(request, due))

    async with asyncio.TaskGroup() as group:
        for request, offset in zip(prepared.requests, prepared.arrivals, strict=True):
            due = start + offset
            await asyncio.sleep(max(0.0, due - target.clock()))
            group.create_task(one(request, due))


async def _mixed(target: Target, prepared: Prepared, keep: OnRecord) -> None:
    """Short streams, closed loop, for exactly as long as there are long requests."""
    assert prepared.endless is not None
    assert prepared.workload.long is not None
    shorts, longs_done = prepared.endless, asyncio.Event()

    async def short() -> None:
        while not longs_done.is_set():
            record = await target.send(next(shorts))
            keep(record)
            if not record.ok:
                await asyncio.sleep(0.1)  # a server that refuses at once must not be hammered in a tight loop

    async with asyncio.TaskGroup() as group:
        for _ in range(prepared.workload.concurrency):
            group.create_task(short())
        await asyncio.sleep(LEAD_IN_S)
        await _closed_loop(target, iter(prepared.requests), prepared.workload.long.streams, keep)
        longs_done.set()
