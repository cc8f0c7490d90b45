"""The runner keeps sequences by itself, samples where asked, and lets one sequence fail alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from shoal.model_shards.engine.plan import StepOutput, StepPlan
from shoal.model_shards.sampling.params import SamplingParams

TinyCheckpoint = Callable[..., Path]

GREEDY = SamplingParams(temperature=0.0)
PROMPTS = [[65, 66, 67], list(range(10, 60)), [200] * 17, [5]]


@pytest.fixture
def llama(tiny_checkpoint: TinyCheckpoint) -> Path:
    return tiny_checkpoint("llama")


def alone(driver: ModuleType, path: Path, prompt: list[int], num_tokens: int) -> list[int]:
    runner = driver.make_runner(path)
    return driver.generate(runner.execute, runner.settings, [prompt], num_tokens)[0]


@pytest.mark.parametrize("chunk_size", [1, 7, 16, 64, None])
def test_a_batch_draws_what_each_sequence_draws_alone(driver: ModuleType, llama: Path, chunk_size: int | None) -> None:
    runner = driver.make_runner(llama)
    batch = driver.generate(runner.execute, runner.settings, PROMPTS, 20, chunk_size=chunk_size)
    assert batch == [alone(driver, llama, prompt, 20) for prompt in PROMPTS]


def test_columns_follow_the_plan_not_the_batch(driver: ModuleType, llama: Path) -> None:
    """Decodes run first in the batch; the output is in the order of the plan's chunks that sample."""
    runner = driver.make_runner(llama)
    plays = driver.Driver(runner.settings)
    first = plays.plan([plays.chunk(2, 0, 3, True)], new=[plays.new(2, [65, 66, 67])])
    runner.execute(first)
    long, other = list(range(10, 60)), list(range(100, 130))
    chunks = [plays.chunk(1, 0, 50, True), plays.chunk(2, 3, 1, True), plays.chunk(3, 0, 20, False)]
    output = runner.execute(plays.plan(chunks, new=[plays.new(1, long, generation=7), plays.new(3, other)]))
    assert (output.seq_ids, output.generations) == ([1, 2], [7, 0])
    assert output.token_ids == [alone(driver, llama, long, 1)[0], alone(driver, llama, [65, 66, 67], 2)[1]]


def test_a_preempted_sequence_goes_on_where_it_stopped(driver: ModuleType, llama: Path) -> None:
    prompt = list(range(10, 60))
    expected = alone(driver, llama, prompt, 12)
    runner = driver.make_runner(llama)
    plays = driver.Driver(runner.settings)
    for plan in plays.prefill_plans({1: prompt}):
        runner.execute(plan)
    lengths = {1: 51}
    for _ in range(4):
        runner.execute(plays.decode_plan(lengths))
    plays.num_blocks.clear()
    resumed = plays.new(1, prompt + expected[:5], num_prompt_tokens=50, generation=1)
    outputs = [runner.execute(plays.plan([plays.chunk(1, 0, 55, True)], removed=[1], new=[resumed]))]
    lengths = {1: 56}
    outputs += [runner.execute(plays.decode_plan(lengths)) for _ in range(6)]
    assert [output.token_ids[0] for output in outputs] == expected[5:]
    assert all(output.generations == [1] for output in outputs)


def test_a_fork_shares_full_blocks_and_copies_the_tail(driver: ModuleType, llama: Path) -> None:
    """| shared block | shared block | tail: 10 of 16, copied for the child |; both then write there."""
    prompt = list(range(10, 52))
    expected = alone(driver, llama, prompt, 8)
    other = alone(driver, llama, [*prompt, 99], 7)
    runner = driver.make_runner(llama)
    plays = driver.Driver(runner.settings)
    (plan,) = plays.prefill_plans({1: prompt})
    runner.execute(plan)
    shared, tail = plan.chunks[0].new_block_ids[:2], plan.chunks[0].new_block_ids[2]
    copied = plays.free_blocks.pop()
    plays.num_blocks[2] = 3
    child = plays.new(2, [*prompt, 99], num_prompt_tokens=42, block_ids=[*shared, copied])
    chunks = [plays.chunk(1, 42, 1, True), plays.chunk(2, 42, 1, True)]
    outputs = [runner.execute(plays.plan(chunks, new=[child], block_copies=[(tail, copied)]))]
    lengths = {1: 44, 2: 44}
    outputs += [runner.execute(plays.decode_plan(lengths)) for _ in range(6)]
    assert [output.token_ids[0] for output in outputs] == expected[1:8]
    assert [output.token_ids[1] for output in outputs] == other


def test_a_plan_without_chunks_only_changes_what_is_known(driver: ModuleType, llama: Path) -> None:
    runner = driver.make_runner(llama)
    plays = driver.Driver(runner.settings)
    for plan in plays.prefill_plans({1: [1, 2, 3]}):
        runner.execute(plan)
    assert runner.execute(StepPlan(9, removed=[1])) == StepOutput(9)
    assert len(runner.table) == 0
    assert runner.table.blocks.sum() == 0


