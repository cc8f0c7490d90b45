"""What each idea of serving is worth: one mixed workload, from static batching to everything, one rung at a time.

    python tests/benchmarks/ladder.py [--requests 24] [--repetitions 1] [--rungs 0-10] [--plot DIR] [--json FILE]

The workload is made here from a seed: prompts of 32 to 1,024 tokens and answers of 16 to 192, as uneven as traces are,
a third of them behind one of two common 512-token prompts; all are there from the start. The first rung is what one
writes with transformers: batches of padded prompts in order of arrival, which end when their longest answer does; its
tokens count as delivered when they are computed. The others are Shoal's engine in this process, with `SLOTS` sequences
at once like the batches. A rung switches one thing on and keeps what is below it, by the engine's own settings; only
what the product always does (captured steps, planning a step while another runs) is switched off here, from outside.

What no rung switches: paging itself (without it there would be no continuous batching to begin with), the sampler, and
that Shoal's scheduler never pads.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peers_report import table
from static_batching import StaticBatching

from shoal.configs.schema import parse_engine_config
from shoal.deployments.bench.figures import COLOURS, house_style, panels, require_matplotlib, save
from shoal.deployments.bench.offline_target import OfflineTarget
from shoal.deployments.bench.prompts import PlannedRequest, PromptMaker, Ruler
from shoal.deployments.bench.records import RequestRecord
from shoal.deployments.bench.rulers import LocalRuler, local_ruler
from shoal.deployments.bench.summary import Summary, summarize
from shoal.deployments.bench.workloads import Workload
from shoal.model_shards.engine import build
from shoal.model_shards.engine.engine import EngineSettings
from shoal.model_shards.runner.step_capture import StepCapture

MODEL = "smollm2-135m"
SLOTS = 16
SHARED_TOKENS = 512
WHOLE_PROMPTS = 8192
"""Token budget of a step that takes any prompt whole."""


@dataclass(frozen=True)
class Rung:
    """One step up. `settings` are the engine's; None: no engine at all."""

    name: str
    settings: dict[str, Any] | None
    captured: bool = False
    steps_in_flight: int = 1


def make_rungs() -> list[Rung]:
    torch_only: dict[str, Any] = {
        "dtype": "float32",
        "backend": "torch_cpu",
        "enable_prefix_caching": False,
        "max_num_batched_tokens": WHOLE_PROMPTS,
        "target_itl_ms": 0,
    }
    prefixes = {**torch_only, "enable_prefix_caching": True}
    chunks = {**prefixes, "max_num_batched_tokens": None}
    bounded = {**chunks, "target_itl_ms": None}
    kernels = {**bounded, "backend": None}
    bf16 = {**kernels, "dtype": "bfloat16"}
    return [
        Rung("static batching (transformers, fp32)", None),
        Rung("continuous batching (torch, fp32)", torch_only),
        Rung("+ prefix hits", prefixes),
        Rung("+ chunked prefill", chunks),
        Rung("+ steps bounded in time", bounded),
        Rung("+ own CPU operators, prepacked", kernels),
        Rung("+ captured steps", kernels, captured=True),
        Rung("+ bf16 weights and KV", bf16, captured=True),
        Rung("+ 8-bit weights", {**bf16, "weights": "int8"}, captured=True),
        Rung("+ 4-bit weights", {**bf16, "weights": "packed"}, captured=True),
        Rung("+ overlap", {**bf16, "weights": "packed"}, captured=True, steps_in_flight=2),
    ]


# --- the workload ---------------------------------------------------------------------------------------------------


async def mixed_requests(ruler: Ruler, count: int, seed: str) -> list[PlannedRequest]:
    """The same for the same seed."""
    chance, maker = random.Random(f"ladder/{seed}"), PromptMaker(ruler, f"ladder/{seed}")
    shared = max(2, count // 3)
    behind = Workload("shared", "", shared, 64, 1, shared_prefix_tokens=SHARED_TOKENS, prefixes=2)
    requests = await maker.requests(behind)
    while len(requests) < count:
        length = _clipped(chance.lognormvariate(5.0, 0.9), 32, 1024)
        requests += await maker.requests(Workload("alone", "", 1, length, 1))
    chance.shuffle(requests)
    return [
        replace(request, max_tokens=_clipped(chance.lognormvariate(4.0, 0.8), 16, 192), tag="") for request in requests
    ]


def _clipped(value: float, least: int, most: int) -> int:
    return min(most, max(least, round(value)))


# --- measuring ------------------------------------------------------------------------------------------------------


async def run_engine(rung: Rung, requests: Sequence[PlannedRequest], threads: int) -> tuple[list[RequestRecord], float]:
    assert rung.settings is not None
    config = {"model": MODEL, "num_threads": threads, "max_num_seqs": SLOTS, **rung.settings}
    with switched(rung):
        engine = await asyncio.to_thread(build.build_engine, parse_engine_config(config))
        engine.start()
        async with OfflineTarget(engine) as target:
            warm_up = [PlannedRequest([{"role": "user", "content": f"warm up {i}"}], 12) for i in range(4)]
            await asyncio.gather(*(target.send(request) for request in warm_up))
            start = target.clock()
            records = await asyncio.gather(*(target.send(request, due=start) for request in requests))
    return records, max(record.end for record in records) - start


@contextmanager
def switched(rung: Rung) -> Iterator[None]:
    """Switches off what the product always does."""

    def settings(**values: Any) -> EngineSettings:
        return EngineSettings(**{**values, "steps_in_flight": rung.steps_in_flight})

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(build, "EngineSettings", settings))
        if not rung.captured:
            stack.enter_context(mock.patch.object(StepCapture, "run", return_value=None))
        yield


