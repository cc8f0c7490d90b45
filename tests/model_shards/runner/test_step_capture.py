"""Captured steps give the bits that the same steps give operator by operator, whatever happens to the sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from shoal.kernels.cpu.native import NativeUnavailableError, load
from shoal.model_shards.engine.plan import StepOutput, StepPlan
from shoal.model_shards.runner.footprint import MAX_CAPTURED_TOKENS, PROGRAM_LAYER_BYTES, program_bytes
from shoal.model_shards.sampling.params import SamplingParams

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "qwen3_moe", "deepseek_v3")
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, logprobs=3)

TinyCheckpoint = Callable[..., Path]


@pytest.fixture(autouse=True)
def native() -> None:
    try:
        load()
    except NativeUnavailableError as error:
        pytest.skip(str(error))


class Watched:
    """A runner that remembers the logits it sampled from and its outputs."""

    def __init__(self, driver: ModuleType, path: Path, *, captures: bool, **changes: Any) -> None:
        self.runner = driver.make_runner(path, **changes)
        if not captures:
            self.runner.captured.run = lambda *_: None
        self.logits: list[torch.Tensor] = []
        self.outputs: list[StepOutput] = []
        sample = self.runner.outputs.sampler.sample

        def watched(logits: torch.Tensor, states: Any) -> Any:
            self.logits.append(logits.clone())
            return sample(logits, states)

        self.runner.outputs.sampler.sample = watched

    def run(self, plans: list[StepPlan]) -> Watched:
        self.outputs += [self.runner.execute(plan) for plan in plans]
        return self


def assert_same(driver: ModuleType, path: Path, plans: list[StepPlan], least_replays: int, **changes: Any) -> Watched:
    captured, eager = (Watched(driver, path, captures=on, **changes).run(plans) for on in (True, False))
    assert captured.outputs == eager.outputs
    assert len(captured.logits) == len(eager.logits) > 0
    for step, (mine, expected) in enumerate(zip(captured.logits, eager.logits, strict=True)):
        torch.testing.assert_close(mine, expected, atol=0, rtol=0, equal_nan=True, msg=f"step {step}")
    for mine, expected in zip(captured.runner.pages, eager.runner.pages, strict=True):
        torch.testing.assert_close(mine.k, expected.k, atol=0, rtol=0, equal_nan=True)
        torch.testing.assert_close(mine.v, expected.v, atol=0, rtol=0, equal_nan=True)
    assert captured.runner.captured.replays >= least_replays
    assert eager.runner.captured.replays == 0
    return captured


def mixed_plans(driver: ModuleType, path: Path, sampling: SamplingParams = GREEDY) -> list[StepPlan]:
    """Prompts in small chunks beside decodes, then decodes over several block borders, sequences ending one by one."""
    plays = driver.Driver(driver.settings_for(path))
    prompts = {1: list(range(10, 60)), 2: [65, 66, 67], 3: [200] * 17, 4: [5]}
    plans = plays.prefill_plans(prompts, 7, sampling)
    lengths = {seq_id: len(tokens) + 1 for seq_id, tokens in prompts.items()}
    for _ in range(36):
        plans.append(plays.decode_plan(lengths))
    for ending in (3, 1, 4):
        del lengths[ending]
        plans.append(plays.decode_plan(lengths))
        plans[-1].removed.append(ending)
        plans += [plays.decode_plan(lengths) for _ in range(6)]
    return plans


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_same_bits_in_every_family(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType, family: str, dtype: torch.dtype
) -> None:
    path = tiny_checkpoint(family)
    assert_same(driver, path, mixed_plans(driver, path), 45, dtype=dtype, kv_dtype=dtype)


@pytest.mark.parametrize("tied", [True, False])
def test_same_bits_tied_or_not_and_with_every_bias(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType, tied: bool
) -> None:
    path = tiny_checkpoint("llama", tie_word_embeddings=tied, attention_bias=True, mlp_bias=True)
    assert_same(driver, path, mixed_plans(driver, path, DRAWN), 45, dtype=torch.bfloat16)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe"])
def test_same_bits_of_quantized_weights(tiny_checkpoint: TinyCheckpoint, driver: ModuleType, family: str) -> None:
    path = tiny_checkpoint(family)
    assert_same(driver, path, mixed_plans(driver, path), 45, weights="int8")


@pytest.mark.parametrize("threads", [1, 3])
def test_same_bits_with_any_number_of_threads(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType, threads: int
) -> None:
    path, before = tiny_checkpoint("llama"), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_same(driver, path, mixed_plans(driver, path), 45)
    finally:
        torch.set_num_threads(before)


def test_preemption_and_forks(tiny_checkpoint: TinyCheckpoint, driver: ModuleType) -> None:
    path = tiny_checkpoint("llama")
    plays = driver.Driver(driver.settings_for(path))
    plans = plays.prefill_plans({1: list(range(10, 52)), 2: [7, 8, 9]})
    lengths = {1: 43, 2: 4}
    plans += [plays.decode_plan(lengths) for _ in range(5)]
    known = [*range(10, 52), *range(100, 106)]  # as if these had been drawn: what matters is that both runners agree
    plays.num_blocks.pop(1)
    again = plays.new(1, known, num_prompt_tokens=42, generation=1)
    resumed = [plays.chunk(1, 0, 48, True), plays.chunk(2, lengths[2] - 1, 1, True)]
    plans.append(plays.plan(resumed, removed=[1], new=[again]))
    lengths = {1: 49, 2: lengths[2] + 1}
    decodes = [plays.decode_plan(lengths) for _ in range(4)]
    # | three blocks that the fork shares | four computed tokens in the fourth, which it copies |
    shared, tail, copied = resumed[0].new_block_ids, decodes[0].chunks[0].new_block_ids[0], plays.free_blocks.pop()
    plays.num_blocks[3] = 4
    child = plays.new(3, [*known, 1, 2, 3, 4, 99], num_prompt_tokens=42, block_ids=[*shared, copied])
    chunks = [plays.chunk(1, 52, 1, True), plays.chunk(2, lengths[2] - 1, 1, True), plays.chunk(3, 52, 1, True)]
    plans += [*decodes, plays.plan(chunks, new=[child], block_copies=[(tail, copied)])]
    lengths = {1: 54, 2: lengths[2] + 1, 3: 54}
    plans += [plays.decode_plan(lengths) for _ in range(20)]
    assert_same(driver, path, plans, 20)


def test_a_sequence_with_nan_fails_alone(tiny_checkpoint: TinyCheckpoint, driver: ModuleType, tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    path = tmp_path / "poisoned"
    shutil.copytree(tiny_checkpoint("llama"), path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][299] = torch.nan
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    plays = driver.Driver(driver.settings_for(path))
    plans = plays.prefill_plans({1: list(range(10, 40)), 2: [20, 299, 21]})
    lengths = {1: 31, 2: 4}
    plans += [plays.decode_plan(lengths) for _ in range(6)]
    plans.append(plays.decode_plan({1: lengths[1]}))
    plans[-1].removed.append(2)
    captured = assert_same(driver, path, plans, 4)
    assert [sorted(output.errors) for output in captured.outputs] == [[2]] * 7 + [[]]
    assert all(output.seq_ids == [1] for output in captured.outputs)


def test_prompts_are_scored_on_captured_steps(tiny_checkpoint: TinyCheckpoint, driver: ModuleType) -> None:
    path = tiny_checkpoint("qwen3")
    plays = driver.Driver(driver.settings_for(path))
    asks = replace(GREEDY, prompt_logprobs=2, logprobs=1)
    plans = plays.prefill_plans({1: list(range(10, 90)), 2: list(range(5, 25))}, 5, asks)
    captured = assert_same(driver, path, plans, 10)
    scored = [entry for output in captured.outputs for entry in output.prompt_logprobs.get(1, [])]
    assert [entry.token_id for entry in scored] == list(range(11, 90))


# --- bounds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_largest_step_fits_the_promised_memory(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType, family: str
) -> None:
    path = tiny_checkpoint(family)
    limits = {"max_num_seqs": MAX_CAPTURED_TOKENS, "num_blocks": 2 * MAX_CAPTURED_TOKENS}
    runner = driver.make_runner(path, **limits)
    driver.generate(runner.execute, runner.settings, [[10 + i] for i in range(MAX_CAPTURED_TOKENS)], 4)
    assert runner.captured.replays == 2
    prompt = list(range(MAX_CAPTURED_TOKENS))
    runner = driver.make_runner(path, max_num_seqs=1)
    for seq_id in range(3):
        plays = driver.Driver(runner.settings)
        for plan in plays.prefill_plans({seq_id: prompt}):
            runner.execute(plan)
        runner.execute(plays.plan([], removed=[seq_id]))
    assert runner.captured.replays == 1


def test_larger_steps_run_operator_by_operator(tiny_checkpoint: TinyCheckpoint, driver: ModuleType) -> None:
    size = MAX_CAPTURED_TOKENS + 1
    runner = driver.make_runner(tiny_checkpoint("llama"), max_model_len=3 * size)
    for plan in driver.Driver(runner.settings).prefill_plans({1: [1] * (3 * size)}, size):
        runner.execute(plan)
    assert len(runner.captured) == 0


@pytest.mark.parametrize("weights", ["dense", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_size_is_captured_once_within_the_promised_memory(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType, family: str, weights: str
) -> None:
    """Steps of all sizes, up and down and again: as many programs as sizes, however they take turns."""
    runner = driver.make_runner(tiny_checkpoint(family), weights=weights)
    sizes = (1, 2, 3, 5, 8, 13, 64, 65, 100, MAX_CAPTURED_TOKENS)
    for seq_id, size in enumerate((*sizes, *reversed(sizes), *sizes, *sizes)):
        plays = driver.Driver(runner.settings)
        plan = plays.plan([plays.chunk(seq_id, 0, size, False)], new=[plays.new(seq_id, [7] * (size + 1))])
        runner.execute(plan)
        runner.execute(plays.plan([], removed=[seq_id]))
    assert len(runner.captured) == len(sizes)
    assert runner.captured.replays == 2 * len(sizes)
    assert runner.captured.nbytes < program_bytes(runner.config, len(sizes), 0)
    largest = max(program.nbytes for program in runner.captured._programs.values())
    assert largest <= runner.config.num_layers * PROGRAM_LAYER_BYTES


def test_a_model_that_cannot_be_captured_runs_all_the_same(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_checkpoint("llama")
    plans, outputs = mixed_plans(driver, path), []
    for captures in (True, False):
        watched = Watched(driver, path, captures=captures)
        mlp = watched.runner.model.layers[0].mlp
        mlp.activate = lambda x: torch.nn.functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]
        with caplog.at_level("INFO"):
            outputs.append(watched.run(plans).outputs)
        assert watched.runner.captured.replays == 0
    assert outputs[0] == outputs[1]
    assert "silu" in caplog.text


def test_token_ids_beyond_the_vocabulary_are_refused_as_without_capture(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType
) -> None:
    runner = driver.make_runner(tiny_checkpoint("gemma3"))
    driver.generate(runner.execute, runner.settings, [[1]], 4)
    assert runner.captured.replays > 0
    plays = driver.Driver(runner.settings)
    wrong = plays.plan([plays.chunk(9, 0, 1, True)], new=[plays.new(9, [1 << 30])], removed=[0])
    with pytest.raises(IndexError):
        runner.execute(wrong)
