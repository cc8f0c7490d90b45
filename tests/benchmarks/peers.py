"""Shoal beside other engines: the same requests, the same machine, taken in turns.

    python tests/benchmarks/peers.py --root ROOT --engines shoal,llamacpp-q4,vllm --repetitions 3 --json peers.json
    python tests/benchmarks/peers.py --server shoal=http://127.0.0.1:8000,smollm2-135m,PID --engines llamacpp-q4 ...

All servers are started first and stay up. Then, for each repetition and workload, every engine gets the byte-identical
requests in turn (the order rotates), because the memory bandwidth of a shared machine changes from hour to hour: only
ratios within a repetition count. `foreign` is the share of the machine used by anyone but the server at work and this
client (idle peers included); runs where it is above 0.05 are marked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import roofline
from engines import PARAMETERS, Engine, Server, catalogue
from rich.console import Console

from shoal.deployments.bench.cpu import process_tree
from shoal.deployments.bench.http_target import HttpSettings, HttpTarget
from shoal.deployments.bench.prompts import Ruler
from shoal.deployments.bench.render import ProgressWatcher
from shoal.deployments.bench.rulers import local_ruler
from shoal.deployments.bench.session import Measurement, Plan, Session
from shoal.deployments.bench.workloads import preset

NOISY = 0.05

# (workload, path in the JSON of a run, whether more is better)
ROWS: list[tuple[str, str, bool]] = [
    ("W1", "tpot_ms.p50", False),
    ("W1", "output_tokens_per_s", True),
    ("W1", "ttft_ms.p50", False),
    ("W2", "output_tokens_per_s", True),
    ("W2", "ttft_ms.p50", False),
    ("W2", "tpot_ms.p50", False),
    ("W2", "itl_ms.p99", False),
    ("W3", "output_tokens_per_s", True),
    ("W3", "ttft_ms.p50", False),
    ("W3", "tpot_ms.p50", False),
    ("W3", "itl_ms.p99", False),
    ("W4", "output_tokens_per_s", True),
    ("W4", "ttft_ms.p50", False),
    ("W5", "by_tag.short.itl_ms.p99", False),
    ("W5", "by_tag.short.itl_ms.p50", False),
    ("W5", "by_tag.long.ttft_ms.p50", False),
    ("W6@50%", "ttft_ms.p50", False),
    ("W6@50%", "tpot_ms.p50", False),
    ("W6@80%", "ttft_ms.p50", False),
    ("W6@80%", "ttft_ms.p99", False),
    ("W6@80%", "tpot_ms.p50", False),
]


@dataclass
class Contestant:
    """One engine that is up."""

    name: str
    url: str
    model: str
    pid: int | None
    engine: Engine | None
    startup_s: float | None = None
    idle_mb: int | None = None
    capacity: float | None = None


def main() -> None:
    args = parse_arguments()
    names = [name for name in args.engines.split(",") if name]
    starts = catalogue(args.shoal_dtype, args.shoal_args.split())
    unknown = [name for name in names if name not in starts]
    if unknown:
        sys.exit(f"no engine {', '.join(unknown)}; there are {', '.join(starts)}")
    limits = roofline.measure([94 << 20, 256 << 20, 512 << 20], args.threads)
    print(f"limits of this machine: {json.dumps(limits.to_json())}", flush=True)
    # A terminated comparison must not leave servers behind: the `finally` below runs for an exit, not for a signal.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    servers: list[Server] = []
    contestants = [given_server(text) for text in args.server]
    logs = Path(tempfile.mkdtemp(prefix="peers-"))
    try:
        for offset, name in enumerate(names):
            port = args.port + offset
            server = Server(name, starts[name](args.root, port, args.threads), port, logs / f"{name}.log")
            servers.append(server)
            server.wait_for_first_token()
            contestants.append(
                Contestant(name, server.url, server.engine.model, server.pid, server.engine, round(server.startup_s, 2))
            )
            contestants[-1].idle_mb = memory_mb(server.pid)
            print(f"{name} is up after {server.startup_s:.1f} s, {contestants[-1].idle_mb} MB", flush=True)
        runs = asyncio.run(compete(contestants, args))
    finally:
        for server in servers:
            server.stop()
    document = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "limits": limits.to_json(),
        "engines": {c.name: {"startup_s": c.startup_s, "idle_mb": c.idle_mb} for c in contestants},
        "runs": runs,
    }
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    report(runs, contestants, limits)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("."), help="folder with the peers' venvs/ and models/")
    parser.add_argument("--engines", default="shoal,llamacpp-q4,vllm", help="to start, in order; the first is ours")
    parser.add_argument("--server", action="append", default=[], metavar="NAME=URL,MODEL[,PID]", help="already up")
    parser.add_argument("--workloads", default="W1,W2,W3")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--port", type=int, default=18300)
    parser.add_argument("--shoal-dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--shoal-args", default="", help="more arguments for `shoal serve`")
    parser.add_argument("--tokenizer", default="smollm2-135m", help="measures the prompts, once for all engines")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def given_server(text: str) -> Contestant:
    """A server that the caller started."""
    name, _, rest = text.partition("=")
    url, model, *pid = rest.split(",")
    return Contestant(name, url, model, int(pid[0]) if pid else None, None)


async def compete(contestants: list[Contestant], args: argparse.Namespace) -> list[dict[str, Any]]:
    ruler = await local_ruler(args.tokenizer)
    runs = []
    with ProgressWatcher(Console(stderr=True)) as watcher:
        for repetition in range(args.repetitions):
            for name in args.workloads.split(","):
                # The order rotates, so that nobody always follows the same neighbour.
                shift = repetition % len(contestants)
                for contestant in contestants[shift:] + contestants[:shift]:
                    runs += await one_turn(contestant, name, repetition, args, ruler, watcher)
    return runs


async def one_turn(
    contestant: Contestant,
    name: str,
    repetition: int,
    args: argparse.Namespace,
    ruler: Ruler,
    watcher: ProgressWatcher,
) -> list[dict[str, Any]]:
    plan = Plan(
        preset(name, args.scale),
        seed=f"peers/{repetition}",
        warm_up=2 if repetition == 0 else 0,
        capacity=contestant.capacity,
        server_pid=contestant.pid,
    )
    done: list[Measurement] = []
    async with HttpTarget(HttpSettings(contestant.url, contestant.model)) as target:
        report = await Session(target, ruler, watcher).run(plan, done.append)
    if name == "W3":
        contestant.capacity = done[-1].summary.requests_per_s
    rows = []
    for run in report.to_json()["runs"]:
        rows.append({**run, "engine": contestant.name, "repetition": repetition})
        foreign = run["cpu"]["foreign"]
        noisy = " NOISY" if foreign is not None and foreign > NOISY else ""
        print(
            f"{contestant.name:<20} {run['workload']:<7} #{repetition + 1}  {run['output_tokens_per_s']:8.1f} tok/s  "
            f"errors {run['errors']}  early {run['early_stops']}  client {run['cpu']['client']:.1%}  "
            f"foreign {foreign}{noisy}",
            flush=True,
        )
    return rows


def memory_mb(pid: int) -> int | None:
    """Proportional set size of a process tree."""
    total = 0
    for member in process_tree(pid):
        try:
            rollup = Path(f"/proc/{member}/smaps_rollup").read_text()
        except OSError:
            continue
        total += next((int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")), 0)
    return round(total / 1024) if total else None


def value(run: dict[str, Any], path: str) -> float | None:
    found: Any = run
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, int | float) else None


def report(runs: list[dict[str, Any]], contestants: list[Contestant], limits: roofline.MachineLimits) -> None:
    names = [contestant.name for contestant in contestants]
    rows = [row for row in ROWS if any(run["workload"] == row[0] for run in runs)]
    print("\n## Medians [min-max]\n")
    print_table(["workload, metric", *names], [[f"{w} {path}", *cells(runs, names, w, path)] for w, path, _ in rows])
    ours, peers = names[0], names[1:]
    print(f"\n## How many times better {ours} is, within a repetition: min / median / max\n")
    print_table(
        ["workload, metric", *peers],
        [[f"{w} {path}", *(ratio_cell(runs, ours, peer, w, path, up) for peer in peers)] for w, path, up in rows],
    )
    print("\n## Fraction of the decode bound (median)\n")
    known = [contestant for contestant in contestants if contestant.engine is not None]
    print_table(
        ["workload", *(contestant.name for contestant in known)],
        [
            [f"{w} (batch {batch})", *(fraction_cell(runs, contestant, w, batch, limits) for contestant in known)]
            for w, batch in (("W1", 1), ("W2", 8), ("W3", 32))
            if any(run["workload"] == w for run in runs)
        ],
    )
    print("\n## Start-up and memory\n")
    print_table(
        ["", *names],
        [
            ["start to first token, s", *(str(c.startup_s or "-") for c in contestants)],
            ["idle memory, MB (PSS)", *(str(c.idle_mb or "-") for c in contestants)],
        ],
    )


def values(runs: list[dict[str, Any]], engine: str, workload: str, path: str) -> dict[int, float]:
    """Repetition -> value."""
    return {
        run["repetition"]: found
        for run in runs
        if run["engine"] == engine and run["workload"] == workload and (found := value(run, path)) is not None
    }


def cells(runs: list[dict[str, Any]], names: list[str], workload: str, path: str) -> list[str]:
    out = []
    for name in names:
        found = sorted(values(runs, name, workload, path).values())
        out.append(f"{statistics.median(found):.4g} [{found[0]:.4g}-{found[-1]:.4g}]" if found else "-")
    return out


def ratio_cell(runs: list[dict[str, Any]], ours: str, peer: str, workload: str, path: str, more_is_better: bool) -> str:
    mine, theirs = values(runs, ours, workload, path), values(runs, peer, workload, path)
    shared = [r for r in mine if r in theirs and mine[r] and theirs[r]]
    ratios = sorted(mine[r] / theirs[r] if more_is_better else theirs[r] / mine[r] for r in shared)
    return f"{ratios[0]:.2f} / {statistics.median(ratios):.2f} / {ratios[-1]:.2f}" if ratios else "-"


def fraction_cell(
    runs: list[dict[str, Any]], contestant: Contestant, workload: str, batch: int, limits: roofline.MachineLimits
) -> str:
    """Achieved over possible. One stream by its TPOT; batches by output tokens/s of the whole run, prefill included."""
    path = "tpot_ms.p50" if batch == 1 else "output_tokens_per_s"
    found = list(values(runs, contestant.name, workload, path).values())
    if not found or contestant.engine is None:
        return "-"
    middle = statistics.median(found)
    achieved = 1e3 / middle if batch == 1 else middle
    engine = contestant.engine
    context = 128 + 128 / 2
    bound = roofline.decode_bound(limits, engine.weight_bytes, engine.kv_bytes_per_token * context, batch, PARAMETERS)
    return f"{achieved / bound:.0%} of {bound:.0f} tok/s"


def print_table(header: list[str], rows: list[list[str]]) -> None:
    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
