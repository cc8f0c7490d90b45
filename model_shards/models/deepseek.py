"""DeepSeek-V3 and R1 (DeepSeek-AI 2024, arXiv:2412.19437): latent attention; the first layers have a plain MLP, the
others experts chosen by sigmoid scores, a bias and groups, beside one that every token visits."""

from __future__ import annotations

import torch

from shoal.kernels.ops import AttentionMetadata
from shoal.kernels.page_format import KVPages
from shoal.model_shards.models.config import ModelConfig
from shoal.model_shards.models.decoder import Decoder
from shoal.model_shards.models.mla import LatentAttention
from shoal.model_shards.models.moe import make_mlp
from shoal.model_shards.models.stage import Stage
from shoal.model_shards.parallel.loader import WeightLoader


class DeepseekLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int, load: WeightLoader, cos_sin: torch.Tensor) -> None:
        prefix, hidden = f"model.layers.{layer}", config.hidden_size
        self.attention_norm = load.norm(f"{prefix}.input_layernorm.weight", hidden, 0.0)
        self.attention = LatentAttention(config, layer, load, cos_sin)
        self.mlp_norm = load.norm(f"{prefix}.post_attention_layernorm.weight", hidden, 0.0)
        self.mlp = make_mlp(config, layer, load)
        self.eps = config.rms_eps
        self.ops = load.ops

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, pages: KVPages, meta: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.ops.rms_norm(x, self.attention_norm, self.eps, residual)
        x = self.attention(x, pages, meta)
        x, residual = self.ops.rms_norm(x, self.mlp_norm, self.eps, residual)
        return self.mlp(x), residual


def make_deepseek(config: ModelConfig, stage: Stage, load: WeightLoader, num_positions: int) -> Decoder:
    return Decoder(config, stage, load, num_positions, DeepseekLayer)
