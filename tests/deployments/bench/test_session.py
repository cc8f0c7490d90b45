"""Whole benchmarks: the right number of requests, at the right times, never more at once than asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from shoal.configs.errors import ConfigError
from shoal.deployments.bench.drive import drive, prepare
from shoal.deployments.bench.http_target import HttpSettings, HttpTarget
from shoal.deployments.bench.prompts import PromptMaker
from shoal.deployments.bench.records import RequestRecord
from shoal.deployments.bench.session import Measurement, Plan, Session
from shoal.deployments.bench.summary import Objective
from shoal.deployments.bench.workloads import LongStreams, Workload, preset

if TYPE_CHECKING:
    from tests.deployments.bench.conftest import FakeServer


class Silent:
    """A watcher that only counts."""

    def __init__(self) -> None:
        self.titles: list[tuple[str, int | None]] = []
        self.records = 0
        self.events = 0

    def begin(self, title: str, total: int | None) -> None:
        self.titles.append((title, total))

    def event(self, tokens: int) -> None:
        self.events += tokens

    def record(self, record: RequestRecord) -> None:
        self.records += 1

    def end(self) -> None:
        pass


@pytest.fixture
async def target(server: FakeServer) -> AsyncIterator[HttpTarget]:
    server.first_delay, server.gap = 0.05, 0.01
    async with HttpTarget(HttpSettings(server.url)) as opened:
        yield opened


async def drive_one(target: HttpTarget, workload: Workload) -> list[RequestRecord]:
    prepared = await prepare(workload, PromptMaker(await target.ruler(), "seed"), "seed")
    run = await drive(target, prepared, lambda record: None)
    assert run.wall_s == pytest.approx(max(r.end for r in run.records) - min(r.due for r in run.records))
    return run.records


async def test_a_closed_loop_keeps_exactly_its_streams_busy(server: FakeServer, target: HttpTarget) -> None:
    records = await drive_one(target, Workload("w", "", 9, input_tokens=16, output_tokens=4, concurrency=3))
    assert len(records) == 9
    assert server.most_running == 3
    assert all(record.ok for record in records)


async def test_an_open_loop_sends_at_its_times_however_slow_the_server(server: FakeServer, target: HttpTarget) -> None:
    server.first_delay = 0.5
    records = await drive_one(target, Workload("w", "", 8, input_tokens=16, output_tokens=4, rate=80.0))
    dues = sorted(record.due for record in records)
    assert dues[-1] - dues[0] < 0.45
    assert server.most_running == 8


async def test_arrivals_are_poisson_and_repeatable() -> None:
    workload = Workload("w", "", 2000, input_tokens=16, rate=50.0)

    class OneWord:
        exact = True

        async def count(self, messages: list[dict[str, str]]) -> int:
            return len(messages[0]["content"].split())

    prepared = [await prepare(workload, PromptMaker(OneWord(), "s"), "s") for _ in range(2)]  # type: ignore[arg-type]
    assert prepared[0].arrivals == prepared[1].arrivals
    gaps = [b - a for a, b in zip(prepared[0].arrivals, prepared[0].arrivals[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.02, rel=0.1)
    assert deviation == pytest.approx(mean, rel=0.1)  # of an exponential distribution they are equal


async def test_short_streams_run_as_long_as_the_long_ones(
    server: FakeServer, target: HttpTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.deployments.bench.drive.LEAD_IN_S", 0.1)
    long = LongStreams(streams=2, requests=4, input_tokens=64, output_tokens=4)
    records = await drive_one(target, Workload("w", "", 1, input_tokens=16, output_tokens=4, concurrency=4, long=long))
    assert sum(record.tag == "long" for record in records) == 4
    assert sum(record.tag == "short" for record in records) > 8
    assert server.most_running == 6


async def test_a_session_measures_every_workload_as_often_as_asked(server: FakeServer, target: HttpTarget) -> None:
    shown: list[Measurement] = []
    watcher = Silent()
    plan = Plan(
        [Workload("a", "", 2, 16, 4), Workload("b", "", 3, 16, 4, concurrency=3)],
        repetitions=2,
        objective=Objective(1000, 1000),
        warm_up=1,
    )
    report = await Session(target, await target.ruler(), watcher).run(plan, shown.append)
    assert [(m.workload.name, m.repetition) for m in shown] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert [m.summary.requests for m in shown] == [2, 3, 2, 3]
    assert all(m.summary.input_tokens == 16 * m.summary.requests for m in shown)
    # one first request, one warm-up a workload, and what is measured
    assert len(server.seen) == 1 + 2 + 10
    assert watcher.records == 12
    assert len({str(body["messages"]) for body in server.seen}) == len(server.seen)
    document = report.to_json()
    assert document["runs"][0]["goodput"]["attainment"] == 1.0
    assert document["runs"][1]["ttft_ms"]["count"] == 3
    assert 0 <= document["runs"][0]["cpu"]["client"] <= 1


async def test_a_share_of_capacity_follows_the_measured_w3(target: HttpTarget) -> None:
    w3 = Workload("W3", "", 4, 16, 4, concurrency=4)
    half = Workload("half", "", 2, 16, 4, capacity_share=0.5)
    report = await Session(target, await target.ruler(), Silent()).run(Plan([w3, half], warm_up=0), lambda m: None)
    first, second = report.measurements
    assert second.workload.rate == pytest.approx(first.summary.requests_per_s / 2)


async def test_a_share_of_an_unknown_capacity_is_refused(target: HttpTarget) -> None:
    half = Workload("half", "", 2, 16, 4, capacity_share=0.5)
    with pytest.raises(ConfigError, match="run W3 in the same command"):
        await Session(target, await target.ruler(), Silent()).run(Plan([half]), lambda m: None)


def test_presets_have_the_shapes_that_others_are_measured_with() -> None:
    shapes = {
        w.name: (w.requests, w.input_tokens, w.output_tokens, w.concurrency)
        for name in ("W1", "W2", "W3", "W4", "W5")
        for w in preset(name)
    }
    assert shapes == {
        "W1": (3, 128, 128, 1),
        "W2": (24, 128, 128, 8),
        "W3": (64, 128, 128, 32),
        "W4": (32, 64, 64, 8),
        "W4@1": (12, 64, 8, 1),
        "W5": (1, 64, 64, 4),
    }
    assert [(w.shared_prefix_tokens, w.prefixes) for w in preset("W4")] == [(1024, 1), (1024, 3)]
    assert [w.requests for w in preset("W4", 0.1)] == [9, 6]  # at least one hit for every prefix
    assert preset("W5")[0].long == LongStreams(2, 4, 4096, 32)
    assert [w.capacity_share for w in preset("w6")] == [0.5, 0.8]
    assert preset("W3", 0.5)[0].requests == 32
    assert preset("W3", 0.1)[0].requests == 32  # one for every stream
    assert [w.requests for w in preset("W6", 0.25)] == [8, 8]


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="W1, W2, W3, W4, W5, W6"):
        preset("W9")


def test_a_point_of_a_sweep_has_requests_for_all_its_streams() -> None:
    points = [Workload("w", "", 24).at_concurrency(n) for n in (1, 8)]
    assert [(w.name, w.concurrency, w.requests) for w in points] == [("w@1", 1, 4), ("w@8", 8, 24)]
    assert Workload("w", "", 24).at_concurrency(8, 5).requests == 5


@pytest.mark.parametrize("change", [{"requests": 0}, {"concurrency": 0}, {"input_tokens": 0}, {"rate": 0.0}])
def test_senseless_shapes_are_refused_by_name(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(Workload("w", "", 1), **change)  # type: ignore[arg-type]
    assert caught.value.param == next(iter(change))
