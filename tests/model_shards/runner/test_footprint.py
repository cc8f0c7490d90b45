"""What is foretold about memory is what is then allocated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgpack
import pytest
import torch

from shoal.kernels.ops import LinearWeight
from shoal.model_shards.quantization.schemes import DenseScheme
from shoal.model_shards.runner.footprint import (
    MAX_CAPTURED_TOKENS,
    PROGRAM_BYTES,
    activation_bytes,
    captured_bytes,
    kv_bytes_per_block,
    max_logit_rows,
    weights_bytes,
)
from shoal.model_shards.runner.model_runner import ModelRunner
from shoal.model_shards.runner.settings import RunnerSettings


def stored_bytes(value: Any, seen: set[int]) -> int:
    """Bytes of all tensors and linear weights that a model object reaches, tables of angles apart."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, LinearWeight | torch.Tensor):
        return value.nbytes
    if isinstance(value, list):
        return sum(stored_bytes(item, seen) for item in value)
    if not type(value).__module__.startswith(("shoal.model_shards.models", "shoal.model_shards.parallel")):
        return 0
    return sum(stored_bytes(item, seen) for name, item in getattr(value, "__dict__", {}).items() if name != "cos_sin")


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("gemma3", {}),
    ],
)
def test_weights_and_pages(
    tiny_checkpoint: Callable[..., Path], driver: ModuleType, family: str, overrides: dict[str, Any]
) -> None:
    runner: ModelRunner = driver.make_runner(tiny_checkpoint(family, **overrides), backend="reference")
    assert stored_bytes(runner.model, set()) == weights_bytes(runner.config, DenseScheme(torch.float32))
    per_block = kv_bytes_per_block(runner.config, runner.settings.block_size, torch.float32)
    assert sum(pages.k.nbytes + pages.v.nbytes for pages in runner.pages) == per_block * runner.settings.num_blocks


def test_shards_divide_what_they_can(tiny_checkpoint: Callable[..., Path], driver: ModuleType) -> None:
    config = driver.make_runner(tiny_checkpoint("llama"), backend="reference").config
    whole, half = (weights_bytes(config, DenseScheme(torch.float32), tp_size=tp) for tp in (1, 2))
    norms = (2 * config.num_layers + 1) * config.hidden_size * 4
    assert half == (whole - norms) // 2 + norms
    assert kv_bytes_per_block(config, 16, torch.float32, tp_size=2) * 2 == kv_bytes_per_block(config, 16, torch.float32)
    assert kv_bytes_per_block(config, 16, torch.float32, tp_size=4) == kv_bytes_per_block(
        config, 16, torch.float32, tp_size=2
    )  # two KV heads: four ranks hold each twice


def test_activations_grow_with_the_step(tiny_checkpoint: Callable[..., Path], driver: ModuleType) -> None:
    config = driver.make_runner(tiny_checkpoint("llama"), backend="reference").config
    small, large = (activation_bytes(config, tokens, 256, torch.float32) for tokens in (256, 512))
    assert large - small == 256 * 4 * (5 * 64 + 128 + 2 * 64 + 3 * 128)
    assert max_logit_rows(262144) == 64


def test_captured_steps_are_counted_where_they_can_be(tiny_checkpoint: Callable[..., Path], driver: ModuleType) -> None:
    """One rank a stage has programs, of steps up to a bound; with tensor parallelism there are none."""
    config = driver.make_runner(tiny_checkpoint("llama"), backend="reference").config
    pool = captured_bytes(config, MAX_CAPTURED_TOKENS, torch.float32)
    assert captured_bytes(config, 8, torch.float32) < pool
    one, split = (activation_bytes(config, 512, 256, torch.float32, tp_size) for tp_size in (1, 2))
    assert one - split > pool + PROGRAM_BYTES
    small, large = (activation_bytes(config, tokens, 256, torch.float32) for tokens in (32, 64))
    assert large - small > captured_bytes(config, 64, torch.float32) - captured_bytes(config, 32, torch.float32)


def test_settings_travel_as_plain_values(tmp_path: Path, driver: ModuleType) -> None:
    settings = driver.settings_for(tmp_path, dtype=torch.bfloat16, tensor_parallel_size=2, backend="reference")
    assert RunnerSettings.from_wire(msgpack.unpackb(msgpack.packb(settings.to_wire()))) == settings
