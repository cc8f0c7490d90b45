"""The engine over ranks in processes: many sequences in flight over stages and data-parallel parts give the tokens of
one rank, whatever joins, leaves or is displaced on the way, and every block comes back."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shoal.configs.schema import EngineConfig
from shoal.model_shards.engine.build import build_engine
from shoal.model_shards.engine.engine import Engine
from shoal.model_shards.engine.parts import SchedulerParts
from shoal.model_shards.engine.request import FinishReason, Request, RequestDelta
from shoal.model_shards.engine.scheduler import Scheduler
from shoal.model_shards.sampling.params import SamplingParams

TinyCheckpoint = Callable[..., Path]

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "max_model_len": 128,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "kv_cache_memory": "4MiB",
}
TIED = {"tie_word_embeddings": True}
SMALL = 10
"""Blocks of a pool that is too small for what runs."""


def mesh(block_kib: int, **settings: Any) -> dict[str, Any]:
    """`block_kib`: KiB of one block on a rank."""
    return {"kv_cache_memory": f"{SMALL * block_kib}KiB", **settings}


MESHES = [
    pytest.param("llama", {**TIED, "num_hidden_layers": 4}, mesh(8, pipeline_parallel_size=2), id="pp2-tied"),
    pytest.param("llama", {}, mesh(4, pipeline_parallel_size=3), id="pp3"),
    pytest.param("llama", {}, mesh(4, tensor_parallel_size=2, pipeline_parallel_size=2), id="tp2-pp2"),
    pytest.param("qwen3_moe", {}, mesh(24, data_parallel_size=2, expert_parallel=True), id="dp2-ep2"),
    pytest.param(
        "qwen3_moe",
        {},
        mesh(
            12,
            data_parallel_size=2,
            tensor_parallel_size=2,
            expert_parallel=True,
            num_redundant_experts=4,
            expert_rebalance_interval=5,
        ),
        id="dp2-tp2-ep4-moving",
    ),
    pytest.param(
        "qwen3_moe",
        {},
        mesh(16, data_parallel_size=2, pipeline_parallel_size=2, expert_parallel=True),
        id="dp2-pp2",
    ),
]


def start(path: Path, **settings: Any) -> Engine:
    engine = build_engine(EngineConfig(model=str(path), **{**DEFAULTS, **settings}))
    engine.start()
    return engine


def parts_of(engine: Engine) -> list[Scheduler]:
    scheduler = engine._scheduler
    return scheduler.parts if isinstance(scheduler, SchedulerParts) else [scheduler]


def requests(prefix: str) -> list[Request]:
    """More than run at once: some that start in a block and grow to four, so that a small pool is short of blocks; then
    of all lengths, greedy and seeded, forked, scored, and such as only score."""
    greedy = SamplingParams(temperature=0.0, max_tokens=42, ignore_eos=True)
    made = [Request(f"{prefix}grows{i}", [i * 10 + 3] * 15, greedy, seed=0) for i in range(8)]
    for i in range(12):
        prompt = [(7 * i + 3 * position) % 320 for position in range([3, 1, 30, 17, 80][i % 5])]
        sampling = SamplingParams(
            temperature=0.0 if i % 3 else 0.8,
            max_tokens=[14, 5, 20][i % 3],
            ignore_eos=True,
            n=2 if i % 8 == 1 else 1,
            logprobs=2 if i % 4 == 0 else None,
            prompt_logprobs=1 if i % 6 == 2 else None,
        )
        made.append(Request(f"{prefix}{i}", prompt, sampling, seed=1000 + i))
    made.append(Request(f"{prefix}scored", [5, 6, 7, 8] * 9, SamplingParams(max_tokens=0, prompt_logprobs=0), seed=1))
    return made


def answers(kit: ModuleType, engine: Engine, asked: list[Request]) -> dict[tuple[str, int], list[int]]:
    sink = kit.Collector()
    for request in asked:
        engine.submit(request, sink)
    for request in asked:
        sink.wait(request.request_id, request.sampling.n, timeout=300)
    for request in asked:
        scored = sink.of(request.request_id)[0].prompt_logprobs
        if request.sampling.prompt_logprobs is not None:
            assert scored is not None
            assert [entry and entry.token_id for entry in scored] == [None, *request.prompt_token_ids[1:]]
    keys = [(request.request_id, index) for request in asked for index in range(request.sampling.n)]
    assert {sink.reason(*key) for key in keys} == {FinishReason.LENGTH}
    return {(name[1:], index): sink.tokens(name, index) for name, index in keys}


def leave_early(kit: ModuleType, engine: Engine) -> Callable[[], None]:
    """Requests that are aborted when they have three tokens; call the result to wait for their end."""

    class Leaver(kit.Collector):  # type: ignore[name-defined, misc]
        def deliver(self, deltas: list[RequestDelta]) -> None:
            super().deliver(deltas)
            for delta in deltas:
                if delta.num_output_tokens >= 3 and delta.finish_reason is None:
                    engine.abort(delta.request_id)

    sink, names = Leaver(), [f"leaver {i}" for i in range(6)]
    for i, name in enumerate(names):
        sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        engine.submit(Request(name, [i] * (10 * i + 5), sampling, seed=0), sink)

    def wait() -> None:
        for name in names:
            sink.wait(name, timeout=300)
        assert {sink.reason(name) for name in names} == {FinishReason.ABORT}
        assert all(3 <= len(sink.tokens(name)) < 60 for name in names)

    return wait


def check_all_blocks_are_back(engine: Engine) -> None:
    for part in parts_of(engine):
        part.kv.check_integrity()
        assert part.kv.num_free_blocks == part.kv.num_total_blocks


@pytest.fixture(scope="module")
def of_one_rank(tiny_checkpoint: TinyCheckpoint, kit: ModuleType) -> Callable[..., dict[tuple[str, int], list[int]]]:
    """What one rank answers, by model; computed once."""
    known: dict[Path, dict[tuple[str, int], list[int]]] = {}

    def compute(path: Path) -> dict[tuple[str, int], list[int]]:
        if path not in known:
            engine = start(path)
            known[path] = answers(kit, engine, requests("a"))
            engine.shutdown()
        return known[path]

    return compute


@pytest.mark.parametrize(("family", "overrides", "mesh"), MESHES)
def test_a_mesh_answers_as_one_rank_does(
    tiny_checkpoint: TinyCheckpoint,
    kit: ModuleType,
    of_one_rank: Callable[..., dict[tuple[str, int], list[int]]],
    caplog: pytest.LogCaptureFixture,
    family: str,
    overrides: dict[str, Any],
    mesh: dict[str, Any],
) -> None:
    caplog.set_level(logging.INFO)
    path = tiny_checkpoint(family, **overrides)
    expected = of_one_rank(path)
    engine = start(path, **mesh)
    try:
        wait_for_leavers = leave_early(kit, engine)
        assert answers(kit, engine, requests("a")) == expected
        wait_for_leavers()
        # One request alone: other parts have nothing to do, and most of a pipeline neither.
        (one,) = [request for request in requests("b") if request.request_id == "b2"]
        assert answers(kit, engine, [one]) == {("2", 0): expected["2", 0]}
        check_all_blocks_are_back(engine)
        stats = engine.stats()
        assert stats.kv_blocks == stats.kv_blocks_free == sum(part.kv.num_total_blocks for part in parts_of(engine))
        assert (stats.num_running, stats.num_waiting, stats.num_live_requests) == (0, 0, 0)
        assert stats.output_tokens_total > sum(map(len, expected.values())) + len(expected["2", 0])
        assert stats.preemptions_total > 0
        assert all(part.counters.output_tokens > 0 for part in parts_of(engine))
        assert ("layers were rebalanced" in caplog.text) == ("expert_rebalance_interval" in mesh)
    finally:
        engine.shutdown()
    times = engine.stats().rank_times
    assert {rank.steps for rank in times.values()} == {engine.stats().steps_total}, "every rank takes every step"
    assert len(times) == math.prod(size for name, size in mesh.items() if name.endswith("parallel_size"))
