"""Results for people: a table per pass, a live progress line."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from shoal.deployments.bench.records import RequestRecord
from shoal.deployments.bench.session import Measurement
from shoal.deployments.bench.summary import Distribution, Summary
from shoal.deployments.bench.workloads import Workload

BUSY_CLIENT = 0.2
"""Above this share of the machine the load generator is likely to be measuring itself."""
BUSY_OTHERS = 0.05
"""Above this share of the machine for others, a pass is no basis for a comparison."""
LATE_CLIENT_MS = 50.0


def measurement_view(measurement: Measurement) -> Group:
    """Latencies (and, in a mixed workload, those of each kind of stream) and rates of one pass."""
    summary, workload = measurement.summary, measurement.workload
    title = f"{workload.name} · {workload.summary}" if workload.summary else workload.name
    table = Table(box=SIMPLE_HEAD)
    table.add_column("ms", justify="left")
    for name in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right")
    for prefix, part in [("", summary), *((f"{tag} ", part) for tag, part in summary.by_tag.items())]:
        rows = (("TTFT", part.ttft_ms), ("ITL", part.itl_ms), ("TPOT", part.tpot_ms), ("E2E", part.e2e_ms))
        for name, values in rows:
            table.add_row(prefix + name, *_cells(values))
        table.add_section()
    return Group(Text(title, style="bold"), table, Text(_figures(measurement)), Text(""))


def overview(measurements: Sequence[Measurement]) -> Table:
    """One line a pass: how the figures go with the load."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("", justify="left")
    for name in ("streams", "tok/s", "TTFT p50", "p99", "ITL p50", "p99", "TPOT", "errors"):
        table.add_column(name, justify="right")
    for measurement in measurements:
        workload, summary = measurement.workload, measurement.summary
        table.add_row(
            workload.name,
            "-" if workload.open_loop else str(workload.concurrency),
            f"{summary.output_tokens_per_s:.1f}",
            *(_milliseconds(value) for value in _pair(summary.ttft_ms)),
            *(_milliseconds(value) for value in _pair(summary.itl_ms)),
            _milliseconds(_pair(summary.tpot_ms)[0]),
            str(summary.errors),
        )
    return table


def cpu_is_shared(measurement: Measurement) -> bool:
    """Whether somebody else disturbed this pass."""
    return (measurement.cpu.foreign or 0.0) > BUSY_OTHERS


def shape_line(workload: Workload) -> str:
    """How the load arrives, in words."""
    if workload.rate is not None:
        arrival = f"open loop, {workload.rate:.3g} requests/s (Poisson)"
    else:
        arrival = f"closed loop, {workload.concurrency} stream{'s' if workload.concurrency > 1 else ''}"
    shared = f", {workload.shared_prefix_tokens} shared" if workload.shared_prefix_tokens else ""
    return f"{arrival}, {workload.input_tokens} tokens in{shared}, {workload.output_tokens} out"


def _figures(measurement: Measurement) -> str:
    summary = measurement.summary
    lines = [
        shape_line(measurement.workload),
        f"{summary.output_tokens_per_s:.1f} output tokens/s, {summary.input_tokens_per_s:.1f} input tokens/s, "
        f"{summary.requests_per_s:.3g} requests/s over {summary.wall_s:.1f} s",
        f"{summary.requests} requests, {summary.errors} errors, {summary.early_stops} early stops, "
        f"{summary.input_tokens} tokens in ({summary.cached_tokens} cached), {summary.output_tokens} out",
    ]
    if summary.goodput is not None:
        good, objective = summary.goodput, summary.goodput.objective
        lines.append(
            f"goodput {good.requests_per_s:.3g} requests/s: {good.attainment:.0%} within TTFT {objective.ttft_ms:g} ms "
            f"and TPOT {objective.tpot_ms:g} ms ({'sustained' if good.sustained else 'not sustained'})"
        )
    cpu = measurement.cpu
    own = "this process, engine included" if measurement.in_process else "client"
    shares = [(own, cpu.client), ("server", cpu.server), ("others", cpu.foreign)]
    named = ", ".join(f"{name} {share:.1%}" for name, share in cpu.foreign_by.items())
    lines.append(
        "CPU: "
        + ", ".join(f"{name} {share:.1%}" for name, share in shares if share is not None)
        + (f" ({named})" if named else "")
    )
    if measurement.memory is not None:
        largest = ", ".join(f"{process.name} {process.pss_mb:.0f}" for process in measurement.memory.processes[:3])
        lines.append(f"memory: {measurement.memory.pss_mb:.0f} MB (PSS), the largest: {largest}")
    return "\n".join(lines + _warnings(measurement, summary))


def _warnings(measurement: Measurement, summary: Summary) -> list[str]:
    found = []
    if summary.first_error:
        found.append(f"first error: {summary.first_error}")
    if measurement.cpu.client > BUSY_CLIENT and not measurement.in_process:
        found.append("the load generator itself uses much of this machine: latencies are upper bounds")
    if cpu_is_shared(measurement):
        found.append("others used more than 5% of this machine: do not compare this run with another")
    if summary.send_lag_ms > LATE_CLIENT_MS and measurement.workload.open_loop:
        found.append(f"the load generator was up to {summary.send_lag_ms:.0f} ms late (counted as latency)")
    return found


def _cells(values: Distribution | None) -> list[str]:
    if values is None:
        return ["-"] * 5
    return [_milliseconds(value) for value in (values.mean, values.p50, values.p90, values.p99, values.max)]


def _pair(values: Distribution | None) -> tuple[float | None, float | None]:
    return (None, None) if values is None else (values.p50, values.p99)


def _milliseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


class ProgressWatcher:
    """One live line: what runs, how many requests are done, and events (about tokens) a second."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<18}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._events = 0
        self._errors = 0
        self._started = 0.0

    def __enter__(self) -> ProgressWatcher:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def begin(self, title: str, total: int | None) -> None:
        self.end()
        self._events, self._errors, self._started = 0, 0, time.perf_counter()
        self._task = self._progress.add_task(title, total=total, rate="")

    def event(self, tokens: int) -> None:
        self._events += tokens

    def record(self, record: RequestRecord) -> None:
        if self._task is None:
            return
        self._errors += not record.ok
        rate = self._events / max(1e-9, time.perf_counter() - self._started)
        errors = f", {self._errors} errors" if self._errors else ""
        self._progress.update(self._task, advance=1, rate=f"{rate:6.1f} events/s{errors}")

    def end(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
