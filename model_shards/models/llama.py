"""Llama and its kin: Llama 1-3, Mistral, Qwen2/2.5, Qwen3 (Touvron et al. 2023, arXiv:2302.13971), Mixtral, Qwen3-MoE.

Pre-norm layers of grouped-query attention with rotary positions and a gated MLP. The families differ in data only:
biases on q, k, v (Qwen2), norms on q and k (Qwen3), sliding windows (Mistral), experts in place of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shoal.kernels.ops import AttentionMetadata, HeadNorms
from shoal.kernels.page_format import KVPages
from shoal.model_shards.models.config import ModelConfig
from shoal.model_shards.models.decoder import Decoder
from shoal.model_shards.models.moe import make_mlp
from shoal.model_shards.models.stage import Stage
from shoal.model_shards.parallel.linear import QKVLinear, RowLinear
from shoal.model_shards.parallel.loader import WeightLoader


class Attention:
    """Causal self-attention over the paged cache."""

    def __init__(self, config: ModelConfig, layer: int, load: WeightLoader, cos_sin: torch.Tensor) -> None:
        prefix = f"model.layers.{layer}.self_attn"
        hidden, heads = config.hidden_size, (config.num_heads, config.num_kv_heads)
        self.qkv = QKVLinear(load, prefix, hidden, heads, config.head_dim, bias=config.qkv_bias)
        width = config.num_heads * config.head_dim
        self.output = RowLinear(load, f"{prefix}.o_proj", hidden, width, bias=config.output_bias)
        self.norms = None
        if config.qk_norm:
            q_norm, k_norm = (
                load.norm(f"{prefix}.{name}.weight", config.head_dim, config.norm_offset)
                for name in ("q_norm", "k_norm")
            )
            self.norms = HeadNorms(q_norm, k_norm, config.rms_eps)
        self.scale = config.softmax_scale
        self.window = config.window(layer)
        self.cos_sin = cos_sin
        self.ops, self.attend = load.ops, load.attention

    def __call__(self, x: torch.Tensor, pages: KVPages, meta: AttentionMetadata) -> torch.Tensor:
        q = self.ops.rotary_store_kv(self.qkv(x), self.cos_sin, pages, meta, self.norms)
        return self.output(self.attend(q, pages, meta, self.scale, self.window).flatten(1))


AttentionFactory = Callable[
    [ModelConfig, int, WeightLoader, torch.Tensor], Callable[[torch.Tensor, KVPages, AttentionMetadata], torch.Tensor]
]


class LlamaLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        load: WeightLoader,
        cos_sin: torch.Tensor,
        make_attention: AttentionFactory = Attention,
    ) -> None:
        prefix, hidden, offset = f"model.layers.{layer}", config.hidden_size, config.norm_offset
        self.attention_norm = load.norm(f"{prefix}.input_layernorm.weight", hidden, offset)
        self.attention = make_attention(config, layer, load, cos_sin)
        self.mlp_norm = load.norm(f"{prefix}.post_attention_layernorm.weight", hidden, offset)
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


def make_llama(config: ModelConfig, stage: Stage, load: WeightLoader, num_positions: int) -> Decoder:
    return Decoder(config, stage, load, num_positions, LlamaLayer)
