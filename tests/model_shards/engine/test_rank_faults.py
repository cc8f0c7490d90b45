"""A rank that hangs while several steps are under way ends every stream in time, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shoal.configs.errors import EngineDeadError
from shoal.configs.schema import EngineConfig
from shoal.model_shards.engine.build import build_engine
from shoal.model_shards.engine.request import FinishReason, Request
from shoal.model_shards.executor.multiprocess import MultiprocessExecutor
from shoal.model_shards.sampling.params import SamplingParams

DEADLINE_S = 3.0


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("family", "mesh", "hanging"),
    [
        ("llama", {"pipeline_parallel_size": 2}, 1),
        ("qwen3_moe", {"data_parallel_size": 2, "expert_parallel": True}, 1),
    ],
)
def test_a_rank_that_hangs_ends_all_streams_within_the_deadline(
    tiny_checkpoint: Callable[..., Path], kit: ModuleType, family: str, mesh: dict[str, Any], hanging: int
) -> None:
    config = EngineConfig(
        model=str(tiny_checkpoint(family)), dtype="float32", num_threads=1, max_model_len=512,
        kv_cache_memory="8MiB", step_timeout_s=DEADLINE_S, **mesh,
    )  # fmt: skip
    engine = build_engine(config)
    executor = engine._executor
    assert isinstance(executor, MultiprocessExecutor)
    pids = [rank.process.pid for rank in executor._ranks]
    engine.start()
    sink, names = kit.Collector(), [f"r{i}" for i in range(8)]
    sampling = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)
    for i, name in enumerate(names):
        engine.submit(Request(name, [i, 1, 2], sampling, seed=0), sink)
    sink.wait_until(lambda: all(len(sink.tokens(name)) > 3 for name in names), 60)
    os.kill(pids[hanging], signal.SIGSTOP)
    began = time.monotonic()
    for name in names:
        sink.wait(name, timeout=60)
    took = time.monotonic() - began
    assert took < DEADLINE_S + 2.0
    # An error, in words, and one that says that the request could go on elsewhere.
    assert {sink.reason(name) for name in names} == {FinishReason.ABORT}
    assert all("has stopped" in (sink.of(name)[-1].error or "") for name in names)
    assert not engine.healthy
    with pytest.raises(EngineDeadError):
        engine.submit(Request("late", [1], sampling, seed=0), sink)
    engine.shutdown()
    assert not any(is_running(pid) for pid in pids), "rank processes are left"
    assert engine.stats().kv_usage == 0
    assert engine.stats().num_live_requests == 0
