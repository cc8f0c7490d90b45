"""How much memory a rank will need, from the configuration alone: the planner asks before anything is allocated.

Each function answers for the heaviest rank of the mesh, in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shoal.kernels.page_format import PageFormat
from shoal.model_shards.models.config import ModelConfig
from shoal.model_shards.models.shapes import Projection, layer_shapes
from shoal.model_shards.models.stage import Stage, cut_stages
from shoal.model_shards.parallel.split import HeadSplit, vocab_shard_rows
from shoal.model_shards.quantization.schemes import LinearShape, WeightScheme
from shoal.model_shards.runner.device_inputs import packed_bytes
from shoal.model_shards.weights.names import EMBEDDING, LM_HEAD

LOGITS_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
"""Logits of one piece at most: longer columns of rows are sampled or scored piece by piece. A GPU reads the head once a
piece, and has the memory to do so once a step."""

MAX_CAPTURED_TOKENS = 128
"""Tokens of the largest step that runs as a program on a CPU; beyond, what the operators do outweighs calling them."""

PROGRAM_LAYER_BYTES = 2 << 10
"""Of a layer in a recording on a CPU, at most."""

GRAPH_LAYER_BYTES = 256 << 10
"""A layer's kernels in a CUDA graph: a dozen, with what the driver keeps of each on the device. An upper estimate."""

_CAPTURED_SLACK = 64 << 10
"""Alignment and gaps in the pool of captured steps."""

_LIBRARY_BYTES = 128 << 20
"""Workspaces of the vendor's matrix products, one for each of the two streams that a rank uses."""

_LOGITS_COPIES = 4
"""Logits as computed, in fp32, as probabilities, and sorted."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What bounds the steps of a rank."""

    device: str
    """"cpu" or "cuda"."""
    activation_dtype: torch.dtype
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    block_size: int


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


def activation_bytes(config: ModelConfig, limits: StepLimits, tp_size: int = 1) -> int:
    """Hidden states of the largest step, logits of the largest piece, the rotary tables, and the captured steps. An
    upper estimate: it counts a layer's intermediate results as if none were freed within it."""
    per_token = _activations_per_token(config, tp_size) * limits.activation_dtype.itemsize
    tables = 1 if config.rope_local_theta is None else 2
    rotary = tables * limits.max_model_len * config.head_dim * torch.float32.itemsize
    rows = max_logit_rows(config.vocab_size, limits.device)
    logits = _LOGITS_COPIES * rows * config.vocab_size * torch.float32.itemsize
    captured = 0
    if limits.device == "cuda":
        captured = graph_bytes(config, limits, tp_size)
    elif tp_size == 1:
        tokens = min(MAX_CAPTURED_TOKENS, limits.max_num_batched_tokens)
        rows = min(tokens, limits.max_num_seqs)
        captured = captured_bytes(config, tokens, rows, limits.activation_dtype) + program_bytes(config, tokens, rows)
    return limits.max_num_batched_tokens * per_token + logits + rotary + captured


def captured_bytes(config: ModelConfig, num_tokens: int, num_logits: int, activation_dtype: torch.dtype) -> int:
    """What a program computes: hidden states of so many tokens and logits of so many, of one rank a stage."""
    logits = min(num_logits, max_logit_rows(config.vocab_size, "cpu")) * config.vocab_size * torch.float32.itemsize
    return num_tokens * _activations_per_token(config, 1) * activation_dtype.itemsize + logits + _CAPTURED_SLACK


def program_bytes(config: ModelConfig, num_tokens: int, num_logits: int) -> int:
    """Recordings on a CPU when every size has come: one for each number of tokens, and one for each number of decodes
    with their logits."""
    return (num_tokens + num_logits) * config.num_layers * PROGRAM_LAYER_BYTES


def graph_bytes(config: ModelConfig, limits: StepLimits, tp_size: int = 1) -> int:
    """Decode steps as CUDA graphs: their inputs, the pool that the largest one needs, the results beside it, the graphs
    themselves and the libraries' workspaces."""
    rows, size = limits.max_num_seqs, limits.activation_dtype.itemsize
    width = -(-limits.max_model_len // limits.block_size)
    inputs = packed_bytes(limits.max_num_batched_tokens, rows, width) + rows * width * torch.int32.itemsize
    logits_rows = min(rows, max_logit_rows(config.vocab_size, "cuda"))
    logits = logits_rows * config.vocab_size * (size + 2 * torch.float32.itemsize)
    hidden = rows * (_activations_per_token(config, tp_size) + 2 * config.hidden_size) * size
    graphs = len(graph_sizes(rows)) * config.num_layers * GRAPH_LAYER_BYTES
    return inputs + logits + hidden + graphs + _LIBRARY_BYTES


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Sequences of the decode steps that a GPU has as graphs, ascending. Few enough to be captured in seconds, and so
    close that a step is filled up by little: beyond a few rows the time of a step hardly depends on one more."""
    sizes = [size for size in (1, 2, 4) if size < max_num_seqs]
    size = 8
    while size < max_num_seqs:
        sizes.append(size)
        size += 8 if size < 256 else 32
    return [*sizes, max_num_seqs]


def max_logit_rows(vocab_size: int, device: str) -> int:
    """Rows of logits that are held at once. `device` is "cpu", or an accelerator."""
    return max(1, LOGITS_BYTES["cpu" if device == "cpu" else "cuda"] // (vocab_size * torch.float32.itemsize))


def _activations_per_token(config: ModelConfig, tp_size: int) -> int:
    """Elements that a layer makes of one token."""
    heads = HeadSplit.of_rank(config.num_heads, config.num_kv_heads, tp_size, 0)
    inner = config.intermediate_size // tp_size
    qkv = (heads.num_heads + 2 * heads.num_kv_heads) * config.head_dim
    return 5 * config.hidden_size + qkv + 2 * heads.num_heads * config.head_dim + 3 * inner


def _stage_weights(config: ModelConfig, stage: Stage, scheme: WeightScheme, tp_size: int) -> int:
    shapes = [layer_shapes(config, layer) for layer in stage.layers]
    fp32 = sum(sum(layer.vectors.values()) for layer in shapes) + (config.hidden_size if stage.is_last else 0)
    projections = [projection for layer in shapes for projection in layer.projections]
    matrices = sum(scheme.linear_bytes(_linear(config, projection, tp_size)) for projection in projections)
    matrices += sum(map(scheme.linear_bytes, _tables(config, stage, tp_size)))
    return matrices + fp32 * torch.float32.itemsize


def _linear(config: ModelConfig, projection: Projection, tp_size: int) -> LinearShape:
    """A rank's part of one operator."""
    shapes = [matrix.rank_shape(config, tp_size) for matrix in projection.matrices]
    names = tuple(f"{matrix.name}.weight" for matrix in projection.matrices)
    return LinearShape(names, tuple(rows for rows, _ in shapes), shapes[0][1], projection.bias)


def _tables(config: ModelConfig, stage: Stage, tp_size: int) -> Iterator[LinearShape]:
    """Embedding and head, on the heaviest rank."""
    rows, hidden = (vocab_shard_rows(config.vocab_size, tp_size),), config.hidden_size
    if stage.is_last:
        yield LinearShape((EMBEDDING if config.tie_embeddings else LM_HEAD,), rows, hidden)
    if stage.is_first and not (stage.is_last and config.tie_embeddings):
        yield LinearShape((EMBEDDING,), rows, hidden)
