"""Every gap in the settings is filled once, from the machine."""

from __future__ import annotations

import dataclasses

import pytest

from shoal.configs.errors import ConfigError
from shoal.configs.resolve import Machine, resolve_engine
from shoal.configs.schema import EngineConfig

GIB = 1 << 30
LAPTOP = Machine(num_gpus=0, available_ram=10 * GIB)
GPU_BOX = Machine(num_gpus=2, available_ram=100 * GIB, free_gpu_memory=80 * GIB)


def test_a_laptop() -> None:
    settings = resolve_engine(EngineConfig(model="m"), LAPTOP)
    assert (settings.device, settings.dtype, settings.kv_dtype) == ("cpu", "bfloat16", "bfloat16")
    assert (settings.max_num_seqs, settings.max_num_batched_tokens) == (64, 256)
    assert settings.target_itl_ms == 80
    assert settings.memory_budget == 8 * GIB
    assert settings.kv_cache_limit == 10 * GIB // 8


def test_a_gpu() -> None:
    settings = resolve_engine(EngineConfig(model="m", tensor_parallel_size=2), GPU_BOX)
    assert (settings.device, settings.dtype, settings.kv_dtype) == ("cuda", "bfloat16", "bfloat16")
    assert (settings.max_num_seqs, settings.max_num_batched_tokens) == (256, 8192)
    assert settings.target_itl_ms == 0
    assert settings.memory_budget == 72 * GIB
    assert settings.kv_cache_limit == 80 * GIB


def test_what_is_written_is_kept() -> None:
    config = EngineConfig(
        model="m",
        device="cpu",
        dtype="bfloat16",
        kv_dtype="float32",
        max_num_seqs=600,
        memory_budget=GIB,
        target_itl_ms=0,
    )
    settings = resolve_engine(config, GPU_BOX)
    assert (settings.device, settings.dtype, settings.kv_dtype) == ("cpu", "bfloat16", "float32")
    assert (settings.max_num_seqs, settings.max_num_batched_tokens) == (600, 600)
    assert settings.memory_budget == GIB
    assert settings.kv_cache_limit is None
    assert settings.target_itl_ms == 0


def test_ranks_on_a_cpu_share_its_memory() -> None:
    assert resolve_engine(EngineConfig(model="m", pipeline_parallel_size=2), LAPTOP).memory_budget == 4 * GIB


def test_a_kv_size_alone_needs_no_budget() -> None:
    assert resolve_engine(EngineConfig(model="m", kv_cache_memory=GIB), LAPTOP).memory_budget is None
    both = EngineConfig(model="m", kv_cache_memory=GIB, memory_fraction=0.5)
    assert resolve_engine(both, LAPTOP).memory_budget == 5 * GIB


@pytest.mark.parametrize(
    ("config", "param", "message"),
    [
        (EngineConfig(model="m", device="cuda"), "device", "1 ranks need a GPU each, but 0 are visible"),
        (EngineConfig(model="m", max_num_batched_tokens=8), "max_num_batched_tokens", "max_num_seqs=64"),
        (EngineConfig(model="m", memory_budget=20 * GIB), "memory_budget", "20 GiB, but only 10 GiB"),
        (EngineConfig(model="m", num_redundant_experts=4), "num_redundant_experts", "is 4, but expert_parallel is off"),
        (
            EngineConfig(model="m", expert_rebalance_interval=100),
            "expert_rebalance_interval",
            "is 100, but expert_parallel is off",
        ),
    ],
)
def test_contradictions_are_refused(config: EngineConfig, param: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_engine(config, LAPTOP)
    assert caught.value.param == param


def test_sequence_parallelism_begins_beyond_captured_decodes() -> None:
    assert resolve_engine(EngineConfig(model="m"), LAPTOP).sequence_parallel_min_tokens == 0
    assert resolve_engine(EngineConfig(model="m"), GPU_BOX).sequence_parallel_min_tokens == 1024
    many = EngineConfig(model="m", max_num_seqs=2000)
    assert resolve_engine(many, GPU_BOX).sequence_parallel_min_tokens == 2001
    never = EngineConfig(model="m", sequence_parallel_min_tokens=0)
    assert resolve_engine(never, GPU_BOX).sequence_parallel_min_tokens == 0
    early = EngineConfig(model="m", sequence_parallel_min_tokens=256)
    assert resolve_engine(early, LAPTOP).sequence_parallel_min_tokens == 256
    with pytest.raises(ConfigError, match="sequence_parallel_min_tokens=256 must be more than max_num_seqs=256"):
        resolve_engine(early, GPU_BOX)


def test_it_is_frozen() -> None:
    settings = resolve_engine(EngineConfig(model="m"), LAPTOP)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.max_num_seqs = 1  # type: ignore[misc]


def test_quantized_weights_are_for_the_cpu() -> None:
    assert resolve_engine(EngineConfig(model="m", weights="packed"), Machine(0, GIB)).weights == "packed"
    assert resolve_engine(EngineConfig(model="m"), Machine(0, GIB)).weights == "dense"
    with pytest.raises(ConfigError, match="only the CPU's operators can multiply") as caught:
        resolve_engine(EngineConfig(model="m", weights="int8"), Machine(1, GIB, GIB))
    assert caught.value.param == "weights"
