"""Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434), absorbed.

The cache holds one latent and one rotated key a token. Keys and values of the heads are never made: the projection that
would make keys is applied to the queries instead, and the one that would make values to the result. All steps take this
one form, prefill too. Expanding keys and values costs fewer operations there (for DeepSeek-V3 640 a query, key and head
instead of 2,176, from some 170 query tokens of a sequence in a step on, which pay for expanding the keys before them),
but it rounds differently: a prompt's text would depend on how it was cut into steps.
"""

from __future__ import annotations

import torch

from shoal.kernels.ops import AttentionMetadata, LatentNorm
from shoal.kernels.page_format import KVPages
from shoal.model_shards.models.config import ModelConfig
from shoal.model_shards.parallel.latent import LORA_NORM_EPS, LatentProjection, head_projections
from shoal.model_shards.parallel.linear import RowLinear
from shoal.model_shards.parallel.loader import WeightLoader


class LatentAttention:
    """Causal self-attention over latent pages."""

    def __init__(self, config: ModelConfig, layer: int, load: WeightLoader, cos_sin: torch.Tensor) -> None:
        mla, prefix = config.mla, f"model.layers.{layer}.self_attn"
        assert mla is not None
        self.project = LatentProjection(load, config, mla, prefix)
        norm = load.norm(f"{prefix}.kv_a_layernorm.weight", mla.kv_lora_rank, 0.0)
        self.norm = LatentNorm(norm, LORA_NORM_EPS)
        self.absorb_key, self.absorb_value = head_projections(load, config, mla, f"{prefix}.kv_b_proj")
        width = config.num_heads * mla.v_head_dim
        self.output = RowLinear(load, f"{prefix}.o_proj", config.hidden_size, width, bias=config.output_bias)
        self.scale = config.softmax_scale
        self.cos_sin = cos_sin
        self.ops = load.ops

    def __call__(self, x: torch.Tensor, pages: KVPages, meta: AttentionMetadata) -> torch.Tensor:
        q_nope, q_rope, kv = self.project(x)
        self.ops.rotary_store_latent(q_rope, kv, self.norm, self.cos_sin, pages, meta)
        q = self.ops.head_linear(q_nope, self.absorb_key)
        latents = self.ops.paged_mla_attention(q, q_rope, pages, meta, self.scale)
        return self.output(self.ops.head_linear(latents, self.absorb_value).flatten(1))
