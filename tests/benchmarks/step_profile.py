"""Where the time of one captured step goes, operator by operator: decodes, and decodes beside a piece of a long prompt.

    python tests/benchmarks/step_profile.py [--batch 1 8 32] [--mixed 8x48@2048] [--weights dense|packed|int8]

The program of a step is replayed call by call, with the clock read between the calls; what reading it costs is measured
and taken off. `model, rest` is what a step computes outside of its program (the logits of mixed steps), `outside` all
that is not the model: building the batch, sampling, bookkeeping. Medians over the steps, in ms of CPU time of one
thread, so that a shared machine disturbs little but its caches.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decode_step import BLOCK, Decode
from kernels_cpu import CLOCKS

from shoal.kernels.cpu.program import CpuProgram
from shoal.model_shards.engine.plan import NewSequence, ScheduledChunk, StepPlan
from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.runner.model_runner import ModelRunner
from shoal.model_shards.runner.settings import RunnerSettings
from shoal.model_shards.sampling.params import SamplingParams
from shoal.model_shards.weights.sources import resolve_model

Profile = dict[str, float]
"""Part of the step -> seconds."""

ORDER = ("linear", "quantized_linear", "paged_attention", "rms_norm", "head_rms_norm", "gated", "rotary", "store_kv")


class Mixed(Decode):
    """`batch` decodes beside `rows` tokens of one prompt, of which `start` are computed: the same piece every step."""

    def __init__(self, runner: ModelRunner, batch: int, context: int, rows: int, start: int) -> None:
        super().__init__(runner, batch, context)
        self.rows, self.start = rows, start
        tokens = torch.randint(100, 40000, (start + rows + 1,), generator=torch.Generator().manual_seed(1)).tolist()
        first = 1 + batch * self.per_sequence
        blocks = list(range(first, first + self.per_sequence))
        greedy = SamplingParams(temperature=0.0, ignore_eos=True)
        new = [NewSequence(batch, 0, tokens, len(tokens), greedy, 0, 0, blocks)]
        for at in range(0, start, 512):
            size = min(512, start - at)
            self._execute([ScheduledChunk(batch, at, size, [], False)], new=new if at == 0 else [])

    def step(self) -> None:
        decodes = [ScheduledChunk(i, self.length, 1, [], True) for i in range(self.batch)]
        self._execute([*decodes, ScheduledChunk(self.batch, self.start, self.rows, [], False)])
        self.length += 1

    def close(self) -> None:
        self.runner.execute(StepPlan(0, removed=list(range(self.batch + 1))))


class Profiler:
    """Replays programs call by call and keeps the time of each kind of call."""

    def __init__(self, runner: ModelRunner, clock: Any) -> None:
        self.runner, self.clock = runner, clock
        self.parts: dict[str, float] = defaultdict(float)
        self.replay_seconds = 0.0
        native = runner.model.ops._native  # type: ignore[attr-defined]
        self.names = {address: name for name, address in native.replayable.items()}
        self.run_program = native.run_program
        self.a_reading = self._reading_seconds()

    def _reading_seconds(self) -> float:
        began = self.clock()
        for _ in range(2000):
            self.run_program(0, 0)
            self.clock()
        return (self.clock() - began) / 2000

    def replay(self, program: CpuProgram[Any]) -> Any:
        words, at = program._words, 0
        base = words.ctypes.data
        calls = []
        while at < len(words):
            calls.append((self.names[int(words[at])], base + at * words.itemsize))
            at += 2 + int(words[at + 1])
        began = last = self.clock()
        for name, address in calls:
            self.run_program(address, 1)
            now = self.clock()
            self.parts[name] += now - last - self.a_reading
            last = now
        self.replay_seconds += last - began
        return program.result


def profile(work: Decode, clock: Any, steps: int) -> Profile:
    runner = work.runner
    profiler = Profiler(runner, clock)
    for _ in range(4):
        work.step()
    assert runner.captured.replays > 0, "the step was not captured"
    profiles: list[Profile] = []
    original, forward, logits = CpuProgram.replay, runner._forward, runner.model.logits
    model_seconds = 0.0

    def timed(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            nonlocal model_seconds
            began = clock()
            result = function(*arguments)
            model_seconds += clock() - began
            return result

        return call

    CpuProgram.replay = lambda program: profiler.replay(program)  # type: ignore[method-assign]
    runner._forward, runner.model.logits = timed(forward), timed(logits)  # type: ignore[method-assign]
    try:
        for _ in range(steps):
            profiler.parts.clear()
            profiler.replay_seconds = model_seconds = 0.0
            began = clock()
            work.step()
            took = clock() - began
            parts = dict(profiler.parts)
            parts["model, rest"] = model_seconds - profiler.replay_seconds
            parts["outside"] = took - model_seconds
            parts["step"] = sum(parts.values())
            profiles.append(parts)
    finally:
        CpuProgram.replay = original  # type: ignore[method-assign]
        runner._forward, runner.model.logits = forward, logits  # type: ignore[method-assign]
        work.close()
    return {name: statistics.median(p.get(name, 0.0) for p in profiles) for name in profiles[0]}


def works(runner: ModelRunner, batches: list[int], mixed: list[str], context: int) -> Iterator[tuple[str, Decode]]:
    for batch in batches:
        yield f"{batch}", Decode(runner, batch, context)
    for text in mixed:
        yield text, Mixed(runner, *mixed_numbers(text, context))


def mixed_numbers(text: str, context: int) -> tuple[int, int, int, int]:
    """ "8x48@2048" -> (decodes, their context, rows of the prompt, where they start)."""
    decodes, _, piece = text.partition("x")
    rows, _, start = piece.partition("@")
    return int(decodes), context, int(rows), int(start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--mixed", nargs="*", default=["8x48@2048"], help="DECODESxROWS@START of a long prompt")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--weights", choices=("dense", "packed", "int8"), default="dense")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    starts = [sum(mixed_numbers(text, 0)[2:]) for text in options.mixed]
    longest = max([options.context + options.steps + 16, *(start + 16 for start in starts)])
    sequences = max([*options.batch, *(mixed_numbers(text, 0)[0] + 1 for text in options.mixed)])
    settings = RunnerSettings(
        model=resolve_model("smollm2-135m"),
        device="cpu",
        dtype=getattr(torch, options.dtype),
        kv_dtype=torch.bfloat16,
        block_size=BLOCK,
        num_blocks=1 + sequences * -(-longest // BLOCK),
        max_num_batched_tokens=512,
        max_num_seqs=sequences,
        max_model_len=longest,
        num_threads=options.threads,
        weights=options.weights,
    )
    runner = ModelRunner(settings, ParallelContext.single())
    columns: dict[str, Profile] = {}
    for name, work in works(runner, options.batch, options.mixed, options.context):
        columns[name] = profile(work, CLOCKS[options.clock], options.steps)
    print(f"SmolLM2-135M {options.weights} {options.dtype}, context {options.context}, {options.threads} threads: ms")
    print(table(columns))
    if options.json is not None:
        options.json.write_text(json.dumps(columns, indent=1))


def table(columns: dict[str, Profile]) -> str:
    rows = [name for name in ORDER if any(name in p for p in columns.values())]
    rows += sorted({name for p in columns.values() for name in p} - {*rows, "outside", "step", "model, rest"})
    rows += ["model, rest", "outside", "step"]
    lines = [f"{'':18}" + "".join(f"{name:>14}" for name in columns)]
    for row in rows:
        lines.append(f"{row:18}" + "".join(f"{1e3 * p.get(row, np.nan):14.3f}" for p in columns.values()))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