def run_static(
    requests: Sequence[PlannedRequest], ruler: LocalRuler, threads: int
) -> tuple[list[RequestRecord], float]:
    baseline = StaticBatching(MODEL, threads)
    prompts = [ruler.encode(request.messages) for request in requests]
    baseline.run([(prompts[0][:16], 4)] * 2, SLOTS)
    records = baseline.run([(p, r.max_tokens) for p, r in zip(prompts, requests, strict=True)], SLOTS)
    return records, max(record.end for record in records) - records[0].due


async def climb(rungs: Sequence[Rung], args: argparse.Namespace) -> dict[str, list[Summary]]:
    """Rung -> a summary for each repetition."""
    ruler = await local_ruler(MODEL)
    assert isinstance(ruler, LocalRuler)
    found: dict[str, list[Summary]] = {rung.name: [] for rung in rungs}
    for repetition in range(args.repetitions):
        requests = await mixed_requests(ruler, args.requests, str(repetition))
        for rung in rungs:
            if rung.settings is None:
                records, wall_s = await asyncio.to_thread(run_static, requests, ruler, args.threads)
            else:
                records, wall_s = await run_engine(rung, requests, args.threads)
            gc.collect()
            summary = summarize(records, wall_s)
            if summary.errors or summary.early_stops:
                raise SystemExit(f"{rung.name}: {summary.errors} errors, {summary.early_stops} short answers")
            found[rung.name].append(summary)
            print(f"#{repetition + 1} {rung.name}: {summary.output_tokens_per_s:.1f} tokens/s", flush=True)
    return found


# --- showing --------------------------------------------------------------------------------------------------------


def median_of(summaries: Sequence[Summary], figure: Callable[[Summary], float]) -> float:
    return statistics.median(figure(summary) for summary in summaries)


def figures(summaries: Sequence[Summary]) -> dict[str, float]:
    """Medians over the repetitions. A percentile exists: every request was answered with at least 16 tokens."""

    def of(name: str, share: str) -> float:
        return median_of(summaries, lambda summary: float(getattr(getattr(summary, name), share)))

    return {
        "tokens/s": median_of(summaries, lambda summary: summary.output_tokens_per_s),
        "TTFT p50, s": of("ttft_ms", "p50") / 1e3,
        "TTFT p99, s": of("ttft_ms", "p99") / 1e3,
        "ITL p99, ms": of("itl_ms", "p99"),
        "cached tokens": median_of(summaries, lambda summary: summary.cached_tokens),
    }


def report(found: dict[str, list[Summary]]) -> None:
    rows, rates, waits = [], [], []
    for name, summaries in found.items():
        row = figures(summaries)
        rates.append(row["tokens/s"])
        waits.append(row["TTFT p99, s"])
        gains = [f"{rates[-1] / rates[max(0, len(rates) - 2)]:.2f}x", f"{rates[-1] / rates[0]:.2f}x"]
        rows.append([name, f"{rates[-1]:.1f}", *gains, *(f"{row[key]:.3g}" for key in list(row)[1:])])
        rows[-1].append(f"{waits[0] / waits[-1]:.2f}x")
    names = list(figures(next(iter(found.values()))))
    print()
    table(["rung", names[0], "over the one before", "over the first", *names[1:], "TTFT p99, over the first"], rows)


def plot(found: dict[str, list[Summary]], directory: Path, threads: int) -> list[Path]:
    """Bars, the first rung on top."""
    names, rows = list(found), [figures(summaries) for summaries in found.values()]
    with house_style():
        figure, axes = panels(1, 2, (5.2, 0.9 + 0.36 * len(names)))
        for panel, key, unit in zip(axes, ("tokens/s", "TTFT p99, s"), ("output tokens/s", "s"), strict=True):
            values = [row[key] for row in rows]
            bars = panel.barh(names, values, color=COLOURS[0] if key == "tokens/s" else COLOURS[1], height=0.65)
            factors = [value / values[0] if key == "tokens/s" else values[0] / value for value in values]
            panel.bar_label(bars, [f"{v:.3g}  ({f:.1f}x)" for v, f in zip(values, factors, strict=True)], padding=3)
            panel.invert_yaxis()
            panel.margins(x=0.22)
            panel.grid(visible=False, axis="y")
            panel.set_xlabel(unit)
        axes[0].set_title("throughput")
        axes[1].set_title("time to first token, 99th percentile")
        axes[1].set_yticklabels([])
        total = next(iter(found.values()))[0]
        what = f"{total.requests} requests, {total.input_tokens:,} tokens in, {total.output_tokens:,} out"
        figure.suptitle(f"The ladder: {MODEL}, {what}, {threads} threads", fontweight="bold", fontsize=11)
        return save(figure, directory, "ladder")


def parse_range(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--rungs", type=parse_range, default=range(100), metavar="FIRST-LAST", help="counted from 0")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--plot", type=Path, metavar="DIR")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.plot is not None:
        require_matplotlib()
    torch.set_num_threads(args.threads)
    rungs = [rung for number, rung in enumerate(make_rungs()) if number in args.rungs]
    found = asyncio.run(climb(rungs, args))
    report(found)
    if args.json is not None:
        document = {name: [asdict(summary) for summary in summaries] for name, summaries in found.items()}
        args.json.write_text(json.dumps({"requests": args.requests, "threads": args.threads, "rungs": document}) + "\n")
    if args.plot is not None:
        for path in plot(found, args.plot, args.threads):
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
