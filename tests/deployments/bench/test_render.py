"""What a person reads."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from shoal.deployments.bench.cpu import CpuShares
from shoal.deployments.bench.memory import ProcessMemory, TreeMemory
from shoal.deployments.bench.records import RequestRecord
from shoal.deployments.bench.render import measurement_view, overview
from shoal.deployments.bench.session import Measurement
from shoal.deployments.bench.summary import Objective, summarize
from shoal.deployments.bench.workloads import Workload


def rendered(measurement: Measurement, width: int = 120) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(measurement_view(measurement))
    return out.getvalue()


def record(tag: str = "", error: str | None = None) -> RequestRecord:
    made = RequestRecord(4, 0.0, tag, sent=0.0, end=1.0, token_times=[0.25, 0.5, 0.75])
    made.output_tokens, made.input_tokens, made.error = 4, 9, error
    return made


def measure(records: list[RequestRecord], cpu: CpuShares, *, in_process: bool = False, **shape: float) -> Measurement:
    summary = summarize(records, 2.0, Objective(300, 300))
    return Measurement(Workload("W", "a shape", 2, **shape), 0, summary, cpu, in_process)  # type: ignore[arg-type]


def test_latencies_rates_and_goodput_are_shown() -> None:
    text = rendered(measure([record(), record()], CpuShares(0.01, 0.9, 0.02)))
    assert text.startswith("W · a shape\n")
    assert [line.split()[:2] for line in text.splitlines() if line.startswith("  TTFT")] == [["TTFT", "250"]]
    assert "4.0 output tokens/s" in text
    assert "goodput 1 requests/s: 100% within TTFT 300 ms and TPOT 300 ms (sustained)" in text
    assert "CPU: client 1.0%, server 90.0%, others 2.0%" in text


def test_each_kind_of_stream_has_its_rows() -> None:
    text = rendered(measure([record("long"), record("short")], CpuShares(0.01)))
    assert "long TTFT" in text
    assert "short ITL" in text


def test_what_spoils_a_measurement_is_said() -> None:
    text = rendered(measure([record(), record(error="HTTP 500: [bold]boom[/bold]")], CpuShares(0.5)))
    assert "first error: HTTP 500: [bold]boom[/bold]" in text
    assert "latencies are upper bounds" in text


def test_who_disturbed_is_named() -> None:
    text = rendered(measure([record()], CpuShares(0.01, 0.8, 0.1, {"raylet": 0.07, "sshd": 0.02})))
    assert "others 10.0% (raylet 7.0%, sshd 2.0%)" in text
    assert "do not compare this run" in text
    assert "do not compare" not in rendered(measure([record()], CpuShares(0.01, 0.8, 0.04)))


def test_memory_is_stated_by_process() -> None:
    memory = TreeMemory([ProcessMemory("engine", 7, 600.0, 700.0), ProcessMemory("raylet", 8, 30.4, 40.0)])
    text = rendered(replace(measure([record()], CpuShares(0.01)), memory=memory))
    assert "memory: 630 MB (PSS), the largest: engine 600, raylet 30" in text


def test_passes_are_set_beside_each_other() -> None:
    out = io.StringIO()
    closed = measure([record()], CpuShares(0.01), concurrency=2)
    Console(file=out, width=120).print(overview([closed, measure([record(error="x")], CpuShares(0.01), rate=2.0)]))
    rows = [line.split() for line in out.getvalue().splitlines() if line.split()[:1] == ["W"]]
    assert rows == [
        ["W", "2", "2.0", "250", "250", "250", "250", "250", "0"],
        ["W", "-", "0.0", "-", "-", "-", "-", "-", "1"],
    ]


def test_a_late_client_is_said_for_open_loops() -> None:
    late = record()
    late.sent = 0.2
    assert "up to 200 ms late" in rendered(measure([late], CpuShares(0.01), rate=2.0))
    assert "late" not in rendered(measure([late], CpuShares(0.01)))


def test_in_process_the_engine_is_no_load_of_the_client() -> None:
    text = rendered(measure([record()], CpuShares(0.9), in_process=True))
    assert "this process, engine included 90.0%" in text
    assert "upper bounds" not in text
