"""Whole models on context-parallel ranks (threads): the tokens and logits of one rank, however steps are cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shoal.configs.errors import ConfigError
from shoal.model_shards.engine.plan import ScheduledChunk, StepOutput, StepPlan, TokenLogprobs
from shoal.model_shards.parallel.mesh import MeshShape
from shoal.model_shards.runner.loading import check_mesh
from shoal.model_shards.sampling.params import SamplingParams
from shoal.model_shards.weights.open import open_checkpoint

TinyCheckpoint = Callable[..., Path]

GREEDY = SamplingParams(temperature=0.0)
SCORED = replace(GREEDY, prompt_logprobs=1, logprobs=1)
TINY: dict[str, Any] = {"num_hidden_layers": 2, "max_position_embeddings": 8192}
LONG = {"max_model_len": 4224, "num_blocks": 600, "max_num_batched_tokens": 8192}
MODELS = [("llama", TINY), ("qwen3", TINY)]


def prompt(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(count)]


def logprobs_of(output: StepOutput) -> list[float]:
    """Of every token that is drawn or scored in a step, and of the likeliest beside it."""
    entries: list[TokenLogprobs | None] = list(output.logprobs)
    for scores in output.prompt_logprobs.values():
        entries += scores
    return [value for entry in entries if entry is not None for value in (entry.logprob, *(p for _, p in entry.top))]


class Watched:
    """Runs plans and keeps what the tokens' logprobs were."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.logprobs: list[float] = []

    def __call__(self, plan: StepPlan) -> StepOutput:
        output: StepOutput = self.runner.execute(plan)
        self.logprobs += logprobs_of(output)
        return output


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("size", [2, 4])
def test_tokens_of_one_rank_at_four_thousand_tokens(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType, thread_ranks: ModuleType, family: str, size: int
) -> None:
    """Whole, and in chunks that divide neither the prompts nor the blocks, beside decodes and short prompts."""
    path = tiny_checkpoint(family, **TINY)
    prompts = [prompt(4096), prompt(1, 1), prompt(333, 2), prompt(17, 3)]
    alone = driver.make_runner(path, **LONG)
    expected = driver.generate(alone.execute, alone.settings, prompts, 70)
    ranks = thread_ranks.ThreadRunners(driver, path, size, **LONG)
    assert {len(pages.k) for pages in ranks.runners[0].pages} == {600}
    for chunk_size in (None, 1001):
        drawn = driver.generate(ranks.execute, ranks.settings, prompts, 70, chunk_size=chunk_size)
        assert drawn == expected
        ranks.execute(StepPlan(10_000, removed=list(range(len(prompts)))))


def test_logits_are_those_of_one_rank_and_the_same_bits_in_any_chunks(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType, thread_ranks: ModuleType
) -> None:
    path = tiny_checkpoint("qwen3", **TINY)
    prompts = [prompt(700), prompt(50, 1)]
    alone = driver.make_runner(path, max_model_len=800, max_num_batched_tokens=1024)
    one = Watched(alone)
    expected = driver.generate(one, alone.settings, prompts, 40, sampling=SCORED)
    ranks = thread_ranks.ThreadRunners(driver, path, 3, max_model_len=800, max_num_batched_tokens=1024)
    whole = None
    for chunk_size in (None, 350, 20):
        several = Watched(ranks)
        drawn = driver.generate(several, ranks.settings, prompts, 40, chunk_size=chunk_size, sampling=SCORED)
        assert drawn == expected
        assert sorted(several.logprobs) == pytest.approx(sorted(one.logprobs), abs=1e-5)
        whole = whole or sorted(several.logprobs)
        assert sorted(several.logprobs) == whole, "to the last bit"
        ranks.execute(StepPlan(10_000, removed=[0, 1]))


