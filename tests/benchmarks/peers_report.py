"""The tables of a comparison: medians, ratios within a repetition, fractions of the machine, start-up, memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import roofline
from engines import PARAMETERS

NOISY = 0.05
MEAN_CONTEXT = 128 + 128 / 2
"""Of a sequence of W1 to W3 while it is answered."""

Run = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One figure of one workload. `path` leads into the JSON of a run; "a / b" is the ratio of two."""

    workload: str
    label: str
    path: str
    more_is_better: bool | None = None
    """None: no ratio between engines."""

    @property
    def title(self) -> str:
        return f"{self.workload} {self.label}"


def _latencies(workload: str, *labels: str) -> list[Row]:
    paths = {"TTFT": "ttft_ms", "TPOT": "tpot_ms", "ITL": "itl_ms"}
    split = [label.split() for label in labels]
    return [Row(workload, f"{name} {share}, ms", f"{paths[name]}.{share}", False) for name, share in split]


def _throughput(workload: str) -> Row:
    return Row(workload, "tokens/s", "output_tokens_per_s", True)


def _prefix(workload: str) -> list[Row]:
    cold, hit = "by_tag.cold.ttft_ms.p50", "by_tag.hit.ttft_ms.p50"
    return [
        Row(workload, "TTFT p50 cold, ms", cold, False),
        Row(workload, "TTFT p50 hit, ms", hit, False),
        Row(workload, "TTFT hit / cold", f"{hit} / {cold}"),
        Row(workload, "cached share of hits", "by_tag.hit.cached_tokens / by_tag.hit.input_tokens"),
    ]


def _poisson(workload: str) -> list[Row]:
    return [
        Row(workload, "requests/s offered", "shape.rate"),
        *_latencies(workload, "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99"),
        Row(workload, "goodput, requests/s", "goodput.requests_per_s", True),
        Row(workload, "within 500 ms and 50 ms", "goodput.attainment"),
    ]


ROWS: list[Row] = [
    *(_throughput("W1"), *_latencies("W1", "TPOT p50", "TTFT p50")),
    *(_throughput("W2"), *_latencies("W2", "TTFT p50", "TTFT p99", "TPOT p50", "ITL p99")),
    *(_throughput("W3"), *_latencies("W3", "TTFT p50", "TTFT p99", "TPOT p50", "ITL p99")),
    *(_throughput("W4"), *_prefix("W4"), *_prefix("W4@1")),
    Row("W5", "short ITL p99, ms", "by_tag.short.itl_ms.p99", False),
    Row("W5", "short ITL p50, ms", "by_tag.short.itl_ms.p50", False),
    Row("W5", "short ITL p99 / p50", "by_tag.short.itl_ms.p99 / by_tag.short.itl_ms.p50"),
    Row("W5", "long TTFT p50, ms", "by_tag.long.ttft_ms.p50", False),
    *(row for workload in ("W6@50%", "W6@80%", "W6=slowest", "W6=ours") for row in _poisson(workload)),
]
BOUNDS = (("W1", 1), ("W2", 8), ("W3", 32))


def value(run: Run, path: str) -> float | None:
    """What `path` leads to, if it is a number."""
    if " / " in path:
        above, below = (value(run, part) for part in path.split(" / "))
        return above / below if above is not None and below else None
    found: Any = run
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, int | float) and not isinstance(found, bool) else None


