"""What is foretold about memory is what is then allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import msgpack
import pytest
import torch

from shoal.kernels.ops import GroupedWeight, LinearWeight
from shoal.model_shards.parallel.mesh import MeshShape
from shoal.model_shards.quantization.schemes import DenseScheme
from shoal.model_shards.runner.footprint import (
    MAX_CAPTURED_TOKENS,
    StepLimits,
    activation_bytes,
    captured_bytes,
    graph_bytes,
    graph_sizes,
    kv_bytes_per_block,
    max_logit_rows,
    program_bytes,
    weights_bytes,
)
from shoal.model_shards.runner.model_runner import ModelRunner
from shoal.model_shards.runner.settings import RunnerSettings


def stored_bytes(value: Any, seen: set[int]) -> int:
    """Bytes of all tensors and linear weights that a model object reaches, tables of angles apart."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, LinearWeight | GroupedWeight | torch.Tensor):
        return value.nbytes
    if isinstance(value, list):
        return sum(stored_bytes(item, seen) for item in value)
    if not type(value).__module__.startswith(
        ("shoal.model_shards.models", "shoal.model_shards.parallel", "shoal.kernels.ops")
    ):
        return 0
    names = [field.name for field in fields(value)] if is_dataclass(value) else getattr(value, "__dict__", {})
    return sum(stored_bytes(getattr(value, name), seen) for name in names if name != "cos_sin")


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("gemma3", {}),
        ("mixtral", {}),
        ("qwen3_moe", {"attention_bias": True}),
        ("deepseek_v3", {}),
        ("deepseek_v3", {"q_lora_rank": None, "first_k_dense_replace": 3}),
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
    whole, half = (weights_bytes(config, DenseScheme(torch.float32), MeshShape(tp)) for tp in (1, 2))
    norms = (2 * config.num_layers + 1) * config.hidden_size * 4
    assert half == (whole - norms) // 2 + norms
    assert kv_bytes_per_block(config, 16, torch.float32, tp_size=2) * 2 == kv_bytes_per_block(config, 16, torch.float32)
    assert kv_bytes_per_block(config, 16, torch.float32, tp_size=4) == kv_bytes_per_block(
        config, 16, torch.float32, tp_size=2
    )  # two KV heads: four ranks hold each twice


def test_experts_are_shared_out_in_slices_or_whole(tiny_checkpoint: Callable[..., Path], driver: ModuleType) -> None:
    config = driver.make_runner(tiny_checkpoint("qwen3_moe"), backend="reference").config
    scheme = DenseScheme(torch.float32)
    expert = 3 * 48 * 64 * 4
    layers, of_experts = 3, 2  # one of the three layers has a plain MLP
    attention = (2 * 4 + 2 * 2) * 32 * 64 * 4
    kept = (layers * 2 + 1) * 64 * 4 + layers * 2 * 32 * 4 + of_experts * 8 * 64 * 4  # norms and routers
    divided = layers * attention + 3 * 128 * 64 * 4 + 2 * 320 * 64 * 4
    assert weights_bytes(config, scheme) == kept + divided + of_experts * 8 * expert
    for mesh, slots in (
        (MeshShape(2), 4.0),
        (MeshShape(2, expert_parallel=True), 4),
        (MeshShape(2, expert_parallel=True, num_redundant_experts=2), 5),
        (MeshShape(2, dp_size=4, expert_parallel=True), 1),
    ):
        assert weights_bytes(config, scheme, mesh) == kept + divided // 2 + of_experts * slots * expert


