"""Context parallelism through processes and the whole engine: the text of one rank, and every block back at the end."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shoal.configs.schema import EngineConfig
from shoal.model_shards.engine.build import build_engine
from shoal.model_shards.engine.engine import Engine, EngineStats
from shoal.model_shards.engine.request import Request
from shoal.model_shards.executor.multiprocess import MultiprocessExecutor
from shoal.model_shards.sampling.params import SamplingParams

TinyCheckpoint = Callable[..., Path]

TINY: dict[str, Any] = {"num_hidden_layers": 2, "max_position_embeddings": 8192}


def prompt(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(count)]


@pytest.mark.parametrize(
    ("family", "tp", "pp", "cp", "expert_parallel"),
    [("qwen3", 1, 1, 4, False), ("qwen3", 2, 1, 2, False), ("qwen3_moe", 1, 2, 2, True)],
)
def test_processes_draw_the_tokens_of_one_rank(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType, family: str, tp: int, pp: int, cp: int, expert_parallel: bool
) -> None:
    path = tiny_checkpoint(family, **TINY)
    runner = driver.make_runner(path, max_model_len=4224, num_blocks=600, max_num_batched_tokens=8192)
    prompts = [prompt(4096, 0), prompt(2, 1), prompt(211, 2)]
    expected = driver.generate(runner.execute, runner.settings, prompts, 40)
    settings = replace(
        runner.settings,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        context_parallel_size=cp,
        expert_parallel=expert_parallel,
        sequence_parallel_min_tokens=100 if tp > 1 else 0,
    )
    executor = MultiprocessExecutor(settings)
    try:

        def execute(plan: Any) -> Any:
            return executor.submit(plan).result(120)

        assert driver.generate(execute, settings, prompts, 40, chunk_size=1500) == expected
    finally:
        executor.close()


def requests() -> list[Request]:
    """Prompts of which some begin alike, of many lengths; one asks for two samples, one is sampled by a seed."""
    shared = prompt(150, 9)
    tokens = [*(shared + prompt(20 + 30 * i, i) for i in range(4)), *(prompt(3 + 40 * i, 20 + i) for i in range(5))]
    params = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)
    made = [Request(str(i), each, params, i) for i, each in enumerate(tokens)]
    made.append(Request("two", prompt(75, 40), replace(params, n=2, temperature=0.8, seed=7), 7))
    return made


def run(engine: Engine, kit: ModuleType) -> tuple[dict[tuple[str, int], list[int]], EngineStats]:
    sink = kit.Collector()
    engine.start()
    try:
        asked = requests()
        for request in asked:
            engine.submit(request, sink)
        for request in asked:
            sink.wait(request.request_id, n=request.sampling.n, timeout=120)
        drawn = {
            (request.request_id, index): sink.tokens(request.request_id, index)
            for request in asked
            for index in range(request.sampling.n)
        }
    finally:
        engine.shutdown()
    stats = engine.stats()
    engine._scheduler.kv.check_integrity()
    assert stats.kv_blocks_free == stats.kv_blocks
    return drawn, stats


def test_an_engine_of_two_ranks_gives_the_text_of_one(tiny_checkpoint: TinyCheckpoint, kit: ModuleType) -> None:
    """Chunks beside decodes, prefix hits, samples that share a prompt, and a pool so small that some are preempted."""
    path = tiny_checkpoint("qwen3", **TINY)
    block = 2 * 16 * 2 * 32 * 4 * 2  # K and V of 16 tokens, 2 heads of 32 in fp32, 2 layers
    options: dict[str, Any] = {"model": str(path), "device": "cpu", "max_model_len": 512, "max_num_seqs": 8}
    options |= {"max_num_batched_tokens": 256, "prefill_chunk_size": 100, "dtype": "float32", "kv_dtype": "float32"}
    alone, _ = run(build_engine(EngineConfig(**options, kv_cache_memory=200 * block)), kit)
    engine = build_engine(EngineConfig(**options, kv_cache_memory=28 * block, context_parallel_size=2))
    assert engine.memory_plan is not None
    assert (engine.memory_plan.block_size, engine.memory_plan.num_tokens) == (32, 27 * 32)
    together, stats = run(engine, kit)
    assert together == alone
    assert stats.preemptions_total > 0
    assert stats.cached_prompt_tokens_total > 0
