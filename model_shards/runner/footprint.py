"""How much memory a rank will need, from the configuration alone: the planner asks before anything is allocated.

Each function answers for the heaviest rank of the mesh, in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shoal.kernels.page_format import Layout, PageFormat
from shoal.kvcache.spec import KVCacheSpec, decoder_specs, kv_heads_per_rank
from shoal.model_shards.models.config import MLAConfig, ModelConfig, MoEConfig
from shoal.model_shards.models.shapes import Projection, layer_shapes
from shoal.model_shards.models.stage import Stage, cut_stages
from shoal.model_shards.parallel.mesh import MeshShape
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

_CHOICE = 8
"""Elements that say which expert a row visits, where the row goes and what it counts: two of 64 bits, one of 32."""

_LOGITS_COPIES = 4
"""Logits as computed, in fp32, as probabilities, and sorted."""


_ONE_RANK = MeshShape()


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


def weights_bytes(config: ModelConfig, scheme: WeightScheme, mesh: MeshShape = _ONE_RANK) -> int:
    """Weights as the scheme keeps them (a backend that widens them says so in its `LinearWeight.nbytes`), and norms and
    routers in fp32."""
    return max(stage_weights_bytes(config, stage, scheme, mesh) for stage in cut_stages(config, mesh.pp_size))


def kv_bytes_per_block(
    config: ModelConfig, block_size: int, kv_dtype: torch.dtype, tp_size: int = 1, pp_size: int = 1
) -> int:
    """K and V, or latents, of one block in all layers of the rank."""
    page = page_format(config, "canonical", block_size, kv_dtype, tp_size)
    return page.bytes_per_block * max(len(stage.layers) for stage in cut_stages(config, pp_size))


def page_format(config: ModelConfig, layout: Layout, block_size: int, dtype: torch.dtype, tp_size: int) -> PageFormat:
    """Of one layer on each tensor-parallel rank: of its KV heads, or of the latents, which every rank has whole."""
    if config.mla is not None:
        return PageFormat.latent(layout, block_size, config.mla.latent_dim, dtype)
    kv_heads = HeadSplit.of_rank(config.num_heads, config.num_kv_heads, tp_size, 0).num_kv_heads
    return PageFormat(layout, block_size, kv_heads, config.head_dim, dtype)


def kv_specs(config: ModelConfig, layers: Sequence[int], dtype: torch.dtype, tp_size: int) -> tuple[KVCacheSpec, ...]:
    """What these layers keep of a token on each tensor-parallel rank."""
    mla = config.mla
    if mla is not None:
        return (KVCacheSpec.latent(len(layers), mla.kv_lora_rank, mla.qk_rope_head_dim, dtype.itemsize),)
    kv_heads = kv_heads_per_rank(config.num_kv_heads, tp_size)
    return decoder_specs([config.window(layer) for layer in layers], kv_heads, config.head_dim, dtype.itemsize)


def activation_bytes(config: ModelConfig, limits: StepLimits, mesh: MeshShape = _ONE_RANK) -> int:
    """Hidden states of the largest step, logits of the largest piece, the rotary tables, and the captured steps. An
    upper estimate: it counts a layer's intermediate results as if none were freed within it, and rows as if all of them
    chose the experts of one rank."""
    per_token = _activations_per_token(config, mesh) * limits.activation_dtype.itemsize
    tables = 1 if config.rope_local_theta is None else 2
    rotary = tables * limits.max_model_len * config.rotary_dim * torch.float32.itemsize
    rows = max_logit_rows(config.vocab_size, limits.device)
    logits = _LOGITS_COPIES * rows * config.vocab_size * torch.float32.itemsize
    captured = 0
    if limits.device == "cuda":
        captured = graph_bytes(config, limits, mesh)
    elif has_programs(config, mesh):
        tokens = min(MAX_CAPTURED_TOKENS, limits.max_num_batched_tokens)
        rows = min(tokens, limits.max_num_seqs)
        captured = captured_bytes(config, tokens, rows, limits.activation_dtype) + program_bytes(config, tokens, rows)
    return limits.max_num_batched_tokens * per_token + logits + rotary + captured + exchange_bytes(config, limits, mesh)


def exchange_bytes(config: ModelConfig, limits: StepLimits, mesh: MeshShape) -> int:
    """What context-parallel ranks send each other at once: partial results of rows that are computed elsewhere as they
    leave and as they come, or of decodes, from all ranks. Pages travel only where they are less than that."""
    if mesh.cp_size == 1:
        return 0
    heads = HeadSplit.of_rank(config.num_heads, config.num_kv_heads, mesh.tp_size, 0).num_heads
    part = heads * (config.head_dim + 1) * torch.float32.itemsize
    return part * max(2 * limits.max_num_batched_tokens, (mesh.cp_size + 2) * limits.max_num_seqs)


def has_programs(config: ModelConfig, mesh: MeshShape) -> bool:
    """Whether a rank on a CPU runs small steps as programs. Ranks that share layers or sequences do not, since they
    wait for each other."""
    return mesh.stage_size == 1


def captured_bytes(config: ModelConfig, num_tokens: int, num_logits: int, activation_dtype: torch.dtype) -> int:
    """What a program computes: hidden states of so many tokens and logits of so many, of one rank a stage."""
    logits = min(num_logits, max_logit_rows(config.vocab_size, "cpu")) * config.vocab_size * torch.float32.itemsize
    return num_tokens * _activations_per_token(config, _ONE_RANK) * activation_dtype.itemsize + logits + _CAPTURED_SLACK


def program_bytes(config: ModelConfig, num_tokens: int, num_logits: int) -> int:
    """Recordings on a CPU when every size has come: one for each number of tokens, and one for each number of decodes
    with their logits."""
    return (num_tokens + num_logits) * config.num_layers * PROGRAM_LAYER_BYTES


def graph_bytes(config: ModelConfig, limits: StepLimits, mesh: MeshShape = _ONE_RANK) -> int:
    """Decode steps as CUDA graphs: their inputs, the pool that the largest one needs, the results beside it, the graphs
    themselves and the libraries' workspaces."""
    rows, size = limits.max_num_seqs, limits.activation_dtype.itemsize
    width = -(-limits.max_model_len // limits.block_size)
    inputs = packed_bytes(limits.max_num_batched_tokens, rows, width) + rows * width * torch.int32.itemsize
    logits_rows = min(rows, max_logit_rows(config.vocab_size, "cuda"))
    logits = logits_rows * config.vocab_size * (size + 2 * torch.float32.itemsize)
    hidden = rows * (_activations_per_token(config, mesh) + 2 * config.hidden_size) * size
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


def _activations_per_token(config: ModelConfig, mesh: MeshShape) -> int:
    """Elements that the largest layer makes of one token."""
    heads = HeadSplit.of_rank(config.num_heads, config.num_kv_heads, mesh.tp_size, 0)
    attention = (3 * heads.num_heads + 2 * heads.num_kv_heads) * config.head_dim
    if config.mla is not None:
        attention = _latent_elements(config, config.mla, heads.num_heads)
    inner = 3 * (config.intermediate_size // mesh.tp_size)
    if config.moe is not None:
        experts = _expert_elements(config, config.moe, mesh)
        inner = experts if len(config.moe.dense_layers) == 0 else max(inner, experts)
    return 5 * config.hidden_size + attention + inner


def _latent_elements(config: ModelConfig, mla: MLAConfig, num_heads: int) -> int:
    """Of one token: what it is projected to, the queries, and the two latents of each head, absorbed and attended."""
    shared = 2 * (mla.q_lora_rank or 0) + mla.latent_dim
    return shared + num_heads * (config.head_dim + 2 * mla.kv_lora_rank + mla.v_head_dim)


def _expert_elements(config: ModelConfig, moe: MoEConfig, mesh: MeshShape) -> int:
    """Of one token: a row for each of its experts, the products and what they are summed from. With expert parallelism
    as many rows as all ranks' tokens can send to one, where at most each of its experts is chosen by a token."""
    chosen, hidden = moe.experts_per_token, config.hidden_size
    at_home = chosen * (2 * hidden + _CHOICE) + 2 * hidden + moe.num_experts + 3 * (moe.shared_size // mesh.tp_size)
    if not mesh.expert_parallel:
        return at_home + chosen * (2 * hidden + 3 * (moe.expert_size // mesh.tp_size))
    arriving = mesh.dp_size * mesh.cp_size * min(chosen, expert_slots(moe, mesh))
    return at_home + arriving * (2 * hidden + 3 * moe.expert_size)


def expert_slots(moe: MoEConfig, mesh: MeshShape) -> int:
    """Experts of a layer that one rank holds, or parts of them, redundant ones included."""
    return -(-(moe.num_experts + mesh.num_redundant_experts) // mesh.ep_size)


def stage_weights_bytes(config: ModelConfig, stage: Stage, scheme: WeightScheme, mesh: MeshShape) -> int:
    """Of the heaviest rank of one stage, the embedding and the head included."""
    total = sum(_layer_weights(config, layer, scheme, mesh) for layer in stage.layers)
    total += sum(map(scheme.linear_bytes, _tables(config, stage, mesh.tp_size)))
    return total + (config.hidden_size * torch.float32.itemsize if stage.is_last else 0)


def _layer_weights(config: ModelConfig, layer: int, scheme: WeightScheme, mesh: MeshShape) -> int:
    shapes = layer_shapes(config, layer)
    linears = [_linear(config, projection, mesh.tp_size) for projection in shapes.projections]
    fp32 = sum(shapes.vectors.values())
    if shapes.router is not None:
        assert config.moe is not None
        fp32 += shapes.router.out_features * shapes.router.in_features
        # A rank's experts may be any; those that a placement begins with stand for them.
        held = [shapes.experts[slot % len(shapes.experts)] for slot in range(expert_slots(config.moe, mesh))]
        parts = 1 if mesh.expert_parallel else mesh.tp_size
        linears += [_linear(config, projection, parts) for expert in held for projection in expert]
    unpacked = sum(
        rows * cols for rows, cols in (matrix.rank_shape(config, mesh.tp_size) for matrix in shapes.unpacked)
    )
    return sum(map(scheme.linear_bytes, linears)) + fp32 * torch.float32.itemsize + unpacked * scheme.dtype.itemsize


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
