"""What a bound on the time of a step does to latencies and rates, on simulated machines: the real scheduler, no model.

    python tests/benchmarks/scheduling.py [--targets 0,60,80,100] [--noise 0.05] [--stages 2,4]

W1 to W6 are the workloads of `shoal bench`; a 128-token prompt of theirs has 168 with its template. Machines: bf16 is
what docs/benchmarks.md measured for SmolLM2-135M on two cores, 4bit the same with packed weights. With `--stages` they
are pipelines instead (each stage takes its part of a step's time), with 1 to p + 1 micro-batches and a host that takes
a millisecond.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "model_shards" / "engine"))

from simulation import BF16, FOUR_BIT, Client, Machine, Simulation, closed_loop, percentile, prompts

TTFT_S, TPOT_S = 0.5, 0.05
"""Service levels of W6."""
CAPACITY = {"bf16": 1.7, "4bit": 3.6}
"""Requests a second that W3 sustains."""


def closed(streams: int, requests: int) -> Callable[[Simulation, str], None]:
    def run(simulation: Simulation, _machine: str) -> None:
        closed_loop(simulation, streams, requests, 168, 128, "")
        simulation.run()

    return run


def shared_prefix(simulation: Simulation, _machine: str) -> None:
    make = next(prompts())
    system = make(1024)
    for _ in range(8):
        simulation.submit(system + make(64), 64)
    simulation.run()


def beside_long_prompts(simulation: Simulation, _machine: str) -> None:
    closed_loop(simulation, 2, 1000, 4096, 32, "long")
    closed_loop(simulation, 4, 10_000, 104, 64, "")
    simulation.run(until=60.0)


def poisson(share: float) -> Callable[[Simulation, str], None]:
    def run(simulation: Simulation, machine: str) -> None:
        rng, make, now = random.Random(1), next(prompts()), 0.0
        for _ in range(180):
            now += rng.expovariate(share * CAPACITY[machine])
            simulation.submit(make(168), 128, at=now)
        simulation.run()

    return run


WORKLOADS: dict[str, Callable[[Simulation, str], None]] = {
    "W1": closed(1, 3),
    "W2": closed(8, 24),
    "W3": closed(32, 64),
    "W4, burst": shared_prefix,
    "W5": beside_long_prompts,
    "W6@50%": poisson(0.5),
    "W6@80%": poisson(0.8),
}


def row(clients: Iterable[Client], duration: float) -> list[str]:
    started = [client for client in clients if client.times]
    ttfts, gaps = [client.ttft for client in started], [gap for client in started for gap in client.gaps]
    good = [client.ttft <= TTFT_S and client.tpot <= TPOT_S for client in started]
    cells = [sum(len(client.times) for client in started) / duration]
    cells += [1e3 * percentile(ttfts, share) for share in (0.5, 0.99)]
    cells += [1e3 * percentile(gaps, share) for share in (0.5, 0.99)]
    return [*(f"{cell:,.0f}" for cell in cells), f"{sum(good) / len(good):.0%}"]


def pipelines(stages: list[int], noise: float) -> None:
    print("| stages | micro-batches | streams | stages busy | tokens/s | TTFT p50 | p99 | ITL p50 | p99 | good |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for count in stages:
        for streams in (1, 8, 32):
            for micro_batches in range(1, count + 2):
                simulation = Simulation(
                    replace(BF16, noise=noise), target_s=0.08 / micro_batches, stages=count, host_s=0.001,
                    micro_batches=micro_batches, max_num_batched_tokens=256,
                )  # fmt: skip
                closed_loop(simulation, streams, 3 * streams, 168, 128, "")
                simulation.run()
                cells = row(simulation.clients.values(), simulation.now)
                busy = f"{simulation.utilisation:.0%}"
                print(f"| {count} | {micro_batches} | {streams} | {busy} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="0,60,80,100", help="target_itl_ms of the columns; 0: no bound")
    parser.add_argument("--noise", type=float, default=0.05, help="mean share by which steps take longer")
    parser.add_argument("--stages", default="", help="pipelines of so many stages, each")
    arguments = parser.parse_args()
    if arguments.stages:
        return pipelines([int(text) for text in arguments.stages.split(",")], arguments.noise)
    machines: dict[str, Machine] = {"bf16": BF16, "4bit": FOUR_BIT}
    print("| machine | workload | target | tokens/s | TTFT p50 | p99 | ITL p50 | p99 | good |")
    print("|---|---|---|---|---|---|---|---|---|")
    for machine, speed in machines.items():
        for name, run in WORKLOADS.items():
            for target in (float(text) for text in arguments.targets.split(",")):
                options: dict[str, Any] = {"max_num_batched_tokens": 256, "target_s": target / 1e3 or None}
                simulation = Simulation(replace(speed, noise=arguments.noise), **options)
                run(simulation, machine)
                for label in dict.fromkeys(client.label for client in simulation.clients.values()):
                    clients = [client for client in simulation.clients.values() if client.label == label]
                    cells = row(clients, simulation.now)
                    print(f"| {machine} | {name} {label} | {target:g} ms | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
