"""Figures of results: throughput against concurrency, and how TTFT and ITL are distributed, engine beside engine."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.configs.errors import ConfigError
from shoal.deployments.bench.figures import Look, house_style, look, panels, save, title_and_legend
from shoal.deployments.bench.results import Curve, ResultRun, merged

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 3
_FEW = 40
"""Below so many observations a distribution is drawn as the steps it is."""
_LOG_SPAN = 5.0
"""An axis whose values span more than this factor is logarithmic."""

Panel = tuple[str, str]
"""(workload, kind of request)."""


def plot_results(runs: Sequence[ResultRun], directory: Path) -> list[Path]:
    """Writes what the runs allow as PNG and SVG and returns the paths: `throughput` (at least two concurrencies of one
    shape), `ttft` and `itl`. Raises ConfigError when they allow nothing."""
    looks = {label: look(index) for index, label in enumerate(dict.fromkeys(run.label for run in runs))}
    with house_style():
        paths = _throughput(runs, looks, directory)
        paths += _distributions(runs, looks, directory, "ttft", "Time to first token", "requests")
        paths += _distributions(runs, looks, directory, "itl", "Inter-token latency", "gaps between tokens")
    if not paths:
        raise ConfigError("There is nothing to draw: no request of these results was answered.", param="plot")
    return paths


# --- throughput against concurrency ---------------------------------------------------------------------------------


def _throughput(runs: Sequence[ResultRun], looks: dict[str, Look], directory: Path) -> list[Path]:
    by_shape: dict[str, list[ResultRun]] = defaultdict(list)
    for run in runs:
        if run.concurrency is not None:
            by_shape[run.shape].append(run)
    shapes = {shape: group for shape, group in by_shape.items() if len({run.concurrency for run in group}) > 1}
    if not shapes:
        return []
    figure, axes = panels(len(shapes), 2, (4.2, 3.3))
    lines: dict[str, Any] = {}
    for row, (shape, group) in enumerate(shapes.items()):
        left, right = axes[2 * row : 2 * row + 2]
        for label, points in _by_label(group).items():
            rates = {streams: [run.output_tokens_per_s for run in some] for streams, some in points.items()}
            waits = {streams: _p99s(some) for streams, some in points.items()}
            lines[label] = _medians(left, rates, looks[label])
            _medians(right, {streams: values for streams, values in waits.items() if values}, looks[label])
        _concurrency_axes(left, f"{shape}: throughput", "output tokens/s")
        _concurrency_axes(right, "99th percentile of the TTFT", "ms")
        left.set_ylim(bottom=0)
        _scale(right, "y")
    repeated = any(len(some) > 1 for group in shapes.values() for p in _by_label(group).values() for some in p.values())
    note = " (median, bars: least to most)" if repeated else ""
    title_and_legend(figure, list(lines.values()), list(lines), f"Throughput against concurrency{note}")
    return save(figure, directory, "throughput")


def _by_label(runs: Iterable[ResultRun]) -> dict[str, dict[int, list[ResultRun]]]:
    """Label -> concurrency, ascending -> runs."""
    found: dict[str, dict[int, list[ResultRun]]] = defaultdict(lambda: defaultdict(list))
    for run in sorted(runs, key=lambda run: run.concurrency or 0):
        found[run.label][run.concurrency or 0].append(run)
    return found


def _p99s(runs: Sequence[ResultRun]) -> list[float]:
    return [max(curve.p99 for curve in run.ttft.values()) for run in runs if run.ttft]


def _medians(axes: Axes, points: dict[int, list[float]], style: Look) -> Any:
    """A line through the medians, with bars from the least to the greatest value."""
    middle = [statistics.median(values) for values in points.values()]
    spread = [
        [at - min(values) for at, values in zip(middle, points.values(), strict=True)],
        [max(values) - at for at, values in zip(middle, points.values(), strict=True)],
    ]
    return axes.errorbar(
        list(points), middle, yerr=spread, color=style.colour, ls=style.line, marker=style.marker, capsize=2.5
    )


def _concurrency_axes(axes: Axes, title: str, unit: str) -> None:
    lines: list[Any] = axes.get_lines()
    ticks = sorted({int(x) for line in lines for x in line.get_xdata()})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_title(title)
    axes.set_xlabel("concurrent streams")
    axes.set_ylabel(unit)


# --- distributions --------------------------------------------------------------------------------------------------


def _distributions(
    runs: Sequence[ResultRun], looks: dict[str, Look], directory: Path, which: str, title: str, what: str
) -> list[Path]:
    curves: dict[Panel, dict[str, list[Curve]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for kind, curve in (run.ttft if which == "ttft" else run.itl).items():
            curves[run.workload, kind][run.label].append(curve)
    if not curves:
        return []
    columns = min(_COLUMNS, len(curves))
    rows = -(-len(curves) // columns)
    figure, axes = panels(rows, columns, (3.6 if columns > 1 else 5.5, 2.7 if columns > 1 else 3.6))
    lines: dict[str, Any] = {}
    for panel, ((workload, kind), by_label) in zip(axes, curves.items(), strict=False):
        for label, some in by_label.items():
            lines[label] = _share_below(panel, some, looks[label])
        panel.set_title(f"{workload} · {kind}" if kind else workload)
        _scale(panel, "x")
        panel.set_ylim(0, 100)
        panel.set_xlabel("ms")
        panel.set_ylabel(f"% of {what}")
    for unused in axes[len(curves) :]:
        unused.remove()
    title_and_legend(figure, list(lines.values()), list(lines), f"{title} (marks: median and 99th percentile)")
    return save(figure, directory, which)


def _share_below(axes: Axes, curves: Sequence[Curve], style: Look) -> Any:
    values, shares = merged(curves)
    percents = [100 * share for share in shares]
    steps = "steps-post" if len(values) < _FEW else "default"
    (line,) = axes.plot(values, percents, drawstyle=steps, color=style.colour, ls=style.line)
    marks = [next(i for i, percent in enumerate(percents) if percent >= share - 1e-9) for share in (50, 99)]
    axes.plot([values[i] for i in marks], (50, 99), color=style.colour, marker=style.marker, ls="", clip_on=False)
    return line


def _scale(axes: Axes, which: str) -> None:
    """Logarithmic when the values span much, with plain numbers instead of powers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    lines: list[Any] = axes.get_lines()
    data: list[float] = [v for line in lines for v in (line.get_xdata() if which == "x" else line.get_ydata())]
    positive = [value for value in data if value > 0]
    axis = axes.xaxis if which == "x" else axes.yaxis
    if len(positive) < len(data) or max(positive) / min(positive) < _LOG_SPAN:
        return
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    few = math.log10(max(positive) / min(positive)) < 2
    axis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if few else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())
