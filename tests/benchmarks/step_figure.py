"""Where a step of the engine goes, as a flame graph on its side: every part of it, Python and native, of both threads.

    python tests/benchmarks/step_figure.py [--batch 1 8 32] [--mixed 8] [--weights dense] [--plot DIR] [--json FILE]

The engine runs in this process and decodes `--batch` sequences, then `--mixed` sequences beside prompts of 2,048
tokens. Functions of the step are timed where they stand, and the native calls of a step one by one (a program is
replayed call by call; what reading the clock costs is taken off). Bars are means over the steps of one kind, the
slowest tenth left out, so that the parts of a bar add up to it. `engine thread` is what planning the next step and
delivering the last one take; it runs while the step is computed, except for what the compute thread is seen to wait.

For figures of one operator, with CPU time of one thread: `step_profile.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from peers_report import table
from step_profile import Profiler

from shoal.configs.schema import parse_engine_config
from shoal.deployments.bench.figures import COLOURS, house_style, panels, require_matplotlib, save
from shoal.deployments.bench.offline_target import OfflineTarget
from shoal.deployments.bench.prompts import PlannedRequest, PromptMaker
from shoal.deployments.bench.rulers import local_ruler
from shoal.deployments.bench.workloads import Workload
from shoal.kernels.cpu.program import CpuProgram
from shoal.model_shards.engine.build import build_engine
from shoal.model_shards.engine.output import OutputProcessor
from shoal.model_shards.engine.plan import StepPlan
from shoal.model_shards.engine.scheduler import Scheduler
from shoal.model_shards.models.decoder import Decoder
from shoal.model_shards.runner import model_runner
from shoal.model_shards.runner.model_runner import ModelRunner
from shoal.model_shards.runner.step_capture import StepCapture
from shoal.model_shards.sampling.sampler import Sampler

MODEL = "smollm2-135m"
KEPT = 0.9
"""Share of the steps that are looked at, from the fastest."""
WAITING = "waiting for a plan"
OWN = "Python"
"""What no part of a function explains."""
PRODUCTS, ATTENTION, SMALL, PYTHON, ENGINE, IDLE = (*COLOURS[:5], "#DDDDDD")
WHOLE = "#AAAAAA"
"""Of what has parts of its own, which are drawn below it."""

Path_ = tuple[str, ...]
"""From the step down to a part of it."""

COMPUTE_SPANS: list[tuple[Any, str, str]] = [
    (model_runner, "build_batch", "build batch"),
    (StepCapture, "run", "program"),
    (Decoder, "forward", "model"),
    (Decoder, "logits", "logits"),
    (Sampler, "sample", "sample"),
]
ENGINE_SPANS: list[tuple[Any, str, str]] = [
    (Scheduler, "schedule", "schedule"),
    (Scheduler, "commit", "commit"),
    (OutputProcessor, "process", "text and delivery"),
]


@dataclass
class Step:
    """One executed step. Seconds by path; the path () is the whole, from the end of the step before."""

    decodes: int
    prompt_tokens: int
    began: float
    seconds: dict[Path_, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def records(self) -> bool:
        """Whether its size came a second time and it was made a program, as happens once."""
        return ("program", "model") in self.seconds


class Tracer:
    """Times functions by where they are called from, on each thread by itself."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.engine: dict[str, list[tuple[float, float]]] = defaultdict(list)
        """Name -> (when, seconds) on the engine's thread."""
        self._stack: list[str] = []
        self._compute: int | None = None
        self._last_end = 0.0

    def execute(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(runner: ModelRunner, plan: StepPlan) -> Any:
            began = time.perf_counter()
            self._compute, self._stack = threading.get_ident(), []
            prompt = sum(chunk.num_tokens for chunk in plan.chunks if chunk.num_tokens > 1)
            step = Step(sum(chunk.num_tokens == 1 for chunk in plan.chunks), prompt, began)
            self.steps.append(step)
            result = original(runner, plan)
            ended = time.perf_counter()
            step.seconds[(WAITING,)] = began - (self._last_end or began)
            step.seconds[()] = ended - (self._last_end or began)
            self._last_end = ended
            return result

        return timed

    def span(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def timed(*arguments: Any, **named: Any) -> Any:
            if threading.get_ident() != self._compute:
                began = time.perf_counter()
                result = original(*arguments, **named)
                self.engine[name].append((began, time.perf_counter() - began))
                return result
            self._stack.append(name)
            began = time.perf_counter()
            try:
                return original(*arguments, **named)
            finally:
                self.add(tuple(self._stack), time.perf_counter() - began)
                self._stack.pop()

        return timed

    def add(self, path: Path_, seconds: float) -> None:
        self.steps[-1].seconds[path] += seconds

    def replay(self, profiler: Profiler, program: CpuProgram[Any]) -> Any:
        """By calls, each a part of whatever is on the stack."""
        profiler.parts.clear()
        result = profiler.replay(program)
        for name, seconds in profiler.parts.items():
            self.add((*self._stack, name), max(0.0, seconds))
        return result


@contextmanager
def traced(runner: ModelRunner, tracer: Tracer) -> Iterator[None]:
    native = runner.model.ops._native  # type: ignore[attr-defined]
    profiler = Profiler(runner, time.perf_counter)
    with ExitStack() as stack:
        for owner, attribute, name in [*COMPUTE_SPANS, *ENGINE_SPANS]:
            timed = tracer.span(name, getattr(owner, attribute))
            stack.enter_context(mock.patch.object(owner, attribute, timed))
        for name in native.signatures:  # steps that are no program
            if name != "run_program":
                stack.enter_context(mock.patch.object(native, name, tracer.span(name, getattr(native, name))))
        stack.enter_context(mock.patch.object(ModelRunner, "execute", tracer.execute(ModelRunner.execute)))
        replay = functools.partial(tracer.replay, profiler)
        stack.enter_context(mock.patch.object(CpuProgram, "replay", lambda program: replay(program)))
        yield


# --- measuring ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Profile:
    """The mean step of one kind, in ms."""

    title: str
    steps: int
    tokens: float
    parts: dict[Path_, float]
    engine: dict[str, float]
    """Of the engine's thread, for each step."""

    def children(self, path: Path_) -> list[Path_]:
        found = [p for p in self.parts if len(p) == len(path) + 1 and p[: len(path)] == path]
        return sorted(found, key=lambda p: (p[-1] == WAITING, -self.parts[p]))

    def own(self, path: Path_) -> float:
        """What no part of it explains: its Python."""
        return max(0.0, self.parts[path] - sum(self.parts[p] for p in self.children(path)))


def mean_step(title: str, steps: Sequence[Step], tracer: Tracer) -> Profile:
    settled = [step for step in steps if not step.records]
    kept = sorted(settled, key=lambda step: step.seconds[()])[: max(1, round(KEPT * len(settled)))]
    paths = {path for step in kept for path in step.seconds}
    first, last = min(step.began for step in steps), max(step.began for step in steps)
    engine = {
        name: 1e3 * sum(seconds for at, seconds in calls if first <= at <= last) / len(steps)
        for name, calls in tracer.engine.items()
    }
    return Profile(
        title,
        len(kept),
        statistics.mean(step.decodes + step.prompt_tokens for step in kept),
        {path: 1e3 * statistics.mean(step.seconds.get(path, 0.0) for step in kept) for path in paths},
        engine,
    )


async def find_runner(target: OfflineTarget) -> ModelRunner:
    """Whoever executes the steps of a first request."""
    seen: list[ModelRunner] = []
    original = ModelRunner.execute

    def execute(runner: ModelRunner, plan: StepPlan) -> Any:
        seen.append(runner)
        return original(runner, plan)

    with mock.patch.object(ModelRunner, "execute", execute):
        await target.send(PlannedRequest([{"role": "user", "content": "warm up"}], 8))
    return seen[0]


async def profile_decodes(
    target: OfflineTarget, maker: PromptMaker, runner: ModelRunner, batch: int, steps: int
) -> Profile:
    shape = Workload("decode", "", batch, 64, steps + 16, concurrency=batch)
    requests = await maker.requests(shape)
    tracer = Tracer()
    with traced(runner, tracer):
        await asyncio.gather(*(target.send(request) for request in requests))
    found = [step for step in tracer.steps if step.decodes == batch and not step.prompt_tokens]
    return mean_step(f"{batch} sequence{'s' if batch > 1 else ''} decode", found[4:], tracer)


async def profile_mixed(
    target: OfflineTarget, maker: PromptMaker, runner: ModelRunner, batch: int, steps: int
) -> Profile:
    """Decodes that last, beside long prompts."""
    shorts = await maker.requests(Workload("short", "", batch, 64, 4 * steps + 64))
    longs = await maker.requests(Workload("long", "", 2, 2048, 2))
    tracer = Tracer()
    with traced(runner, tracer):
        running = [asyncio.create_task(target.send(request)) for request in shorts]
        await asyncio.sleep(0.5)
        for request in longs:
            await target.send(request)
        await asyncio.gather(*running)
    found = [step for step in tracer.steps if step.decodes >= batch and step.prompt_tokens >= 8]
    return mean_step(f"{batch} decode beside a piece of a long prompt", found[2:], tracer)


async def measure(args: argparse.Namespace) -> list[Profile]:
    config = {"model": MODEL, "weights": args.weights, "num_threads": args.threads}
    engine = await asyncio.to_thread(build_engine, parse_engine_config(config))
    engine.start()
    async with OfflineTarget(engine) as target:
        maker = PromptMaker(await local_ruler(MODEL), "step-figure")
        runner = await find_runner(target)
        profiles = [await profile_decodes(target, maker, runner, batch, args.steps) for batch in args.batch]
        profiles += [await profile_mixed(target, maker, runner, batch, args.steps) for batch in args.mixed]
    return profiles


# --- showing --------------------------------------------------------------------------------------------------------


def colour(name: str) -> str:
    """Of what has no parts."""
    if name == WAITING:
        return IDLE
    if "linear" in name:
        return PRODUCTS
    if "attention" in name:
        return ATTENTION
    return PYTHON if name == OWN or name in {name for *_, name in COMPUTE_SPANS} else SMALL


def draw(panel: Any, profile: Profile) -> None:
    """The step on top, its parts below, theirs below that; the engine's thread at the bottom."""
    total = profile.parts[()]
    depth = max(len(path) for path in profile.parts)

    def box(left: float, level: int, width: float, name: str, shade: str) -> None:
        panel.barh(-level, width, left=left, height=0.94, color=shade, edgecolor="white", linewidth=0.6)
        label = f"{name} {width:.2f}"
        if len(label) * total / 135 < width:
            ink = "black" if shade in (IDLE, WHOLE, ENGINE) else "white"
            panel.text(left + width / 2, -level, label, ha="center", va="center", color=ink)

    def below(path: Path_, left: float) -> None:
        children = profile.children(path)
        for child in children:
            width, parts = profile.parts[child], profile.children(child)
            box(left, len(child), width, child[-1], WHOLE if parts else colour(child[-1]))
            below(child, left)
            left += width
        if children:
            box(left, len(path) + 1, profile.own(path), OWN, PYTHON)

    box(0.0, 0, total, f"a step of {profile.tokens:.0f} tokens, ms:", WHOLE)
    below((), 0.0)
    left = 0.0
    for name, width in sorted(profile.engine.items(), key=lambda item: -item[1]):
        box(left, depth + 1, width, name, ENGINE)
        left += width
    panel.set_yticks([-1, -(depth + 1)], ["compute thread", "engine thread"])
    panel.set_xlim(0, total)
    panel.set_title(profile.title)
    panel.grid(visible=False)
    panel.set_xlabel("ms")


def plot(profiles: Sequence[Profile], directory: Path, title: str) -> list[Path]:
    with house_style():
        figure, axes = panels(len(profiles), 1, (11.0, 1.9))
        for panel, profile in zip(axes, profiles, strict=True):
            draw(panel, profile)
        names = ("matrix products", "attention", "other native", "Python", "engine thread", "waiting")
        shades = (PRODUCTS, ATTENTION, SMALL, PYTHON, ENGINE, IDLE)
        swatches = [axes[0].bar(0, 0, color=shade) for shade in shades]
        figure.suptitle(title, fontweight="bold", fontsize=11)
        figure.legend(swatches, names, loc="outside lower center", ncols=len(names), frameon=False)
        return save(figure, directory, "step")


def report(profiles: Sequence[Profile]) -> None:
    """Every part, with the Python of those that have parts of their own."""
    rows: list[list[str]] = []
    paths = list(dict.fromkeys(path for profile in profiles for path in _ordered(profile, ())))
    for path in paths:
        name = "  " * len(path) + (path[-1] if path else "step")
        rows.append([name, *(f"{p.parts[path]:.3f}" if path in p.parts else "-" for p in profiles)])
        if any(profile.children(path) for profile in profiles if path in profile.parts):
            own = [f"{profile.own(path):.3f}" if path in profile.parts else "-" for profile in profiles]
            rows.append(["  " * (len(path) + 1) + f"({OWN})", *own])
    for name in dict.fromkeys(name for profile in profiles for name in profile.engine):
        rows.append([f"engine thread: {name}", *(f"{profile.engine.get(name, 0.0):.3f}" for profile in profiles)])
    rows.append(["steps", *(str(profile.steps) for profile in profiles)])
    table(["ms a step", *(profile.title for profile in profiles)], rows)


def _ordered(profile: Profile, path: Path_) -> Iterator[Path_]:
    yield path
    for child in profile.children(path):
        yield from _ordered(profile, child)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--mixed", type=int, nargs="*", default=[8])
    parser.add_argument("--weights", choices=("dense", "packed", "int8"), default="dense")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--plot", type=Path, metavar="DIR")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.plot is not None:
        require_matplotlib()
    profiles = asyncio.run(measure(args))
    report(profiles)
    if args.json is not None:
        found = [{"title": p.title, "ms": {"/".join(k): v for k, v in p.parts.items()}, **p.engine} for p in profiles]
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.plot is not None:
        title = f"A step of the engine: {MODEL}, {args.weights} weights, {args.threads} threads"
        for path in plot(profiles, args.plot, title):
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
