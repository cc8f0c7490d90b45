"""The engine against transformers on random checkpoints: the comparisons that `check.py` makes of whole steps.

Without transformers, Shoal's own reference operators in fp32 on the CPU take its place. What is compared are logits of
the tokens that the engine itself drew, in steps of every kind: prompts in chunks beside decodes, then decodes of
several sizes; so one token that differs does not make all that follow differ.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from correctness import Check, difference
from engine_model import RandomCheckpoint, make_runner, tiny, transformers_model

from shoal.model_shards.engine.plan import StepPlan
from shoal.model_shards.runner.footprint import graph_sizes
from shoal.model_shards.runner.model_runner import ModelRunner
from shoal.model_shards.sampling.params import SamplingParams

sys.path.append(str(Path(__file__).resolve().parents[1] / "model_shards" / "runner"))
from driver import Driver, with_graphs

FP32_ALLOWED = 1e-3
"""Largest |logit - reference| / (1 + |reference|) in fp32."""
BF16_RATIO = 1.5
"""How much larger the root mean square error may be than that of transformers in bf16, both against fp32."""
BF16_ALONE = 0.05
"""Root mean square error where there is no transformers to compare with; logits are about 1."""
CAPTURED_ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 6e-2}
"""Largest difference of a captured step from an eager one: a step that is filled up may take other matrix products."""

Truth = Callable[[list[int]], torch.Tensor]
"""Tokens -> logits [len(tokens), vocab_size], fp32 on the CPU."""


def run_engine_checks(device: torch.device, seed: int, *, small: bool) -> Iterator[Check]:
    torch.backends.cuda.matmul.allow_tf32 = False
    for family in ("llama",) if small else ("llama", "qwen3"):
        checkpoint = RandomCheckpoint(tiny(family, smallest=small), seed, device)
        with tempfile.TemporaryDirectory() as directory:
            source = _written(checkpoint, Path(directory))
            others = _others(checkpoint, device)
            for dtype in (torch.float32, torch.bfloat16):
                yield from _compare(f"engine, {family}", source, device, dtype, others, small)


@dataclass
class Others:
    """What the engine is compared with: the truth in fp32, and how far transformers in bf16 is from it, if it is
    there."""

    name: str
    truth: Truth
    bf16: Truth | None


def _others(checkpoint: RandomCheckpoint, device: torch.device) -> Others:
    try:
        models = {
            dtype: transformers_model(checkpoint.config, dtype, device) for dtype in (torch.float32, torch.bfloat16)
        }
    except ImportError as error:
        print(f"  transformers cannot be imported ({error}); comparing with the reference operators on the CPU")
        cpu = RandomCheckpointOnCpu(checkpoint)
        return Others("the reference operators", partial(_reference_logits, cpu), None)
    for model in models.values():
        model.load_state_dict(checkpoint.tensors(), strict=True)
    truths = {dtype: partial(_transformers_logits, model, device) for dtype, model in models.items()}
    return Others("transformers", truths[torch.float32], truths[torch.bfloat16])


class RandomCheckpointOnCpu(RandomCheckpoint):
    """The same numbers (a device's generator makes other ones), in the host's memory."""

    def __init__(self, original: RandomCheckpoint) -> None:
        self.__dict__.update(original.__dict__)

    def tensor(self, name: str) -> torch.Tensor:
        return super().tensor(name).cpu()


@torch.inference_mode()
def _transformers_logits(model: Any, device: torch.device, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([tokens], device=device), use_cache=False).logits[0]
    return logits.float().cpu()


def _reference_logits(checkpoint: RandomCheckpoint, tokens: list[int]) -> torch.Tensor:
    runner = make_runner(checkpoint, torch.device("cpu"), torch.float32, backend="reference", **_limits(2048, 2048))
    plans = Driver(runner.settings).prefill_plans({0: tokens})
    hidden = []
    forward = runner._forward

    def watched(batch: Any) -> Any:
        computed = forward(batch)
        hidden.append(computed.hidden)
        return computed

    with mock.patch.object(runner, "_forward", watched):
        for plan in plans:
            runner.execute(plan)
    with torch.inference_mode():
        logits = runner.model.logits(torch.cat(hidden))
    assert logits is not None
    return logits


def _written(checkpoint: RandomCheckpoint, directory: Path) -> RandomCheckpoint | Path:
    try:
        return checkpoint.write(directory)
    except ImportError as error:
        print(f"  safetensors cannot be imported ({error}); weights stay in memory")
        return checkpoint


def _limits(max_model_len: int, max_num_batched_tokens: int) -> dict[str, int]:
    return {
        "num_blocks": 512,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": min(16, max_num_batched_tokens // 8),
        "max_model_len": max_model_len,
    }


# --- one run of the engine -----------------------------------------------------------------------------------------


@dataclass
class Run:
    """What the engine drew and what it drew from."""

    tokens: dict[int, list[int]]
    """Sequence -> prompt and drawn tokens."""
    logits: dict[int, list[torch.Tensor]]
    """Sequence -> the logits of each drawn token, fp32 on the CPU."""
    replays: int


def _run(runner: ModelRunner, prompts: dict[int, list[int]], steps: int) -> Run:
    """Prompts in chunks, side by side; decodes of all; then one sequence after the other ends."""
    run = Run({seq_id: list(tokens) for seq_id, tokens in prompts.items()}, {seq_id: [] for seq_id in prompts}, 0)
    before = runner.captured.replays
    sample = runner.outputs.sampler.sample

    def watched(logits: torch.Tensor, states: Any) -> Any:
        for row, state in zip(logits.float().cpu().clone(), states, strict=True):
            run.logits[state.seed].append(row)
        return sample(logits, states)

    with mock.patch.object(runner.outputs.sampler, "sample", watched):
        for plan in _plans(runner, prompts, steps):
            output = runner.execute(plan)
            assert not output.errors, output.errors
            for seq_id, token in zip(output.seq_ids, output.token_ids, strict=True):
                run.tokens[seq_id].append(token)
    run.replays = runner.captured.replays - before
    return run


def _plans(runner: ModelRunner, prompts: dict[int, list[int]], steps: int) -> Iterator[StepPlan]:
    """Plans are made while they are run: what they draw does not change them."""
    driver, sampling = Driver(runner.settings), SamplingParams(temperature=0.0)
    chunk_size = min(96, runner.settings.max_num_batched_tokens // len(prompts))
    for plan in driver.prefill_plans(prompts, chunk_size, sampling):
        for new in plan.new:
            new.seed = new.seq_id  # by which the sampler's states are recognised
        yield plan
    lengths = {seq_id: len(tokens) + 1 for seq_id, tokens in prompts.items()}
    for _ in range(steps):
        yield driver.decode_plan(lengths)
    for ending in list(prompts)[:-1]:
        del lengths[ending]
        plan = driver.decode_plan(lengths)
        plan.removed.append(ending)
        yield plan
    yield driver.plan([], removed=list(lengths))


# --- the comparisons -----------------------------------------------------------------------------------------------


def _compare(
    name: str, source: RandomCheckpoint | Path, device: torch.device, dtype: torch.dtype, others: Others, small: bool
) -> Iterator[Check]:
    name = f"{name}, {str(dtype).removeprefix('torch.')}"
    lengths, steps = ([1, 11, 25], 1) if small else ([1, 17, 130, 97, 300, 64, 700, 5], 24)
    runner = make_runner(source, device, dtype, backend="triton", **(_limits(64, 32) if small else _limits(1024, 2048)))
    generator = torch.Generator().manual_seed(len(lengths))
    vocab = runner.config.vocab_size
    prompts = {i: torch.randint(vocab, (n,), generator=generator).tolist() for i, n in enumerate(lengths)}
    if device.type != "cuda":
        with_graphs(runner)  # a stand-in, for steps that are filled up as those of graphs are
    missing = len(graph_sizes(runner.settings.max_num_seqs)) - len(runner.captured)
    yield Check(f"{name}: sizes that were not captured", float(missing), 0.0)
    run = _run(runner, prompts, steps)
    yield from _against_others(name, run, prompts, dtype, others)
    yield Check(f"{name}: decodes that were not captured", max(0.0, float(steps - run.replays)), 0.0)
    yield from _against_eager(name, runner, prompts, steps, run, CAPTURED_ALLOWED[dtype])
    if device.type == "cuda":
        yield from _waits(name, runner, prompts, steps)


def _against_others(
    name: str, run: Run, prompts: dict[int, list[int]], dtype: torch.dtype, others: Others
) -> Iterator[Check]:
    mine, truth, bf16, drawn = [], [], [], []
    for seq_id, tokens in run.tokens.items():
        rows = slice(len(prompts[seq_id]) - 1, len(tokens) - 1)
        truth.append(others.truth(tokens)[rows])
        bf16.append(truth[-1] if others.bf16 is None else others.bf16(tokens)[rows])
        mine.append(torch.stack(run.logits[seq_id]))
        drawn.append(torch.tensor(tokens[len(prompts[seq_id]) :]))
    ours, expected, rounded, tokens_drawn = torch.cat(mine), torch.cat(truth), torch.cat(bf16), torch.cat(drawn)
    if dtype == torch.float32:
        yield Check(f"{name}: logits against {others.name} in fp32", difference(ours, expected), FP32_ALLOWED)
    else:
        theirs = _rms(rounded, expected)
        allowed = BF16_ALONE if others.bf16 is None else BF16_RATIO * theirs
        yield Check(f"{name}: rms error of logits against {others.name} in fp32", _rms(ours, expected), allowed)
    yield Check(f"{name}: draws that are not the largest logit", float((ours.argmax(1) != tokens_drawn).sum()), 0.0)
    if dtype == torch.float32:
        best = expected.topk(2).values
        clear = best[:, 0] - best[:, 1] > 4 * FP32_ALLOWED * (1 + best[:, 0].abs())
        wrong = (expected.argmax(1) != tokens_drawn) & clear
        yield Check(f"{name}: greedy tokens that are not {others.name}'s, ties apart", float(wrong.sum()), 0.0)


def _against_eager(
    name: str, runner: ModelRunner, prompts: dict[int, list[int]], steps: int, captured: Run, allowed: float
) -> Iterator[Check]:
    """The same sequences again, operator by operator, up to the first token that differs."""
    with mock.patch.object(runner.captured, "run", return_value=None):
        eager = _run(runner, prompts, steps)
    largest, same, total = 0.0, 0, 0
    for seq_id, rows in captured.logits.items():
        start = len(prompts[seq_id])
        for i, (mine, expected) in enumerate(zip(rows, eager.logits[seq_id], strict=True)):
            if captured.tokens[seq_id][: start + i] != eager.tokens[seq_id][: start + i]:
                break
            largest, total = max(largest, difference(mine, expected)), total + 1
            same += torch.equal(mine, expected)
    print(f"  {name}: {same} of {total} rows of captured and eager steps have the same bits", flush=True)
    yield Check(f"{name}: captured against eager steps", largest if total else float("nan"), allowed)


def _waits(name: str, runner: ModelRunner, prompts: dict[int, list[int]], steps: int) -> Iterator[Check]:
    """The model's part of a step must not wait for the device at all, and sampling once: for the tokens."""
    forward, sample, logits = runner._forward, runner.outputs.sampler.sample, runner.model.logits
    counts: list[int] = []

    def refusing(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return function(*arguments)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    def counting(*arguments: Any) -> Any:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                return sample(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            counts.append(sum("synchronizing" in str(warning.message) for warning in caught))

    error = ""
    with (
        mock.patch.object(runner, "_forward", refusing(forward)),
        mock.patch.object(runner.model, "logits", refusing(logits)),
        mock.patch.object(runner.outputs.sampler, "sample", counting),
    ):
        try:
            for plan in _plans(runner, prompts, steps):
                runner.execute(plan)
        except RuntimeError as raised:
            error = str(raised).partition("\n")[0]
            print(f"  {name}: a step waited for the device: {error}", flush=True)
    yield Check(f"{name}: waits in the model's part of a step", float(bool(error)), 0.0)
    yield Check(f"{name}: most waits of a step's sampling", float(max(counts, default=0)), 1.0)


def _rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return (actual - expected).square().mean().sqrt().item()
