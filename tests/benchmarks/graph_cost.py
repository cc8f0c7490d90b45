"""What the graph costs: the engine alone in this process, and the same engine behind Ray Serve and HTTP, in turns.

    python tests/benchmarks/graph_cost.py [--weights dense,packed] [--repetitions 5] [--scale 1] [--json FILE]

The same prompts, the same settings, streaming. At 32 streams: output tokens/s over HTTP as a share of the engine's own
(aim: at least 90 %). At one stream: what HTTP adds to TTFT (aim: at most 10 ms) and TPOT. All of it is added: the
connection, JSON, the chat template and the tokenizer (the engine alone is given token ids), the gateway, the way of the
tokens back, SSE, and whatever Ray's own processes take of the machine. While the engine alone is measured the server
sleeps (SIGSTOP).

Only for a quiet machine: Linux shares the processors out by sessions and the server has one of its own, so whatever
else runs in the terminal's session slows the engine alone more than the engine behind HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engines import KV_CACHE, catalogue
from peers_report import spread, table, value
from rich.console import Console
from servers import Server

from shoal.configs.schema import parse_engine_config
from shoal.deployments.bench.http_target import HttpSettings, HttpTarget
from shoal.deployments.bench.offline_target import OfflineTarget
from shoal.deployments.bench.prompts import Ruler
from shoal.deployments.bench.render import ProgressWatcher
from shoal.deployments.bench.results import dump_results
from shoal.deployments.bench.session import Plan, Session
from shoal.deployments.bench.target import Target
from shoal.deployments.bench.workloads import Workload
from shoal.model_shards.engine.build import build_engine

MODEL = "smollm2-135m"
ENGINES = {"dense": "shoal", "packed": "shoal-packed", "int8": "shoal-int8"}
ONE, MANY = "one stream", "32 streams"


@dataclass(frozen=True)
class Pair:
    """One repetition of one load, both ways. `run`s are as `shoal bench` writes them."""

    weights: str
    load: str
    repetition: int
    alone: dict[str, Any]
    http: dict[str, Any]

    def both(self, path: str) -> tuple[float, float]:
        found = value(self.alone, path), value(self.http, path)
        assert found[0] is not None, path
        assert found[1] is not None, path
        return found[0], found[1]

    def added(self, path: str) -> float:
        alone, http = self.both(path)
        return http - alone

    def share(self, path: str) -> float:
        alone, http = self.both(path)
        return http / alone


def loads(scale: float) -> list[Workload]:
    return [
        Workload(ONE, "", max(1, round(4 * scale)), 128, 128),
        Workload(MANY, "", max(32, round(64 * scale)), 128, 128, concurrency=32),
    ]


async def compare(weights: str, args: argparse.Namespace, watcher: ProgressWatcher) -> list[Pair]:
    """All repetitions for one kind of weights."""
    port, log = args.port, Path(tempfile.mkdtemp(prefix="graph-cost-")) / "server.log"
    entry = catalogue(args.shoal_args.split())[ENGINES[weights]]
    server = Server(weights, entry.start(Path("."), port, args.threads), port, log)
    try:
        server.wait_for_first_token()
        server.sleep()
        config = {"model": MODEL, "weights": weights, "num_threads": args.threads, "kv_cache_memory": KV_CACHE}
        engine = await asyncio.to_thread(build_engine, parse_engine_config(config))
        engine.start()
        async with OfflineTarget(engine) as alone, HttpTarget(HttpSettings(server.url, MODEL)) as http:
            return await _repeat(weights, args, watcher, alone, http, server)
    finally:
        server.stop()


async def _repeat(
    weights: str, args: argparse.Namespace, watcher: ProgressWatcher, alone: Target, http: Target, server: Server
) -> list[Pair]:
    ruler, pairs = await alone.ruler(), []
    for repetition in range(args.repetitions):
        for load in loads(args.scale):
            found: dict[str, dict[str, Any]] = {}
            for how in ("alone", "http") if repetition % 2 == 0 else ("http", "alone"):
                if how == "http":
                    server.wake()
                target, pid = (alone, None) if how == "alone" else (http, server.pid)
                found[how] = await _measure(target, ruler, watcher, load, repetition, pid)
                server.sleep()
            pairs.append(Pair(weights, load.name, repetition, **found))
            rates = " and ".join(f"{rate:.1f}" for rate in pairs[-1].both("output_tokens_per_s"))
            print(f"{weights} {load.name} #{repetition + 1}: {rates} tokens/s", flush=True)
    return pairs


async def _measure(
    target: Target, ruler: Ruler, watcher: ProgressWatcher, load: Workload, repetition: int, pid: int | None
) -> dict[str, Any]:
    plan = Plan([load], seed=f"graph-cost/{repetition}", warm_up=2, server_pid=pid)
    answer = await Session(target, ruler, watcher).run(plan, lambda _: None)
    run: dict[str, Any] = answer.to_json()["runs"][0]
    if run["errors"]:
        raise SystemExit(f"{target.label}: {run['first_error']}")
    return run


def report(pairs: list[Pair]) -> None:
    """min / median / max over the repetitions."""
    kinds = list(dict.fromkeys(pair.weights for pair in pairs))
    one = {kind: [p for p in pairs if p.weights == kind and p.load == ONE] for kind in kinds}
    many = {kind: [p for p in pairs if p.weights == kind and p.load == MANY] for kind in kinds}

    def row(title: str, group: dict[str, list[Pair]], figure: Callable[[Pair], float], form: str) -> list[str]:
        cells = [spread((figure(pair) for pair in group[kind]), lambda x: format(x, form)) for kind in kinds]
        return [title, *cells]

    rate, ttft, tpot, itl = "output_tokens_per_s", "ttft_ms.p50", "tpot_ms.p50", "itl_ms.p99"
    print("\nmin / median / max over the repetitions\n")
    table(
        ["", *kinds],
        [
            row("32 streams: tokens/s, engine alone", many, lambda p: p.both(rate)[0], ".1f"),
            row("32 streams: tokens/s over HTTP", many, lambda p: p.both(rate)[1], ".1f"),
            row("32 streams: HTTP's share (aim: >= 90 %)", many, lambda p: p.share(rate), ".1%"),
            row("32 streams: added ITL p99, ms", many, lambda p: p.added(itl), ".1f"),
            row("1 stream: TTFT, engine alone, ms", one, lambda p: p.both(ttft)[0], ".1f"),
            row("1 stream: added TTFT, ms (aim: <= 10)", one, lambda p: p.added(ttft), ".1f"),
            row("1 stream: TPOT, engine alone, ms", one, lambda p: p.both(tpot)[0], ".2f"),
            row("1 stream: added TPOT, ms", one, lambda p: p.added(tpot), ".2f"),
            row("others' CPU over HTTP, 32 streams", many, lambda p: p.http["cpu"]["foreign"] or 0.0, ".1%"),
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", default="dense,packed", help=", ".join(ENGINES))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="times 4 and 64 requests")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--port", type=int, default=18200)
    parser.add_argument("--shoal-args", default="", help="more arguments for `shoal serve`")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    pairs: list[Pair] = []
    with ProgressWatcher(Console(stderr=True)) as watcher:
        for weights in args.weights.split(","):
            pairs += asyncio.run(compare(weights, args, watcher))
            if args.json is not None:
                args.json.write_text(dump_results({"pairs": [asdict(pair) for pair in pairs]}))
    report(pairs)


if __name__ == "__main__":
    main()
