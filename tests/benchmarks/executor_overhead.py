"""What a step costs beside the model: CPU time of messages and synchronisation, for each executor and number of ranks.

    python tests/benchmarks/executor_overhead.py [--steps 2000] [--sequences 32] [--executors local,processes,ray]

The ranks are real, their model runner is not: it computes nothing. A step is a decode of `--sequences` sequences; its
plan travels to every rank, the sampled ids travel from the sampling rank to the others (gloo, as in a real step), and
its output travels back. Steps are submitted one after the other, each when the one before it is done: nothing is hidden
by overlap. CPU time is that of all threads of a process, from /proc (a clock of 10 ms, so take thousands of steps);
`engine` is the process that submits, `rank` the mean of the others. With LocalExecutor both are one process.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shoal.model_shards.engine.plan import ScheduledChunk, StepOutput, StepPlan
from shoal.model_shards.executor import local, multiprocess
from shoal.model_shards.executor import rank as rank_program
from shoal.model_shards.executor.base import Executor
from shoal.model_shards.executor.channel import Channel
from shoal.model_shards.models.config import ModelConfig
from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.runner.settings import RunnerSettings
from shoal.model_shards.runner.step_clock import StepClock
from shoal.model_shards.weights.open import open_checkpoint
from shoal.model_shards.weights.sources import ModelSource

TESTS = Path(__file__).resolve().parents[1]
TICKS = os.sysconf("SC_CLK_TCK")
WORLDS = (1, 2, 4)
WARM_UP_STEPS = 200


class IdleRunner:
    """Stands in for ModelRunner."""

    config: ModelConfig

    def __init__(self, settings: RunnerSettings, context: ParallelContext) -> None:
        self.config = open_checkpoint(settings.model).config
        self.samples = context.position.samples
        self.clock = StepClock()
        self._context = context

    def execute(self, plan: StepPlan) -> StepOutput:
        with self.clock.step():
            return self._step(plan)

    def _step(self, plan: StepPlan) -> StepOutput:
        count = len(plan.chunks)
        tokens = [0] * count
        if self._context.position.world_size > 1:
            if self.samples:
                self._context.send_tokens(tokens)
            else:
                tokens = self._context.receive_tokens(count)
        if not self.samples:
            return StepOutput(plan.step_id)
        return StepOutput(plan.step_id, [chunk.seq_id for chunk in plan.chunks], tokens, tokens, [None] * count)


def use_idle_runner() -> None:
    local.ModelRunner = IdleRunner  # type: ignore[assignment,misc]
    rank_program.ModelRunner = IdleRunner  # type: ignore[assignment,misc]


class IdleProcesses(multiprocess.MultiprocessExecutor):
    """Its ranks are this program."""

    def _start_rank(self, settings: RunnerSettings, rank: int) -> Any:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, __file__, "--rank", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            )
        channel = Channel(ours)
        rendezvous = f"file://{self._directory / 'rendezvous'}"
        channel.send("start", rank, settings.to_wire(), rendezvous, self._step_timeout_s)
        return multiprocess._Rank(process, channel)


@dataclass(frozen=True)
class Subject:
    executor: Executor
    rank_pids: list[int]
    """Empty when the rank is in this process."""
    after: Callable[[], None] = lambda: None
    """To be called when the executor is closed."""


def cpu_ms(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / TICKS


def measure(subject: Subject, steps: int, sequences: int) -> tuple[float, float, float]:
    """Milliseconds a step: CPU of this process, CPU of a rank (mean), wall."""
    chunks = [ScheduledChunk(seq_id, 1000, 1, [], True) for seq_id in range(sequences)]

    def run(first: int, count: int) -> None:
        for step_id in range(first, first + count):
            output = subject.executor.submit(StepPlan(step_id, chunks=chunks)).result(60)
            assert len(output.token_ids) == sequences

    run(0, WARM_UP_STEPS)
    pids = [os.getpid(), *subject.rank_pids]
    before, began = [cpu_ms(pid) for pid in pids], time.monotonic()
    run(WARM_UP_STEPS, steps)
    wall = (time.monotonic() - began) * 1000 / steps
    used = [(cpu_ms(pid) - start) / steps for pid, start in zip(pids, before, strict=True)]
    ranks = used[1:]
    return used[0], sum(ranks) / len(ranks) if ranks else 0.0, wall


def local_subject(settings: RunnerSettings) -> Subject:
    return Subject(local.LocalExecutor(settings), [])


def process_subject(settings: RunnerSettings) -> Subject:
    executor = IdleProcesses(settings)
    return Subject(executor, [rank.process.pid for rank in executor._ranks])


def ray_subject(settings: RunnerSettings) -> Subject:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    from shoal.configs.app import PlacementConfig
    from shoal.deployments import ray_executor
    from shoal.deployments.placement import plan_placement
    from shoal.deployments.rank_actor import RankActor

    class IdleActor(RankActor):
        def run(self, orders: Any) -> None:
            use_idle_runner()
            super().run(orders)

    ray_executor.RankActor = IdleActor  # type: ignore[misc]
    placement = plan_placement(settings.mesh, PlacementConfig(cpus_per_rank=0.25), "cpu")
    group = placement_group([bundle.to_ray() for bundle in placement.bundles], placement.strategy)
    ray.get(group.ready(), timeout=60)
    ranks = ray_executor.RayRanks(group, placement, str(settings.model.path))
    pids = [introduction.pid for introduction in ranks._ranks]
    return Subject(ranks.start(settings, 120.0), pids, lambda: remove_placement_group(group))


def tiny_settings(directory: Path) -> RunnerSettings:
    spec = importlib.util.spec_from_file_location("tiny_models", TESTS / "model_shards" / "weights" / "tiny_models.py")
    assert spec is not None
    assert spec.loader is not None
    tiny_models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny_models)
    path = tiny_models.make_tiny_checkpoint("llama", directory)
    return RunnerSettings(
        ModelSource("tiny", "safetensors", path), "cpu", torch.float32, torch.float32, 16, 64, 512, 64, 2048,
        num_threads=1,
    )  # fmt: skip


def report(name: str, make: Callable[[RunnerSettings], Subject], settings: RunnerSettings, args: Any) -> None:
    for world in (1,) if make is local_subject else WORLDS:
        subject = make(replace(settings, tensor_parallel_size=world))
        try:
            engine, rank, wall = measure(subject, args.steps, args.sequences)
        finally:
            subject.executor.close()
            subject.after()
        each = (engine + world * rank) / world
        print(f"{name:<22}{world:>6}{engine:>12.3f}{rank:>10.3f}{each:>20.3f}{wall:>10.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--executors", default="local,processes,ray")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    use_idle_runner()
    if args.rank is not None:
        os._exit(rank_program.main(args.rank))
    chosen = args.executors.split(",")
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = tiny_settings(directory)
        print(f"{args.steps} steps of {args.sequences} sequences; milliseconds a step")
        print(f"{'executor':<22}{'ranks':>6}{'engine CPU':>12}{'rank CPU':>10}{'CPU/step and rank':>20}{'wall':>10}")
        if "local" in chosen:
            report("LocalExecutor", local_subject, settings, args)
        if "processes" in chosen:
            report("MultiprocessExecutor", process_subject, settings, args)
        if "ray" in chosen:
            from shoal.deployments.local_cluster import ClusterOptions, LocalCluster

            cluster = LocalCluster(ClusterOptions(num_cpus=4))
            stack.callback(cluster.stop)
            cluster.start()
            report("RayExecutor", ray_subject, settings, args)


if __name__ == "__main__":
    main()
