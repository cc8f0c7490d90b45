"""Shoal beside other engines: the same requests, the same machine, taken in turns.

    python tests/benchmarks/peers.py --root ROOT --engines shoal,shoal-packed,llamacpp-q4,vllm-f32 --json peers.json
    python tests/benchmarks/peers.py --root ROOT --resume peers.json ...    goes on where a run was broken off
    python tests/benchmarks/peers.py --report peers.json [--quiet-only]     the tables again
    shoal bench --plot DIR --from peers.json                                figures of it

For each repetition and workload every engine gets the byte-identical requests in turn (the order rotates), because the
memory bandwidth of a shared machine changes from hour to hour: only ratios within a repetition count. Every server is
started once; those that are not at work are put to sleep (`--idle sleep`: SIGSTOP), left idle (`--idle run`), or only
one is up at a time (`--idle stop`: each is started again for every repetition). `foreign` is the share of the machine
used by anyone but the server at work and this client; runs where it is above 0.05 are marked, with who it was.

Workloads are those of `shoal bench`, and `same`: Poisson arrivals at 80 % of what the slowest engine sustained in W3,
and at 80 % of what the first did, for all alike (W6 itself is at 50 % and 80 % of each engine's own). `W3:0.5` halves
the requests of one workload, `--scale` those of all; `vllm-f32-512:W4+W5` is an engine for some workloads only, such as
a setting of a peer that is its best for these.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import roofline
from contest import (
    Forecast,
    Turn,
    capacities,
    choose,
    compared_at_one_rate,
    make_turns,
    parse_presets,
    workloads_of,
)
from engines import Entry, catalogue
from peers_report import NOISY, report
from rich.console import Console
from servers import Server

from shoal.configs.errors import ConfigError
from shoal.deployments.bench.http_target import HttpSettings, HttpTarget
from shoal.deployments.bench.prompts import Ruler
from shoal.deployments.bench.render import ProgressWatcher
from shoal.deployments.bench.results import dump_results
from shoal.deployments.bench.rulers import local_ruler
from shoal.deployments.bench.session import Plan, Session
from shoal.deployments.bench.summary import Objective

OBJECTIVE = Objective(ttft_ms=500, tpot_ms=50)
PORTS_APART = 20
"""A server may take neighbours of its port."""


class Contest:
    """Plays the turns that `document` does not hold yet, and writes it after each."""

    def __init__(self, args: argparse.Namespace, entries: dict[str, Entry], document: dict[str, Any]) -> None:
        self.args, self.entries, self.document = args, entries, document
        self.presets = parse_presets(args.workloads, args.scale)
        self.one_up = args.idle == "stop"
        done = {(run["repetition"], run["preset"], run["engine"]) for run in document["runs"]}
        turns = make_turns(entries, list(self.presets), args.repetitions, one_up=self.one_up)
        self.turns = [turn for turn in turns if turn.key not in done]
        self.forecast = Forecast(entries, self.presets)
        self.up: dict[str, Server] = {}
        self._failed: set[str] = set()
        self._logs = Path(tempfile.mkdtemp(prefix="peers-"))
        self._limits_for: tuple[object, ...] = ()

    def announce(self) -> None:
        starts = self.forecast.starts(self.turns, one_up=self.one_up)
        each = dict.fromkeys(self.entries, 0.0)
        for turn in self.turns:
            each[turn.engine] += self.forecast.turn(turn)
        total = (sum(each.values()) + starts) / 60
        print(f"{len(self.turns)} turns, about {total:.0f} minutes, of which starting servers {starts / 60:.0f}")
        print("  " + ", ".join(f"{name} {seconds / 60:.1f}" for name, seconds in each.items()), flush=True)

    async def play(self) -> None:
        ruler = await local_ruler(self.args.tokenizer)
        with ProgressWatcher(Console(stderr=True)) as watcher:
            if not self.one_up:
                for name in dict.fromkeys(turn.engine for turn in self.turns):
                    self._start(name)
            for number, turn in enumerate(self.turns):
                if turn.engine in self._failed:
                    continue
                self._measure_limits(turn)
                await self._turn(turn, ruler, watcher)
                left = sum(map(self.forecast.turn, self.turns[number + 1 :]))
                print(f"  [{number + 1}/{len(self.turns)}, about {left / 60:.0f} minutes left]", flush=True)

    def stop(self) -> None:
        for name in list(self.up):
            self.up.pop(name).stop()

    def save(self) -> None:
        """A whole file or the old one, whenever this is interrupted."""
        path: Path = self.args.json
        half = path.with_suffix(".part")
        half.write_text(dump_results(self.document))
        half.replace(path)

    # --- one turn ---------------------------------------------------------------------------------------------------

    async def _turn(self, turn: Turn, ruler: Ruler, watcher: ProgressWatcher) -> None:
        workloads = workloads_of(
            turn.preset,
            self.presets[turn.preset],
            capacities(self.document["runs"]),
            compared_at_one_rate(self.entries),
        )
        if workloads is None:
            print(f"{turn.engine:<20} {turn.preset}: left out, the W3 of every engine must come first", flush=True)
            return
        server = self._server(turn.engine)
        if server is None:
            return
        began = time.perf_counter()
        server.wake()
        plan = Plan(
            workloads,
            seed=f"peers/{turn.repetition}",
            objective=OBJECTIVE,
            # A server that slept also has to find its memory and its timers again.
            warm_up=0 if self.args.idle == "run" and turn.repetition > 0 else 2,
            capacity=capacities(self.document["runs"]).get(turn.engine),
            server_pid=server.pid,
        )
        settings = HttpSettings(server.url, server.engine.model, extra_body=server.engine.extra_body)
        try:
            async with HttpTarget(settings) as target:
                answer = await Session(target, ruler, watcher).run(plan, lambda _: None)
        except ConfigError as error:
            self._fail(turn.engine, f"{turn.preset}: {error.message}")
            return
        if self.args.idle == "sleep":
            server.sleep()
        self.forecast.took(turn, time.perf_counter() - began)
        for run in answer.to_json()["runs"]:
            extra = {"engine": turn.engine, "preset": turn.preset, "limits": len(self.document["limits"]) - 1}
            self.document["runs"].append({**run, **extra, "repetition": turn.repetition})
            _print_run(self.document["runs"][-1])
        self.save()

    def _server(self, name: str) -> Server | None:
        """Up; with `--idle stop` the only one that is."""
        if name not in self.up and self.one_up:
            self.stop()
            self._start(name)
        return self.up.get(name)

    def _start(self, name: str) -> None:
        port = self.args.port + PORTS_APART * list(self.entries).index(name)
        engine = self.entries[name].start(self.args.root, port, self.args.threads)
        server = Server(name, engine, port, self._logs / f"{name}.log")
        self.up[name] = server
        try:
            server.wait_for_first_token()
        except SystemExit as error:
            self._fail(name, str(error))
            return
        memory = server.idle_memory
        about = self.document["engines"].setdefault(name, {"startups_s": [], "bits": self.entries[name].bits})
        about["startups_s"].append(server.startup_s)
        about["idle"] = memory.to_json() if memory is not None else None
        about["weight_bytes"], about["kv_bytes_per_token"] = engine.weight_bytes, engine.kv_bytes_per_token
        taken = f", {memory.pss_mb:.0f} MB" if memory is not None else ""
        print(f"{name} is up after {server.startup_s:.1f} s{taken}", flush=True)
        if self.args.idle == "sleep":
            server.sleep()

    def _fail(self, name: str, reason: str) -> None:
        """The others go on; what is missing can be measured later with --resume."""
        print(f"{name} FAILED: {reason}", flush=True)
        self.document["failures"].append({"engine": name, "reason": reason})
        self._failed.add(name)
        server = self.up.pop(name, None)
        if server is not None:
            server.stop()
        self.save()

    def _measure_limits(self, turn: Turn) -> None:
        """What the machine gives changes too: anew for every round of engines, or for each start."""
        current = (turn.repetition, turn.engine if self.one_up else turn.preset)
        if current != self._limits_for:
            self._limits_for = current
            limits = roofline.measure([94 << 20, 256 << 20, 512 << 20], self.args.threads)
            self.document["limits"].append(limits.to_json())
            print(f"limits of this machine now: {json.dumps(limits.to_json())}", flush=True)


def _print_run(run: dict[str, Any]) -> None:
    foreign = run["cpu"]["foreign"]
    who = f" NOISY: {run['cpu']['foreign_by']}" if foreign is not None and foreign > NOISY else ""
    cpu = f"client {run['cpu']['client']:.1%}  foreign {foreign}{who}"
    rate = f"{run['output_tokens_per_s']:8.1f} tok/s  errors {run['errors']}  early {run['early_stops']}"
    print(f"{run['engine']:<20} {run['workload']:<10} #{run['repetition'] + 1}  {rate}  {cpu}", flush=True)


def load_document(args: argparse.Namespace) -> dict[str, Any]:
    settings = {"scale": args.scale, "threads": args.threads, "shoal_args": args.shoal_args}
    if args.resume is None:
        started = time.strftime("%Y-%m-%dT%H:%M:%S")
        return {"started": started, "settings": settings, "engines": {}, "limits": [], "failures": [], "runs": []}
    document: dict[str, Any] = json.loads(args.resume.read_text())
    if document["settings"] != settings:
        sys.exit(f"{args.resume} was measured with {document['settings']}; go on with the same, not {settings}")
    args.json = args.json or args.resume
    return document


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("."), help="folder with the peers' venvs/ and models/")
    parser.add_argument(
        "--engines", default="shoal,llamacpp-q4,vllm-f32", help=f"{', '.join(catalogue([]))}; each NAME or NAME:W4+W5"
    )
    parser.add_argument("--workloads", default="W1,W2,W3,W4,W5,W6", help="W1 ... W6, same; each NAME or NAME:SCALE")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="times the workloads' numbers of requests")
    parser.add_argument(
        "--idle", choices=["sleep", "run", "stop"], default="sleep", help="those not at work (see above)"
    )
    parser.add_argument("--isolate", dest="idle", action="store_const", const="stop", help="the same as --idle stop")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--port", type=int, default=18300)
    parser.add_argument("--shoal-args", default="", help="more arguments for `shoal serve`")
    parser.add_argument("--tokenizer", default="smollm2-135m", help="measures the prompts, once for all engines")
    parser.add_argument("--json", type=Path, help="written after every turn (default: peers.json)")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on with these results, and keep them")
    parser.add_argument("--report", type=Path, metavar="FILE", help="measure nothing, print the tables of this")
    parser.add_argument("--quiet-only", action="store_true", help="tables without runs that others disturbed")
    parser.add_argument("--estimate", action="store_true", help="say how long it would take, and end")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse_arguments()
    if args.report is not None:
        return report(json.loads(args.report.read_text()), quiet_only=args.quiet_only)
    entries = choose(catalogue(args.shoal_args.split()), args.engines)
    document = load_document(args)
    args.json = args.json or Path("peers.json")
    contest = Contest(args, entries, document)
    contest.announce()
    if args.estimate:
        return None
    # A terminated comparison must not leave servers behind: the `finally` below runs for an exit, not for a signal.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    try:
        asyncio.run(contest.play())
    finally:
        contest.stop()
    report(document, quiet_only=args.quiet_only)
    print(f"\nwrote {args.json}")
    return None


if __name__ == "__main__":
    main()