def test_rows_that_visit_experts_are_counted(tiny_checkpoint: Callable[..., Path], driver: ModuleType) -> None:
    """A row for each of a token's three experts; whole experts may get the rows of every rank."""
    config = driver.make_runner(tiny_checkpoint("qwen3_moe"), backend="reference").config

    def per_token(mesh: MeshShape) -> int:
        small, large = (activation_bytes(config, limits(max_num_batched_tokens=n), mesh) for n in (256, 512))
        return (large - small) // 256 // 4

    attention = 5 * 64 + (4 + 2 * 2) * 32 + 2 * 4 * 32
    at_home = (2 * 3 + 2) * 64 + 8 + 3 * 8
    assert per_token(MeshShape()) == attention + at_home + 3 * (2 * 64 + 3 * 48)
    attention = 5 * 64 + (2 + 2 * 1) * 32 + 2 * 2 * 32
    assert per_token(MeshShape(2)) == attention + at_home + 3 * (2 * 64 + 3 * 24)
    assert per_token(MeshShape(2, dp_size=2, expert_parallel=True)) == attention + at_home + 2 * 2 * (2 * 64 + 3 * 48)


def limits(**changes: Any) -> StepLimits:
    values: dict[str, Any] = {
        "device": "cpu",
        "activation_dtype": torch.float32,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 64,
        "max_model_len": 256,
        "block_size": 16,
    }
    return StepLimits(**{**values, **changes})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_activations_grow_with_the_step(tiny_checkpoint: Callable[..., Path], driver: ModuleType, device: str) -> None:
    config = driver.make_runner(tiny_checkpoint("llama"), backend="reference").config
    small, large = (
        activation_bytes(config, limits(device=device, max_num_batched_tokens=tokens)) for tokens in (256, 512)
    )
    inputs = 256 * 3 * 8 if device == "cuda" else 0  # token ids, positions and slots
    assert large - small == 256 * 4 * (5 * 64 + 128 + 2 * 64 + 3 * 128) + inputs
    assert max_logit_rows(262144, "cpu") == 64
    assert max_logit_rows(262144, "cuda") == 256


def test_captured_steps_are_counted_where_they_can_be(tiny_checkpoint: Callable[..., Path], driver: ModuleType) -> None:
    """On a CPU one rank a stage has programs, of steps up to a bound; with tensor parallelism there are none."""
    config = driver.make_runner(tiny_checkpoint("llama"), backend="reference").config
    pool = captured_bytes(config, MAX_CAPTURED_TOKENS, 64, torch.float32)
    assert captured_bytes(config, 8, 8, torch.float32) < pool
    one, split = (activation_bytes(config, limits(), MeshShape(tp_size)) for tp_size in (1, 2))
    assert one - split > pool + program_bytes(config, MAX_CAPTURED_TOKENS, 64)
    small, large = (activation_bytes(config, limits(max_num_batched_tokens=tokens)) for tokens in (32, 64))
    more = captured_bytes(config, 64, 64, torch.float32) - captured_bytes(config, 32, 32, torch.float32)
    assert large - small > more


def test_graphs_are_counted_on_a_gpu(tiny_checkpoint: Callable[..., Path], driver: ModuleType) -> None:
    config = driver.make_runner(tiny_checkpoint("llama"), backend="reference").config
    few, many = (limits(device="cuda", max_num_seqs=count) for count in (8, 256))
    assert graph_bytes(config, few) < graph_bytes(config, many)
    assert activation_bytes(config, many) - activation_bytes(config, few) == (
        graph_bytes(config, many) - graph_bytes(config, few)
    )
    assert graph_bytes(config, many, MeshShape(tp_size=2)) < graph_bytes(config, many)


@pytest.mark.parametrize("largest", [1, 2, 3, 7, 8, 9, 64, 100, 255, 256, 257, 1000])
def test_graph_sizes_ascend_to_the_largest_step(largest: int) -> None:
    sizes = graph_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == largest
    assert all(after <= 2 * before + 1 for before, after in pairwise(sizes))
    assert len(sizes) <= 64


def test_settings_travel_as_plain_values(tmp_path: Path, driver: ModuleType) -> None:
    settings = driver.settings_for(tmp_path, dtype=torch.bfloat16, tensor_parallel_size=2, backend="reference")
    assert RunnerSettings.from_wire(msgpack.unpackb(msgpack.packb(settings.to_wire()))) == settings
