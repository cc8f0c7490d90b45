"""Writes GGUF files for tests: a tiny Hugging Face checkpoint converted as llama.cpp's converter does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import safe_open

Quant = gguf.GGMLQuantizationType

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_LAYER = {
    **_LAYER,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GLOBAL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def convert_to_gguf(
    directory: Path, path: Path, *, matrices: Quant = Quant.F32, extra_metadata: dict[str, Any] | None = None
) -> Path:
    """The checkpoint of `tiny_models` in `directory` as one GGUF file, its matrices quantized to `matrices`."""
    config = json.loads((directory / "config.json").read_text())
    family = config["model_type"].removesuffix("_text")
    architecture = "llama" if family == "mistral" else family
    writer = gguf.GGUFWriter(path, architecture)
    _write_config(writer, config, architecture)
    write_byte_vocab(writer)
    for key, value in (extra_metadata or {}).items():
        _add(writer, key, value)
    for name, tensor in _tensors(directory).items():
        values = _as_stored(name, tensor, config, architecture)
        kind = matrices if values.ndim == 2 else Quant.F32
        writer.add_tensor(_gguf_name(name, architecture), gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_byte_vocab(writer: gguf.GGUFWriter) -> None:
    """256 bytes, two control tokens, one merge; padded as converters pad."""
    from shoal.model_shards.tokenizer.vocab_bytes import BYTE_ALPHABET

    tokens = sorted(BYTE_ALPHABET) + ["<|bos|>", "<|im_end|>", "he"] + [f"[PAD{index}]" for index in range(259, 320)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3, 3, 1] + [5] * 61)
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)


def _write_config(writer: gguf.GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    rope = config["rope_parameters"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if architecture == "gemma3":
        writer.add_sliding_window(config["sliding_window"])


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            tensors.update({name: handle.get_tensor(name) for name in handle.keys()})  # noqa: SIM118
    return tensors


def _as_stored(name: str, tensor: torch.Tensor, config: dict[str, Any], architecture: str) -> np.ndarray:
    values = tensor.float().numpy()
    if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    if architecture == "gemma3" and name.endswith("norm.weight"):
        values = values + 1
    return np.ascontiguousarray(values, dtype=np.float32)


def _gguf_name(name: str, architecture: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _GLOBAL:
        return f"{_GLOBAL[stem]}.{kind}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{(_GEMMA_LAYER if architecture == 'gemma3' else _LAYER)[inner]}.{kind}"


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
