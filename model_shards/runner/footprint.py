"""How much memory a rank will need, from the configuration alone: the planner asks before anything is allocated.

Each function answers for the heaviest rank of the mesh, in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shoal.kernels.page_format import PageFormat
from shoal.model_shards.models.config import ModelConfig
from shoal.model_shards.models.stage import Stage, cut_stages
from shoal.model_shards.parallel.split import HeadSplit, split_evenly, vocab_shard_rows
from shoal.model_shards.quantization.schemes import LinearShape, WeightScheme
from shoal.model_shards.weights.names import EMBEDDING, LM_HEAD

LOGITS_BYTES = 64 << 20
"""Logits of one piece at most: longer columns of rows are sampled or scored piece by piece."""

MAX_CAPTURED_TOKENS = 64
"""Tokens of the largest step that runs as a program; beyond, what the operators do outweighs calling them."""

PROGRAM_BYTES = 16 << 20
"""Recordings of all programs of a rank; a layer takes about 1 KiB of one."""

_CAPTURED_SLACK = 64 << 10
"""Alignment and gaps in the pool of captured steps."""

_LOGITS_COPIES = 4
"""Logits as computed, in fp32, as probabilities, and sorted."""


def weights_bytes(config: ModelConfig, scheme: WeightScheme, tp_size: int = 1, pp_size: int = 1) -> int:
    """Weights as the scheme keeps them (a backend that widens them says so in its `LinearWeight.nbytes`) and fp32
    norms."""
    return max(_stage_weights(config, stage, scheme, tp_size) for stage in cut_stages(config, pp_size))


def kv_bytes_per_block(
    config: ModelConfig, block_size: int, kv_dtype: torch.dtype, tp_size: int = 1, pp_size: int = 1
) -> int:
    """K and V of one block in all layers of the rank."""
    kv_heads = HeadSplit.of_rank(config.num_heads, config.num_kv_heads, tp_size, 0).num_kv_heads
    page = PageFormat("canonical", block_size, kv_heads, config.head_dim, kv_dtype)
    return page.bytes_per_block * max(len(stage.layers) for stage in cut_stages(config, pp_size))


def activation_bytes(
    config: ModelConfig,
    max_num_batched_tokens: int,
    max_model_len: int,
    activation_dtype: torch.dtype,
    tp_size: int = 1,
) -> int:
    """Hidden states of the largest step, logits of the largest piece, the rotary tables, and the captured steps (one
    rank a stage). An upper estimate: it counts a layer's intermediate results as if none were freed within it."""
    per_token = _activations_per_token(config, tp_size)
    tables = 1 if config.rope_local_theta is None else 2
    rotary = tables * max_model_len * config.head_dim * torch.float32.itemsize
    logits = _LOGITS_COPIES * max_logit_rows(config.vocab_size) * config.vocab_size * torch.float32.itemsize
    captured = 0
    if tp_size == 1:
        tokens = min(MAX_CAPTURED_TOKENS, max_num_batched_tokens)
        captured = captured_bytes(config, tokens, activation_dtype) + PROGRAM_BYTES
    return max_num_batched_tokens * per_token * activation_dtype.itemsize + logits + rotary + captured


def captured_bytes(config: ModelConfig, num_tokens: int, activation_dtype: torch.dtype) -> int:
    """What a program of so many tokens computes: hidden states and logits, of one rank a stage."""
    logits = min(num_tokens, max_logit_rows(config.vocab_size)) * config.vocab_size * torch.float32.itemsize
    return num_tokens * _activations_per_token(config, 1) * activation_dtype.itemsize + logits + _CAPTURED_SLACK


def max_logit_rows(vocab_size: int) -> int:
    """Rows of logits that are held at once."""
    return max(1, LOGITS_BYTES // (vocab_size * torch.float32.itemsize))


def _activations_per_token(config: ModelConfig, tp_size: int) -> int:
    """Elements that a layer makes of one token."""
    heads = HeadSplit.of_rank(config.num_heads, config.num_kv_heads, tp_size, 0)
    inner = config.intermediate_size // tp_size
    qkv = (heads.num_heads + 2 * heads.num_kv_heads) * config.head_dim
    return 5 * config.hidden_size + qkv + 2 * heads.num_heads * config.head_dim + 3 * inner


def _stage_weights(config: ModelConfig, stage: Stage, scheme: WeightScheme, tp_size: int) -> int:
    norms = (4 if config.sandwich_norms else 2) * config.hidden_size + (2 * config.head_dim if config.qk_norm else 0)
    total_norms = norms * len(stage.layers) + (config.hidden_size if stage.is_last else 0)
    matrices = sum(map(scheme.linear_bytes, _linears(config, stage, tp_size)))
    return matrices + total_norms * torch.float32.itemsize


def _linears(config: ModelConfig, stage: Stage, tp_size: int) -> Iterator[LinearShape]:
    """What the stage's layers ask for, on its heaviest rank, embedding and head included."""
    heads = HeadSplit.of_rank(config.num_heads, config.num_kv_heads, tp_size, 0)
    hidden, inner = config.hidden_size, len(split_evenly("intermediate_size", config.intermediate_size, tp_size, 0))
    query, kv = heads.num_heads * config.head_dim, heads.num_kv_heads * config.head_dim

    def linear(prefix: str, names: str, rows: tuple[int, ...], cols: int, bias: bool) -> LinearShape:
        return LinearShape(tuple(f"{prefix}.{name}.weight" for name in names.split()), rows, cols, bias)

    for layer in stage.layers:
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        yield linear(attention, "q_proj k_proj v_proj", (query, kv, kv), hidden, config.qkv_bias)
        yield linear(attention, "o_proj", (hidden,), query, config.output_bias)
        yield linear(mlp, "gate_proj up_proj", (inner, inner), hidden, config.mlp_bias)
        yield linear(mlp, "down_proj", (hidden,), inner, config.mlp_bias)
    rows = (vocab_shard_rows(config.vocab_size, tp_size),)
    if stage.is_last:
        yield LinearShape((EMBEDDING if config.tie_embeddings else LM_HEAD,), rows, hidden)
    if stage.is_first and not (stage.is_last and config.tie_embeddings):
        yield LinearShape((EMBEDDING,), rows, hidden)