# --- prompt logprobs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [None, 7])
def test_prompt_logprobs_are_those_of_every_row(driver: ModuleType, llama: Path, chunk_size: int | None) -> None:
    prompt = list(range(10, 50))
    runner = driver.make_runner(llama)
    runner.outputs.rows_per_piece = 3
    hidden = driver.watch_hidden(runner)
    asks = replace(GREEDY, prompt_logprobs=2, logprobs=1)
    scores, drawn = [], None
    for plan in driver.Driver(runner.settings).prefill_plans({1: prompt}, chunk_size, asks):
        output = runner.execute(plan)
        scores += output.prompt_logprobs.get(1, [])
        drawn = output
    expected = torch.log_softmax(driver.all_logits(runner, hidden), -1)
    assert [score.token_id for score in scores] == prompt[1:]
    for position, score in enumerate(scores):
        assert score.logprob == pytest.approx(expected[position, score.token_id].item(), abs=1e-4)
        assert score.top[0][0] == expected[position].argmax()
        assert len(score.top) == 2
    assert drawn is not None
    assert drawn.logprobs[0] is not None
    assert drawn.logprobs[0].logprob == pytest.approx(expected[-1].max().item(), abs=1e-4)


def test_outputs_of_a_resumed_sequence_are_not_scored(driver: ModuleType, llama: Path) -> None:
    runner = driver.make_runner(llama)
    plays = driver.Driver(runner.settings)
    asks = replace(GREEDY, prompt_logprobs=0)
    resumed = plays.new(1, [10, 11, 12, 13, 14, 15], asks, num_prompt_tokens=4)
    output = runner.execute(plays.plan([plays.chunk(1, 0, 6, True)], new=[resumed]))
    assert [score.token_id for score in output.prompt_logprobs[1]] == [11, 12, 13]


# --- failures of one sequence -------------------------------------------------------------------------------------

POISON = 299
"""A token whose embedding is NaN."""


@pytest.fixture
def poisoned(llama: Path, tmp_path: Path) -> Path:
    import shutil

    from safetensors.torch import load_file, save_file

    path = tmp_path / "poisoned"
    shutil.copytree(llama, path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_a_sequence_with_nan_fails_alone_and_its_blocks_can_be_reused(driver: ModuleType, poisoned: Path) -> None:
    good, bad = list(range(10, 40)), [20, POISON, 21]
    expected = alone(driver, poisoned, good, 6)
    runner = driver.make_runner(poisoned)
    plays = driver.Driver(runner.settings)
    (plan,) = plays.prefill_plans({1: good, 2: bad})
    output = runner.execute(plan)
    assert output.seq_ids == [1]
    assert output.token_ids == expected[:1]
    assert output.errors.keys() == {2}
    assert "NaN" in output.errors[2]
    lengths = {1: 31, 2: 4}  # planned before the failure was known
    output = runner.execute(plays.decode_plan(lengths))
    assert output.token_ids == expected[1:2]
    assert output.errors.keys() == {2}

    plays.free_blocks += plan.chunks[1].new_block_ids  # now the next to be taken, NaN and all
    reuse = plays.plan([plays.chunk(3, 0, 5, True)], removed=[2], new=[plays.new(3, good[:5])])
    assert reuse.chunks[0].new_block_ids == plan.chunks[1].new_block_ids
    outputs = [runner.execute(reuse)]
    lengths = {1: 32, 3: 6}
    outputs += [runner.execute(plays.decode_plan(lengths)) for _ in range(3)]
    assert [output.errors for output in outputs] == [{}] * 4
    drawn = [output.token_ids[output.seq_ids.index(3)] for output in outputs]
    assert drawn == alone(driver, poisoned, good[:5], 4)


def test_nan_in_a_scored_prompt_is_an_error_of_that_sequence(driver: ModuleType, poisoned: Path) -> None:
    runner = driver.make_runner(poisoned)
    plays = driver.Driver(runner.settings)
    asks = replace(GREEDY, prompt_logprobs=1)
    new = [plays.new(1, [20, POISON, 21, 22], asks), plays.new(2, [20, 21, 22], asks)]
    output = runner.execute(plays.plan([plays.chunk(1, 0, 4, True), plays.chunk(2, 0, 3, True)], new=new))
    assert output.errors.keys() == {1}
    assert output.prompt_logprobs.keys() == {2}
    assert output.seq_ids == [2]


def test_more_sequences_than_promised_is_our_bug(driver: ModuleType, llama: Path) -> None:
    runner = driver.make_runner(llama, max_num_seqs=1)
    plays = driver.Driver(runner.settings)
    (plan,) = plays.prefill_plans({1: [1], 2: [2]})
    with pytest.raises(AssertionError, match="max_num_seqs 1"):
        runner.execute(plan)
