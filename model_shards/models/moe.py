"""Layers whose MLP is a choice of experts: Mixtral (Jiang et al. 2024, arXiv:2401.04088), Qwen3-MoE (Qwen Team 2025,
arXiv:2505.09388), DeepSeek-V3 (DeepSeek-AI 2024, arXiv:2412.19437).

The families differ in data only: how scores are made and weighted (`MoEConfig`), and what the file calls the tensors
(`shapes.moe_names`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shoal.model_shards.models.config import ModelConfig
from shoal.model_shards.models.mlp import MLP
from shoal.model_shards.models.routing import select_experts
from shoal.model_shards.models.shapes import moe_names
from shoal.model_shards.parallel.experts import ExpertMLP, ParallelExperts
from shoal.model_shards.parallel.loader import WeightLoader


class MoE:
    """The weighted sum of what a token's experts make of it, and of what the experts that all tokens visit do.

    The router is held whole by every rank, and computes in fp32 whatever the weights' dtype: a choice of experts that
    rounding decided would be another choice on another rank."""

    def __init__(self, load: WeightLoader, config: ModelConfig, layer: int) -> None:
        assert config.moe is not None
        self.config = config.moe
        names = moe_names(config, layer)
        router = (self.config.num_experts, config.hidden_size)
        self.router = load.ops.prepare_router(load.fp32(f"{names.router}.weight", router))
        self.selection_bias = None
        if self.config.selection_bias:
            self.selection_bias = load.fp32(names.selection_bias, router[:1])
        self.experts = ExpertMLP(load, config, layer)
        self.shared = None
        if self.config.shared_size:
            self.shared = MLP(load, config, names.shared, self.config.shared_size)
        self.ops, self.context = load.ops, load.context

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, hidden] -> [n, hidden], n being the rows that the rank holds; n may be 0."""
        if self.experts.parallel is None:  # every rank works on every row: they come together once
            x = self.context.whole_rows(x)
        logits = self.ops.router_logits(x, self.router)
        choice = self.ops.choose_experts(logits, self.selection_bias, self.config)
        expert_ids, weights = choice or select_experts(logits, self.selection_bias, self.config)
        chosen = self.experts(x, expert_ids, weights)
        return chosen if self.shared is None else chosen + self.shared(x)


def parallel_experts(mlps: Iterable[object]) -> list[ParallelExperts]:
    """Of those MLPs that are a choice of experts, the ones that are shared out whole."""
    found = [mlp.experts.parallel for mlp in mlps if isinstance(mlp, MoE)]
    return [experts for experts in found if experts is not None]


def make_mlp(config: ModelConfig, layer: int, load: WeightLoader) -> MLP | MoE:
    """What a layer has after its attention."""
    if config.moe is None or layer in config.moe.dense_layers:
        return MLP(load, config, f"model.layers.{layer}.mlp", config.intermediate_size)
    return MoE(load, config, layer)
