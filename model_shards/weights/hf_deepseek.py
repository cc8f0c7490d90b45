"""What a `config.json` of DeepSeek-V3 and R1 says beyond what all decoders' do: latents, experts, further layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.configs.errors import ModelLoadError
from shoal.model_shards.models.config import MLAConfig, ModelConfig, MoEConfig
from shoal.model_shards.weights.hf_fields import Fields

DEEPSEEK_DEFAULTS: dict[str, Any] = {
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rope_interleave": True,
    "num_nextn_predict_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""What transformers assumes for an absent key."""

# Keys that DeepSeek's own modelling code reads, and the values that this one stands for.
_ONLY: dict[str, tuple[Any, ...]] = {
    "moe_layer_freq": (None, 1),
    "scoring_func": (None, "sigmoid"),
    "topk_method": (None, "noaux_tc"),
    "sliding_window": (None,),
}


def refuse_fp8(raw: Mapping[str, Any], where: str) -> None:
    """Raises ModelLoadError for weights as DeepSeek publishes them."""
    config = raw.get("quantization_config")
    if isinstance(config, dict) and config.get("quant_method") == "fp8":
        raise ModelLoadError(
            f"{where}: quantization_config says that the weights are fp8 in blocks, which cannot be read yet. Use a "
            "checkpoint in bfloat16 (DeepSeek's repository has a script that converts), whose config.json has no "
            "quantization_config."
        )


def with_latents(fields: Fields, config: ModelConfig, softmax_factor: float) -> ModelConfig:
    """`config` of all decoders' keys, with DeepSeek's. `softmax_factor`: what the rotary scaling multiplies scores by.
    Raises ModelLoadError naming the key that is malformed or not supported."""
    for key, allowed in _ONLY.items():
        if fields.raw.get(key) not in allowed:
            raise ModelLoadError(f"{fields.where}: {key} {fields.raw[key]!r:.100} is not supported.")
    heads = config.num_heads
    if fields.integer("num_key_value_heads", heads) != heads:
        raise ModelLoadError(
            f"{fields.where}: num_key_value_heads is not num_attention_heads, but latents have no heads."
        )
    mla = MLAConfig(
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
        v_head_dim=fields.integer("v_head_dim"),
        q_lora_rank=fields.integer("q_lora_rank") if fields.present("q_lora_rank") else None,
        rope_interleave=fields.flag("rope_interleave"),
    )
    if config.qkv_bias and mla.q_lora_rank is None:
        raise ModelLoadError(f"{fields.where}: attention_bias is not supported where q_lora_rank is null.")
    head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    return replace(
        config,
        head_dim=head_dim,
        num_kv_heads=heads,
        query_scale=head_dim**-0.5 * softmax_factor,
        mla=mla,
        moe=_moe(fields, config.num_layers),
        num_nextn_layers=_num_nextn(fields),
    )


def _moe(fields: Fields, layers: int) -> MoEConfig | None:
    """None where every layer is a dense one."""
    dense = frozenset(range(min(fields.integer("first_k_dense_replace", minimum=0), layers)))
    if len(dense) == layers:
        return None
    size = fields.integer("moe_intermediate_size")
    return MoEConfig(
        num_experts=fields.integer("n_routed_experts"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        expert_size=size,
        scoring="sigmoid",
        normalize=fields.flag("norm_topk_prob"),
        scale=fields.number("routed_scaling_factor"),
        selection_bias=True,
        num_groups=fields.integer("n_group"),
        groups_per_token=fields.integer("topk_group"),
        shared_size=fields.integer("n_shared_experts", minimum=0) * size,
        dense_layers=dense,
    )


def _num_nextn(fields: Fields) -> int:
    """transformers 5 has another name for it."""
    key = "num_mtp_layers" if fields.has("num_mtp_layers") else "num_nextn_predict_layers"
    return fields.integer(key, minimum=0)