def test_a_cached_prefix_a_fork_and_a_preempted_sequence_go_on(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType, thread_ranks: ModuleType
) -> None:
    """As the scheduler plans them: shared blocks first, a copied tail block, outputs recomputed with the prompt."""
    path = tiny_checkpoint("llama", **TINY)
    tokens = prompt(230)
    for size in (1, 2):
        if size == 1:
            runner: Any = driver.make_runner(path, max_model_len=512)
        else:
            runner = thread_ranks.ThreadRunners(driver, path, size, max_model_len=512)
        plays = driver.Driver(runner.settings)
        block = runner.settings.tokens_per_block
        shared = 200 // block * block
        runner.execute(plays.prefill_plans({1: tokens})[0])
        table = runner.table.blocks if size == 1 else runner.runners[0].table.blocks
        blocks = [int(b) for b in table[0, : -(-len(tokens) // block)]]
        # A hit on the full blocks; the rest of this prompt is another one.
        other = tokens[:shared] + prompt(90, 5)
        plays.num_blocks[2] = shared // block
        hit = runner.execute(
            plays.plan(
                [plays.chunk(2, shared, len(other) - shared, True)],
                new=[plays.new(2, other, block_ids=blocks[: shared // block])],
            )
        )
        # A fork: all blocks but the last, which is copied; the last token is computed again.
        tail = plays.free_blocks.pop()
        plays.num_blocks[3] = len(blocks)
        forked = runner.execute(
            plays.plan(
                [ScheduledChunk(3, len(tokens) - 1, 1, [], True)],
                new=[plays.new(3, tokens, block_ids=[*blocks[:-1], tail])],
                block_copies=[(blocks[-1], tail)],
            )
        )
        drawn = [hit.token_ids, forked.token_ids]
        lengths = {2: len(other) + 1, 3: len(tokens) + 1}
        drawn += [runner.execute(plays.decode_plan(lengths)).token_ids for _ in range(5)]
        # Sequence 2 is preempted and comes back with what it has drawn.
        outputs = [drawn[0][0], *(column[0] for column in drawn[2:])]
        again = plays.new(2, other + outputs, num_prompt_tokens=len(other))
        plays.num_blocks[2] = 0
        resumed = runner.execute(
            plays.plan([plays.chunk(2, 0, len(other) + len(outputs), True)], removed=[2], new=[again])
        )
        drawn.append(resumed.token_ids)
        if size == 1:
            expected = drawn
        assert drawn == expected


def test_sliding_windows_are_shared_out_where_they_divide(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType, thread_ranks: ModuleType
) -> None:
    path = tiny_checkpoint("gemma3")
    prompts = [prompt(150), prompt(3, 1)]
    alone = driver.make_runner(path)
    expected = driver.generate(alone.execute, alone.settings, prompts, 20)
    ranks = thread_ranks.ThreadRunners(driver, path, 2)
    assert driver.generate(ranks.execute, ranks.settings, prompts, 20, chunk_size=40) == expected


def test_only_rows_that_are_read_come_to_the_sampling_rank(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType, thread_ranks: ModuleType
) -> None:
    path = tiny_checkpoint("llama", **TINY)
    ranks = thread_ranks.ThreadRunners(driver, path, 2)
    brought: list[tuple[int, list[int]]] = []
    for context in ranks.ranks.contexts:
        exchange = context.all_to_all

        def watched(x: Any, sent: list[int], *rest: Any, exchange: Any = exchange, **named: Any) -> Any:
            if x.dim() == 2:  # hidden states, not partial attention
                brought.append((x.shape[1], sent))
            return exchange(x, sent, *rest, **named)

        context.all_to_all = watched
    plays = driver.Driver(ranks.settings)
    ranks.execute(plays.prefill_plans({1: prompt(60), 2: prompt(61, 1), 3: prompt(3, 2)})[0])
    # The last rows are at positions 59, 60 and 2: rank 1 has the first, rank 0 the second and, as all ranks, the third.
    assert sorted(brought) == [(64, [1, 0]), (64, [2, 0])]
    brought.clear()
    ranks.execute(plays.decode_plan({1: 61, 2: 62, 3: 4}))
    assert brought == [], "decodes are on every rank"


@pytest.mark.parametrize(
    ("family", "mesh", "named"),
    [
        ("mistral", MeshShape(cp_size=5), r"context_parallel_size 5 does not divide the sliding window of 24 tokens"),
        ("llama", MeshShape(cp_size=2, dp_size=2), r"context_parallel_size is 2, .* data_parallel_size above 1"),
        ("deepseek_v3", MeshShape(cp_size=2), r"context_parallel_size is 2, .* multi-head latent attention"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tiny_checkpoint: TinyCheckpoint, family: str, mesh: MeshShape, named: str
) -> None:
    config = open_checkpoint(driver_source(tiny_checkpoint(family))).config
    with pytest.raises(ConfigError, match=named):
        check_mesh(config, mesh)


def driver_source(path: Path) -> Any:
    from shoal.model_shards.weights.sources import ModelSource

    return ModelSource(path.name, "safetensors", path)
