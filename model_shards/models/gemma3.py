"""Gemma 3, text (Gemma Team 2025, arXiv:2503.19786).

Llama's attention and MLP between norms on both sides. As data: norms multiply by 1 + weight, embeddings are scaled,
q and k are normed, GELU gates, and five of six layers see a sliding window with a rotary base of their own.
"""

from __future__ import annotations

import torch

from shoal.kernels.ops import AttentionMetadata
from shoal.kernels.page_format import KVPages
from shoal.model_shards.models.config import ModelConfig
from shoal.model_shards.models.decoder import Decoder
from shoal.model_shards.models.llama import Attention
from shoal.model_shards.models.moe import make_mlp
from shoal.model_shards.models.stage import Stage
from shoal.model_shards.parallel.loader import WeightLoader


class Gemma3Layer:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, config: ModelConfig, layer: int, load: WeightLoader, cos_sin: torch.Tensor) -> None:
        def norm(name: str) -> torch.Tensor:
            return load.norm(f"model.layers.{layer}.{name}.weight", config.hidden_size, config.norm_offset)

        self.before_attention = norm("input_layernorm")
        self.attention = Attention(config, layer, load, cos_sin)
        self.after_attention = norm("post_attention_layernorm")
        self.before_mlp = norm("pre_feedforward_layernorm")
        self.mlp = make_mlp(config, layer, load)
        self.after_mlp = norm("post_feedforward_layernorm")
        self.eps = config.rms_eps
        self.ops = load.ops

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, pages: KVPages, meta: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.ops.rms_norm(x, self.before_attention, self.eps, residual)
        x, _ = self.ops.rms_norm(self.attention(x, pages, meta), self.after_attention, self.eps)
        x, residual = self.ops.rms_norm(x, self.before_mlp, self.eps, residual)
        x, _ = self.ops.rms_norm(self.mlp(x), self.after_mlp, self.eps)
        return x, residual


def make_gemma3(config: ModelConfig, stage: Stage, load: WeightLoader, num_positions: int) -> Decoder:
    return Decoder(config, stage, load, num_positions, Gemma3Layer)
