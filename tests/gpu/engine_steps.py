"""Whole decode steps of a random 8B Llama shape in bf16 against their roofline, beside transformers' generate, and the
sampler by itself.

The roofline of a step is the time to read its bytes (the layers' and the head's weights, the context's keys and
values) at the copy bandwidth measured in the same run. A step is `ModelRunner.execute`: plan in, token ids on the host;
`device` is its program alone, replayed without the host.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from unittest import mock

import torch
from engine_model import BLOCK_SIZE, RandomCheckpoint, llama_8b, make_runner, tiny, transformers_model
from timing import Stopwatch, measure_roofs

from shoal.model_shards.engine.plan import NewSequence, ScheduledChunk, StepPlan
from shoal.model_shards.models.config import ModelConfig
from shoal.model_shards.models.stage import layer_parameters
from shoal.model_shards.runner.decode_graphs import DecodeGraphs
from shoal.model_shards.runner.model_runner import ModelRunner
from shoal.model_shards.sampling.params import SamplingParams
from shoal.model_shards.sampling.state import SamplerState

BATCHES = (1, 32, 128)
CONTEXT = 1024
STEPS = 20
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class StepTiming:
    """One decode step of `batch` sequences. Milliseconds; None: not measured."""

    batch: int
    context: int
    bytes_read: int
    roofline_ms: float | None
    captured_ms: float | None
    eager_ms: float | None
    device_ms: float | None
    transformers_ms: float | None = None

    @property
    def fraction(self) -> float | None:
        """Of the roofline, captured."""
        return None if self.roofline_ms is None or self.captured_ms is None else self.roofline_ms / self.captured_ms


@dataclass(frozen=True)
class SamplingTiming:
    """`Sampler.sample` of a batch, the copy of the tokens included."""

    batch: int
    how: str
    ms: float | None


@dataclass(frozen=True)
class Setting:
    """What is timed; `small` is for the dry run."""

    config: ModelConfig
    batches: tuple[int, ...]
    context: int
    steps: int

    @classmethod
    def of(cls, *, small: bool) -> Setting:
        return cls(tiny("llama", smallest=True), (1, 2), 16, 1) if small else cls(llama_8b(), BATCHES, CONTEXT, STEPS)

    @property
    def num_blocks(self) -> int:
        return -(-(self.context + 4 * self.steps + 16) // BLOCK_SIZE)


def run_steps(device: torch.device, seed: int, *, small: bool) -> Iterator[StepTiming | SamplingTiming]:
    """Shoal's steps first, then the same beside transformers' where it can be imported."""
    setting = Setting.of(small=small)
    stopwatch = Stopwatch(device)
    copy_gb_s = measure_roofs(device, stopwatch, small).copy_gb_s
    del stopwatch
    checkpoint = RandomCheckpoint(setting.config, seed, device)
    runner = make_runner(
        checkpoint,
        device,
        DTYPE,
        backend="triton",
        num_blocks=1 + max(setting.batches) * setting.num_blocks,
        max_num_batched_tokens=32 if small else 8192,
        max_num_seqs=max(setting.batches),
        max_model_len=setting.config.max_position,
    )
    for pages in runner.pages:
        pages.k.normal_()
        pages.v.normal_()
    steps = [_time_steps(runner, setting, batch, copy_gb_s) for batch in setting.batches]
    yield from steps
    for batch in setting.batches:
        yield from _time_sampling(runner, batch, setting.steps)
    del runner, checkpoint
    _free(device)
    yield from _beside_transformers(steps, setting, device)


def step_bytes(config: ModelConfig, batch: int, context: int) -> int:
    """What a decode step must read: every matrix but the embedding once, and the keys and values of every sequence."""
    layers = sum(layer_parameters(config, layer) for layer in range(config.num_layers))
    weights = layers + config.vocab_size * config.hidden_size
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * batch * context
    return (weights + kv) * DTYPE.itemsize


class _Decode:
    """So many sequences whose context is said to be computed: the pages hold random numbers."""

    def __init__(self, runner: ModelRunner, setting: Setting, batch: int) -> None:
        self._runner, self._batch, self._length, self._step_id = runner, batch, setting.context, 0
        greedy = SamplingParams(temperature=0.0, ignore_eos=True)
        count = setting.num_blocks
        self._new = [
            NewSequence(
                seq_id=i,
                generation=0,
                token_ids=[(17 * i + j) % runner.config.vocab_size for j in range(setting.context + 1)],
                num_prompt_tokens=setting.context + 1,
                sampling=greedy,
                seed=i,
                sample_index=0,
                block_ids=list(range(1 + i * count, 1 + (i + 1) * count)),
            )
            for i in range(batch)
        ]

    def step(self) -> None:
        chunks = [ScheduledChunk(i, self._length, 1, [], samples=True) for i in range(self._batch)]
        output = self._runner.execute(StepPlan(self._step_id, new=self._new, chunks=chunks))
        assert len(output.token_ids) == self._batch, output.errors
        self._new, self._length, self._step_id = [], self._length + 1, self._step_id + 1

    def end(self) -> None:
        self._runner.execute(StepPlan(self._step_id, removed=list(range(self._batch))))


def _time_steps(runner: ModelRunner, setting: Setting, batch: int, copy_gb_s: float | None) -> StepTiming:
    decode = _Decode(runner, setting, batch)
    real = runner.device.type == "cuda"
    captured = _wall_ms(decode.step, setting.steps, real)
    if real:
        assert runner.captured.replays > 0, "steps were not captured"
    with mock.patch.object(runner.captured, "run", return_value=None):
        eager = _wall_ms(decode.step, setting.steps, real)
    device_ms = None
    if real and isinstance(runner.captured, DecodeGraphs):
        program = runner.captured._programs[batch]
        device_ms = _device_ms(program.replay, setting.steps)
    decode.end()
    moved = step_bytes(setting.config, batch, setting.context)
    roofline = None if copy_gb_s is None else moved / copy_gb_s / 1e6
    return StepTiming(batch, setting.context, moved, roofline, captured, eager, device_ms)


def _time_sampling(runner: ModelRunner, batch: int, repetitions: int) -> Iterator[SamplingTiming]:
    ways = {
        "greedy": SamplingParams(temperature=0.0),
        "temperature 1": SamplingParams(temperature=1.0),
        "top-k 50, top-p 0.9": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    }
    logits = torch.randn(batch, runner.config.vocab_size, device=runner.device)
    for how, params in ways.items():
        states = [
            SamplerState(params, seed=i, sample_index=0, token_ids=[1], num_prompt_tokens=1) for i in range(batch)
        ]

        def sample(states: list[SamplerState] = states) -> None:
            with torch.inference_mode():
                assert not runner.outputs.sampler.sample(logits, states).errors

        yield SamplingTiming(batch, how, _wall_ms(sample, repetitions, runner.device.type == "cuda"))


def _beside_transformers(steps: list[StepTiming], setting: Setting, device: torch.device) -> Iterator[StepTiming]:
    """A step of `generate`: what the last few tokens took, the prompt taken off."""
    try:
        model = transformers_model(setting.config, DTYPE, device)
    except ImportError as error:
        print(f"  transformers cannot be imported ({error}): nothing to time beside", flush=True)
        return
    few, many = (2, 18) if device.type == "cuda" else (1, 2)
    for step in steps:
        prompt = torch.randint(setting.config.vocab_size, (step.batch, setting.context), device=device)
        took = [_generate_ms(model, prompt, count) for count in (few, few, many)]
        _free(device)
        if device.type == "cuda":
            yield replace(step, transformers_ms=(took[2] - took[1]) / (many - few))


def _generate_ms(model: object, prompt: torch.Tensor, count: int) -> float:
    began = time.perf_counter()
    with torch.inference_mode():
        model.generate(  # type: ignore[attr-defined]
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    if prompt.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3


def _wall_ms(call: Callable[[], None], repetitions: int, real: bool) -> float | None:
    """Median of a call that ends with its result on the host; on a CPU (dry run) it only makes the call."""
    if not real:
        call()
        return None
    for _ in range(3):
        call()
    times = []
    for _ in range(repetitions):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def _device_ms(call: Callable[[], object], repetitions: int) -> float:
    """Of one call, of many in a row: between them the device does not wait for the host."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    start.record()
    for _ in range(repetitions):
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / repetitions


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
