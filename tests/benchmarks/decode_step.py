"""Times one decode step of SmolLM2-135M, operator by operator and as a program, in turns, against the machine.

    python tests/benchmarks/decode_step.py [--threads N] [--batch 1 8 32] [--context N] [--weights dense|packed|int8]

The roofline of a step is the slower of reading its bytes (weights and the context's keys and values) and of its
multiply-adds, both as measured in the same run. `outside` is the part of a step that is not the model: building the
batch, the sampler, bookkeeping. Medians; on a shared machine look at the ratios of one run only, or count with
`--clock cpu --threads 1` the time that this process got.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kernels_cpu import CLOCKS, Bench

from shoal.model_shards.engine.plan import NewSequence, ScheduledChunk, StepPlan
from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.quantization.schemes import DenseScheme, make_scheme
from shoal.model_shards.runner.footprint import kv_bytes_per_block, weights_bytes
from shoal.model_shards.runner.model_runner import ModelRunner
from shoal.model_shards.runner.settings import RunnerSettings
from shoal.model_shards.sampling.params import SamplingParams
from shoal.model_shards.weights.open import open_checkpoint
from shoal.model_shards.weights.sources import resolve_model

BLOCK = 16


@dataclass(frozen=True)
class Row:
    batch: int
    how: str
    milliseconds: float
    outside_milliseconds: float
    roofline: float
    tokens_per_second: float


class Decode:
    """`batch` sequences of `context` tokens that draw greedily, one step after the other."""

    def __init__(self, runner: ModelRunner, batch: int, context: int) -> None:
        self.runner, self.batch, self.length, self.step_id = runner, batch, context, 0
        self.per_sequence = runner.settings.max_blocks_per_sequence
        tokens = torch.randint(100, 40000, (batch, context), generator=torch.Generator().manual_seed(0)).tolist()
        greedy = SamplingParams(temperature=0.0, ignore_eos=True)
        blocks = [list(range(1 + i * self.per_sequence, 1 + (i + 1) * self.per_sequence)) for i in range(batch)]
        for i in range(batch):
            new = NewSequence(i, 0, tokens[i], context, greedy, i, 0, blocks[i])
            self._execute([ScheduledChunk(i, 0, context, [], True)], new=[new])

    def step(self) -> None:
        self._execute([ScheduledChunk(i, self.length, 1, [], True) for i in range(self.batch)])
        self.length += 1

    def close(self) -> None:
        self.runner.execute(StepPlan(0, removed=list(range(self.batch))))

    def _execute(self, chunks: list[ScheduledChunk], **changes: Any) -> None:
        self.step_id += 1
        output = self.runner.execute(StepPlan(self.step_id, chunks=chunks, **changes))
        assert not output.errors, output.errors


class ModelTime:
    """Time of the model within steps."""

    def __init__(self, runner: ModelRunner, clock: Callable[[], float]) -> None:
        self.seconds, self.clock = 0.0, clock
        for owner, name in ((runner, "_forward"), (runner.model, "logits")):
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Any) -> Any:
        def timed(*arguments: Any) -> Any:
            began = self.clock()
            result = function(*arguments)
            self.seconds += self.clock() - began
            return result

        return timed


@contextmanager
def eager(runner: ModelRunner) -> Iterator[None]:
    with mock.patch.object(runner.captured, "run", return_value=None):
        yield


def measure(runner: ModelRunner, model: ModelTime, bench: Bench, batch: int, context: int, steps: int) -> Iterator[Row]:
    decode = Decode(runner, batch, context)
    walls: dict[str, list[float]] = {"eager": [], "captured": []}
    outside: dict[str, list[float]] = {"eager": [], "captured": []}
    for i in range(2 * steps + 8):
        how = ("eager", "captured")[i % 2]
        model.seconds, began = 0.0, bench.clock()
        if how == "eager":
            with eager(runner):
                decode.step()
        else:
            decode.step()
        took = bench.clock() - began
        if i >= 8:
            walls[how].append(took)
            outside[how].append(took - model.seconds)
    decode.close()
    settings, config = runner.settings, runner.config
    kv = kv_bytes_per_block(config, BLOCK, settings.kv_dtype) / BLOCK * (context + steps) * batch
    scheme = make_scheme(settings.weights, settings.dtype, open_checkpoint(settings.model))
    weights = weights_bytes(config, scheme)
    flops = 2 * batch * weights_bytes(config, DenseScheme(settings.dtype)) / settings.dtype.itemsize
    bound = max((weights + kv) / (bench.read_gb_s * 1e9), flops / (bench.peak_gflop_s * 1e9))
    for how, times in walls.items():
        median = statistics.median(times)
        yield Row(batch, how, median * 1e3, statistics.median(outside[how]) * 1e3, bound / median, batch / median)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=40, help="of each kind")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--weights", choices=("dense", "packed", "int8"), default="dense")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    bench = Bench(CLOCKS[options.clock])
    longest = options.context + 2 * options.steps + 16
    settings = RunnerSettings(
        model=resolve_model("smollm2-135m"),
        device="cpu",
        dtype=getattr(torch, options.dtype),
        kv_dtype=torch.bfloat16,
        block_size=BLOCK,
        num_blocks=1 + max(options.batch) * -(-longest // BLOCK),
        max_num_batched_tokens=512,
        max_num_seqs=max(options.batch),
        max_model_len=longest,
        num_threads=options.threads,
        weights=options.weights,
    )
    runner = ModelRunner(settings, ParallelContext.single())
    model = ModelTime(runner, bench.clock)
    how = f"{options.threads} threads, {options.clock} clock"
    limits = f"read {bench.read_gb_s:.1f} GB/s, fp32 {bench.peak_gflop_s:.0f} GFLOP/s"
    print(f"SmolLM2-135M {options.weights} {options.dtype}, context {options.context}, {how}; {limits}")
    print(f"{'batch':>5} {'':>9} {'ms':>8} {'outside':>8} {'roofline':>9} {'tokens/s':>9}")
    rows = [r for b in options.batch for r in measure(runner, model, bench, b, options.context, options.steps)]
    for r in rows:
        line = f"{r.batch:5} {r.how:>9} {r.milliseconds:8.2f} {r.outside_milliseconds:8.2f} {r.roofline:9.0%}"
        print(f"{line} {r.tokens_per_second:9.0f}")
    if options.json is not None:
        report = {"read_gb_s": bench.read_gb_s, "peak_gflop_s": bench.peak_gflop_s, "rows": [asdict(r) for r in rows]}
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
