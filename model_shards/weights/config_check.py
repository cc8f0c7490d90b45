"""Sanity of a parsed ModelConfig, whatever file it came from."""

from __future__ import annotations

import math

from shoal.configs.errors import ModelLoadError
from shoal.model_shards.models.config import ModelConfig, MoEConfig

MAX_DIM = 1 << 24
MAX_LAYERS = 10_000
MAX_EXPERTS = 4096


def check_num_layers(num_layers: int, where: str) -> None:
    """Bounds what a corrupt file can make us enumerate; call it before making anything per layer."""
    if not 1 <= num_layers <= MAX_LAYERS:
        raise ModelLoadError(f"{where}: {num_layers} layers cannot be right.")


def check_config(config: ModelConfig, where: str) -> None:
    """Raises ModelLoadError when the numbers contradict each other; `where` is the file they came from."""
    check_num_layers(config.num_layers, where)
    for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size"):
        value = getattr(config, name)
        if not 1 <= value <= MAX_DIM:
            raise ModelLoadError(f"{where}: {name} is {value}, which cannot be right.")
    if config.num_heads % config.num_kv_heads:
        raise ModelLoadError(
            f"{where}: {config.num_heads} query heads cannot be shared among {config.num_kv_heads} key-value heads."
        )
    if config.head_dim % 2:
        raise ModelLoadError(f"{where}: head_dim is {config.head_dim}; rotary embeddings need an even one.")
    if config.max_position < 1:
        raise ModelLoadError(f"{where}: the context length is {config.max_position}, which cannot be right.")
    for name in ("rms_eps", "rope_theta"):
        value = getattr(config, name)
        if not (math.isfinite(value) and value > 0):
            raise ModelLoadError(f"{where}: {name} is {value}; a positive number was expected.")
    if config.sliding_layers and (config.sliding_window is None or config.sliding_window < 1):
        raise ModelLoadError(f"{where}: layers with a sliding window, but the window is {config.sliding_window}.")
    if config.moe is not None:
        _check_experts(config.moe, where)
    for token_id in (config.bos_token_id, *config.eos_token_ids):
        if token_id is not None and not 0 <= token_id < config.vocab_size:
            raise ModelLoadError(
                f"{where}: special token id {token_id} lies outside the vocabulary of {config.vocab_size}."
            )


def _check_experts(moe: MoEConfig, where: str) -> None:
    if not 1 <= moe.num_experts <= MAX_EXPERTS:
        raise ModelLoadError(f"{where}: {moe.num_experts} experts cannot be right.")
    if not (1 <= moe.expert_size <= MAX_DIM and 0 <= moe.shared_size <= MAX_DIM):
        raise ModelLoadError(f"{where}: experts of size {moe.expert_size} (shared {moe.shared_size}) cannot be right.")
    if moe.num_groups < 1 or moe.num_experts % moe.num_groups:
        raise ModelLoadError(f"{where}: {moe.num_experts} experts do not make {moe.num_groups} equal groups.")
    if not 1 <= moe.groups_per_token <= moe.num_groups:
        raise ModelLoadError(f"{where}: a token cannot choose {moe.groups_per_token} of {moe.num_groups} groups.")
    choice = moe.num_experts // moe.num_groups * moe.groups_per_token
    if not 1 <= moe.experts_per_token <= choice:
        raise ModelLoadError(f"{where}: a token cannot choose {moe.experts_per_token} of {choice} experts.")