class Results:
    """The runs of a comparison, looked up."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self.runs = list(runs)
        self.engines = list(dict.fromkeys(run["engine"] for run in self.runs))
        measured = {run["workload"] for run in self.runs}
        self.rows = [row for row in ROWS if row.workload in measured]

    def values(self, engine: str, row: Row) -> dict[int, float]:
        """Repetition -> value."""
        return {
            run["repetition"]: found
            for run in self.runs
            if run["engine"] == engine and run["workload"] == row.workload
            if (found := value(run, row.path)) is not None
        }

    def ratios(self, ours: str, peer: str, row: Row) -> dict[int, float]:
        """Repetition -> how many times better `ours` was."""
        mine, theirs = self.values(ours, row), self.values(peer, row)
        return {
            r: mine[r] / theirs[r] if row.more_is_better else theirs[r] / mine[r]
            for r in mine
            if r in theirs and mine[r] and theirs[r]
        }

    def against_best(self, ours: str, peers: Sequence[str], row: Row) -> tuple[dict[int, float], str]:
        """Ratios to the peer with the best median, whoever that is in this row; and who."""
        found = {peer: ratios for peer in peers if (ratios := self.ratios(ours, peer, row))}
        if not found:
            return {}, ""
        best = min(found, key=lambda peer: statistics.median(found[peer].values()))
        return found[best], best


def spread(values: Iterable[float], form: Callable[[float], str] = lambda x: f"{x:.2f}") -> str:
    """min / median / max."""
    ordered = sorted(values)
    return " / ".join(map(form, (ordered[0], statistics.median(ordered), ordered[-1]))) if ordered else "-"


def report(document: Mapping[str, Any], *, quiet_only: bool = False) -> None:
    """Prints everything. `quiet_only` leaves out runs that others disturbed."""
    runs = document["runs"]
    if quiet_only:
        runs = [run for run in runs if (run["cpu"]["foreign"] or 0.0) <= NOISY]
        print(
            f"\n{len(document['runs']) - len(runs)} of {len(document['runs'])} runs are left out: others used more "
            f"than {NOISY:.0%} of the machine"
        )
    results = Results(runs)
    about = document["engines"]
    _medians(results)
    for ours in (name for name in results.engines if name.startswith("shoal")):
        peers = [name for name in results.engines if not name.startswith("shoal")]
        if peers:
            _ratios(results, ours, peers, {name: about[name]["bits"] for name in results.engines})
    _fractions(results, about, document["limits"])
    _conditions(results, document)
    _memory(results, about)
    for failure in document["failures"]:
        print(f"\nFAILED: {failure['engine']}: {failure['reason']}")


def _medians(results: Results) -> None:
    print("\n## Medians [least-most]\n")
    rows = []
    for row in results.rows:
        cells = []
        for engine in results.engines:
            found = sorted(results.values(engine, row).values())
            cells.append(f"{statistics.median(found):.4g} [{found[0]:.4g}-{found[-1]:.4g}]" if found else "-")
        rows.append([row.title, *cells])
    table(["", *results.engines], rows)


def _ratios(results: Results, ours: str, peers: list[str], bits: Mapping[str, int]) -> None:
    print(f"\n## How many times better {ours} is, within a repetition: min / median / max\n")
    # 16 and 32 bits are both unquantized: a CPU without bf16 arithmetic computes in fp32 anyway.
    alike = [peer for peer in peers if (bits[peer] >= 16) == (bits[ours] >= 16)]
    rows = []
    for row in results.rows:
        if row.more_is_better is None:
            continue
        cells = [spread(results.ratios(ours, peer, row).values()) for peer in peers]
        for group in (alike, peers):
            ratios, who = results.against_best(ours, group, row)
            cells.append(f"{spread(ratios.values())} ({who})" if who else "-")
        rows.append([row.title, *cells])
    kind = "unquantized" if bits[ours] >= 16 else "quantized"
    table(["", *peers, f"best {kind} peer", "best peer"], rows)


def _fractions(results: Results, about: Mapping[str, Any], limits: Sequence[Mapping[str, Any]]) -> None:
    print("\n## Fraction of the decode bound, each by the machine's limits at its time: min / median / max\n")
    known = [roofline.MachineLimits.from_json(found) for found in limits]
    rows = []
    for workload, batch in BOUNDS:
        cells = []
        for engine in results.engines:
            kv = about[engine]["kv_bytes_per_token"] * MEAN_CONTEXT
            fractions = []
            for run in results.runs:
                if run["engine"] != engine or run["workload"] != workload:
                    continue
                bound = roofline.decode_bound(
                    known[run["limits"]], about[engine]["weight_bytes"], kv, batch, PARAMETERS
                )
                # One stream by its TPOT; batches by the tokens/s of the whole run, prefill included.
                tpot = value(run, "tpot_ms.p50")
                reached = 1e3 / tpot if batch == 1 and tpot else run["output_tokens_per_s"]
                fractions.append(reached / bound)
            cells.append(spread(fractions, lambda x: f"{x:.0%}"))
        rows.append([f"{workload} (batch {batch})", *cells])
    table(["", *results.engines], rows)
    reads = [rate for found in known for size, rate in found.read_gb_s.items() if size == 256 << 20]
    print(
        f"\nread bandwidth (256 MB) {spread(reads, lambda x: f'{x:.1f}')} GB/s, fp32 matrices "
        f"{spread((found.fp32_gflop_s for found in known), lambda x: f'{x:.0f}')} GFLOP/s, min / median / max"
    )


def _conditions(results: Results, document: Mapping[str, Any]) -> None:
    print("\n## Conditions\n")
    rows = []
    for engine in results.engines:
        runs = [run for run in results.runs if run["engine"] == engine]
        worst = max(runs, key=lambda run: run["cpu"]["foreign"] or 0.0)
        who = ", ".join(f"{name} {share:.1%}" for name, share in worst["cpu"]["foreign_by"].items())
        startups = document["engines"][engine]["startups_s"]
        rows.append(
            [
                engine,
                spread(startups, lambda x: f"{x:.1f}"),
                str(sum(run["errors"] for run in runs)),
                str(sum(run["early_stops"] for run in runs)),
                f"{max(run['cpu']['client'] for run in runs):.1%}",
                f"{worst['cpu']['foreign'] or 0.0:.1%} in {worst['workload']} ({who})",
            ]
        )
    table(["", "start to first token, s", "errors", "early stops", "client CPU, most", "others' CPU, most"], rows)


def _memory(results: Results, about: Mapping[str, Any]) -> None:
    print("\n## Memory, MB (PSS): idle, and the most after any run\n")
    rows = []
    for engine in results.engines:
        idle = about[engine]["idle"]
        after = [run["memory"] for run in results.runs if run["engine"] == engine and run["memory"]]
        peak = max(after, key=lambda memory: memory["pss_mb"], default=None)
        if idle is None or peak is None:
            continue
        rows.append([f"**{engine}**", f"{idle['pss_mb']:.0f}", f"{peak['pss_mb']:.0f}"])
        before = {process["pid"]: process["pss_mb"] for process in idle["processes"]}
        for process in peak["processes"]:
            start = before.get(process["pid"])
            rows.append([process["name"], "-" if start is None else f"{start:.0f}", f"{process['pss_mb']:.0f}"])
    table(["process", "idle", "peak"], rows)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """As Markdown."""
    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(row) + " |")
