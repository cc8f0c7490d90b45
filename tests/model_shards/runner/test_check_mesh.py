"""A mesh that a model of experts cannot be shared out over is refused, with the numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.configs.errors import ConfigError
from shoal.model_shards.models.config import ModelConfig, MoEConfig
from shoal.model_shards.parallel.mesh import MeshShape
from shoal.model_shards.runner.loading import check_mesh

MOE = ModelConfig(
    family="qwen3_moe",
    hidden_size=64,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=99,
    vocab_size=320,
    max_position=512,
    rms_eps=1e-6,
    rope_theta=1e4,
    moe=MoEConfig(num_experts=12, experts_per_token=2, expert_size=48, shared_size=24),
)
DENSE = replace(MOE, family="qwen3", intermediate_size=128, moe=None)


@pytest.mark.parametrize(
    "mesh",
    [
        MeshShape(tp_size=2),  # intermediate_size 99 belongs to no layer
        MeshShape(tp_size=2, expert_parallel=True),
        MeshShape(tp_size=2, dp_size=2, pp_size=2, expert_parallel=True),
        MeshShape(tp_size=2, dp_size=4, expert_parallel=True, num_redundant_experts=4),
        MeshShape(tp_size=2, expert_parallel=True, num_redundant_experts=12),
        MeshShape(expert_parallel=True),
    ],
)
def test_what_fits(mesh: MeshShape) -> None:
    check_mesh(MOE, mesh)


@pytest.mark.parametrize(
    ("config", "mesh", "param", "message"),
    [
        (DENSE, {"dp_size": 2}, "data_parallel_size", "data_parallel_size is 2, but expert_parallel is off"),
        (MOE, {"dp_size": 2}, "data_parallel_size", "nothing in common but experts"),
        (DENSE, {"expert_parallel": True}, "expert_parallel", "this qwen3 model has no experts"),
        (
            MOE,
            {"tp_size": 8, "expert_parallel": True},
            "num_redundant_experts",
            "12 experts and num_redundant_experts 0 are 12 slots, .* over the 8 ranks .* num_redundant_experts to 4,",
        ),
        (
            MOE,
            {"tp_size": 2, "dp_size": 2, "expert_parallel": True, "num_redundant_experts": 3},
            "num_redundant_experts",
            "15 slots, .* 4 ranks .* to 4,",
        ),
        (
            MOE,
            {"tp_size": 2, "expert_parallel": True, "num_redundant_experts": 14},
            "num_redundant_experts",
            "is 14, but 12 experts on 2 ranks can use at most 12",
        ),
        (
            replace(MOE, moe=MoEConfig(num_experts=12, experts_per_token=2, expert_size=49)),
            {"tp_size": 2},
            "tensor_parallel_size",
            "expert_size 49 cannot be split over tensor_parallel_size 2",
        ),
        (
            replace(MOE, moe=MoEConfig(num_experts=12, experts_per_token=2, expert_size=49, shared_size=25)),
            {"tp_size": 2, "expert_parallel": True},
            "tensor_parallel_size",
            "shared_size 25 cannot be split",
        ),
        (
            replace(MOE, moe=MoEConfig(12, 2, 48, dense_layers=frozenset({0}))),
            {"tp_size": 2},
            "tensor_parallel_size",
            "intermediate_size 99 cannot be split",
        ),
    ],
)
def test_what_does_not(config: ModelConfig, mesh: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        check_mesh(config, MeshShape(**mesh))
    assert error.value.param == param
