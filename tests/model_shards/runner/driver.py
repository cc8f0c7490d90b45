"""Plays scheduler for a ModelRunner or an Executor: blocks from a shuffled pool, chunks of a given size."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from shoal.kernels.capture import Capturer, Program
from shoal.model_shards.engine.plan import NewSequence, ScheduledChunk, StepOutput, StepPlan
from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.runner.batch import ForwardBatch
from shoal.model_shards.runner.captured import Computed
from shoal.model_shards.runner.decode_graphs import DecodeGraphs
from shoal.model_shards.runner.device_inputs import DeviceInputs
from shoal.model_shards.runner.footprint import graph_sizes
from shoal.model_shards.runner.model_runner import ModelRunner
from shoal.model_shards.runner.settings import RunnerSettings
from shoal.model_shards.sampling.params import SamplingParams
from shoal.model_shards.weights.sources import ModelSource

T = TypeVar("T")
GREEDY = SamplingParams(temperature=0.0)

Execute = Callable[[StepPlan], StepOutput]


def settings_for(path: Path, **changes: Any) -> RunnerSettings:
    """Small, fp32, on the CPU; `path` is a safetensors directory or a GGUF file."""
    kind = "gguf" if path.suffix == ".gguf" else "safetensors"
    values: dict[str, Any] = {
        "model": ModelSource(path.name, kind, path),
        "device": "cpu",
        "dtype": torch.float32,
        "kv_dtype": torch.float32,
        "block_size": 16,
        "num_blocks": 128,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 64,
        "max_model_len": 256,
        "num_threads": 1,
    }
    return RunnerSettings(**{**values, **changes})


def make_runner(path: Path, **changes: Any) -> ModelRunner:
    return ModelRunner(settings_for(path, **changes), ParallelContext.single())


class _Again(Program[T]):
    nbytes = 1

    def __init__(self, run: Callable[[], T]) -> None:
        self._run = run
        self.result = run()

    def replay(self) -> T:
        again = self._run()
        for mine, first in zip(again, self.result, strict=True):  # type: ignore[call-overload]
            assert (mine is None) == (first is None)
            assert mine is None or mine.data_ptr() == first.data_ptr(), "results must stay where they are"
        return again


class Repeater(Capturer):
    """Stands in for CUDA graphs: it runs again what it captured. `refuses`: which of the captures, counted from 0,
    gives no program."""

    def __init__(self, refuses: int | None = None) -> None:
        self.captures, self._refuses = 0, refuses

    def capture(self, run: Callable[[], T]) -> tuple[T, Program[T] | None]:
        self.captures += 1
        if self.captures - 1 == self._refuses:
            self.refusal = "of a reason"
            return run(), None
        program = _Again(run)
        return program.result, program


def with_graphs(runner: ModelRunner, capturer: Capturer | None = None) -> ModelRunner:
    """Gives a runner on the CPU what a runner on a GPU has."""
    runner.model.ops.capturer = lambda _: capturer or Repeater()  # type: ignore[method-assign]
    runner._inputs = DeviceInputs(runner.settings, runner.config.vocab_size, runner.device)
    sizes = graph_sizes(runner.settings.max_num_seqs)
    runner.captured = DecodeGraphs(runner.model, runner.pages, runner._inputs, runner.context, sizes)
    runner.captured.prepare()
    runner._warm_up()
    return runner


def watch_hidden(runner: ModelRunner) -> list[torch.Tensor]:
    """Collects the hidden states of each step (rows in batch order), captured or not, to take logits of every row."""
    seen: list[torch.Tensor] = []
    forward = runner._forward

    def watched(batch: ForwardBatch) -> Computed:
        computed = forward(batch)
        seen.append(computed.hidden.clone())
        return computed

    runner._forward = watched  # type: ignore[method-assign]
    return seen


def all_logits(runner: ModelRunner, hidden: list[torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():
        logits = runner.model.logits(torch.cat(hidden))
    assert logits is not None
    return logits


class Driver:
    """Makes the plans of sequences that all live from the first step to the last."""

    def __init__(self, settings: RunnerSettings, *, seed: int = 0) -> None:
        self.block_size = settings.tokens_per_block
        self.free_blocks = list(range(1, settings.num_blocks))
        random.Random(seed).shuffle(self.free_blocks)
        self.num_blocks: dict[int, int] = {}
        self.step_id = 0

    def blocks(self, seq_id: int, num_tokens: int) -> list[int]:
        """The new blocks that a sequence needs to hold `num_tokens`."""
        wanted = -(-num_tokens // self.block_size) - self.num_blocks.get(seq_id, 0)
        taken = [self.free_blocks.pop() for _ in range(max(0, wanted))]
        self.num_blocks[seq_id] = self.num_blocks.get(seq_id, 0) + len(taken)
        return taken

    def new(self, seq_id: int, token_ids: list[int], sampling: SamplingParams = GREEDY, **changes: Any) -> NewSequence:
        values: dict[str, Any] = {
            "generation": 0,
            "num_prompt_tokens": len(token_ids),
            "seed": 1000 + seq_id,
            "sample_index": 0,
            "block_ids": [],
        }
        return NewSequence(seq_id, token_ids=list(token_ids), sampling=sampling, **{**values, **changes})

    def chunk(self, seq_id: int, start: int, num_tokens: int, samples: bool) -> ScheduledChunk:
        return ScheduledChunk(seq_id, start, num_tokens, self.blocks(seq_id, start + num_tokens), samples)

    def plan(self, chunks: list[ScheduledChunk], **changes: Any) -> StepPlan:
        self.step_id += 1
        return StepPlan(self.step_id, chunks=chunks, **changes)

    def prefill_plans(
        self, prompts: dict[int, list[int]], chunk_size: int | None = None, sampling: SamplingParams = GREEDY
    ) -> list[StepPlan]:
        """Every prompt in chunks of `chunk_size` (None: whole), all sequences side by side."""
        plans = []
        new = [self.new(seq_id, tokens, sampling) for seq_id, tokens in prompts.items()]
        done = dict.fromkeys(prompts, 0)
        while any(done[seq_id] < len(tokens) for seq_id, tokens in prompts.items()):
            chunks = []
            for seq_id, tokens in prompts.items():
                size = min(chunk_size or len(tokens), len(tokens) - done[seq_id])
                if size > 0:
                    chunks.append(self.chunk(seq_id, done[seq_id], size, done[seq_id] + size == len(tokens)))
                    done[seq_id] += size
            plans.append(self.plan(chunks, new=new))
            new = []
        return plans

    def decode_plan(self, lengths: dict[int, int]) -> StepPlan:
        """One token of each sequence; `lengths`: tokens known, the last one not computed yet. Counts them on."""
        chunks = [self.chunk(seq_id, length - 1, 1, True) for seq_id, length in lengths.items()]
        for seq_id in lengths:
            lengths[seq_id] += 1
        return self.plan(chunks)


def generate(
    execute: Execute,
    settings: RunnerSettings,
    prompts: list[list[int]],
    num_tokens: int,
    *,
    chunk_size: int | None = None,
    sampling: SamplingParams = GREEDY,
) -> list[list[int]]:
    """The sampled tokens of each prompt, all prompts in one batch."""
    driver = Driver(settings)
    by_id = dict(enumerate(prompts))
    drawn: dict[int, list[int]] = {seq_id: [] for seq_id in by_id}
    prefill = driver.prefill_plans(by_id, chunk_size, sampling)
    for plan in prefill:
        _collect(execute(plan), drawn)
    lengths = {seq_id: len(tokens) + 1 for seq_id, tokens in by_id.items()}
    for _ in range(num_tokens - 1):
        _collect(execute(driver.decode_plan(lengths)), drawn)
    return [drawn[seq_id] for seq_id in by_id]


def _collect(output: StepOutput, drawn: dict[int, list[int]]) -> None:
    assert output.errors == {}, output.errors
    for seq_id, token_id in zip(output.seq_ids, output.token_ids, strict=True):
        drawn[seq_id].append(token_id)
