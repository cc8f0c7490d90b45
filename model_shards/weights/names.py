"""Tensor names: one table per family from GGUF names to the canonical ones, which are those of Hugging Face."""

from __future__ import annotations

import re

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"

GGUF_ROPE_FACTORS = "rope_freqs.weight"
"""Not a weight: the frequency factors of Llama 3, which become part of the config."""

_GLOBAL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

_DENSE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}

# GGUF architecture -> names inside one layer. Gemma's four norms shift the meaning of `ffn_norm`.
LAYER_NAMES: dict[str, dict[str, str]] = {
    "llama": _DENSE,
    "qwen2": _DENSE,
    "qwen3": {**_DENSE, **_QK_NORM},
    "gemma3": {
        **_DENSE,
        **_QK_NORM,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}

_GGUF_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")


def canonical_from_gguf(name: str, architecture: str) -> str:
    """The canonical name of a GGUF tensor. A name the family does not have is returned as it is, so that the accounting
    reports it in the words of the file."""
    match = _GGUF_LAYER.fullmatch(name)
    if match:
        layer, part, kind = match.groups()
        inner = LAYER_NAMES[architecture].get(part)
        return name if inner is None else f"model.layers.{int(layer)}.{inner}.{kind}"
    part, _, kind = name.rpartition(".")
    return f"{_GLOBAL[part]}.{kind}" if part in _GLOBAL and kind in ("weight", "bias") else name
