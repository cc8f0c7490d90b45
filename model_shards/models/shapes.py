"""What a layer is made of: the tensors of a checkpoint, their shapes, and how each is shared out.

Said once: from it the loader accounts for every tensor (`decoder.checkpoint_names`) and the planner foretells the bytes
(`runner/footprint.py`).

Layers ask for their tensors themselves; that they ask for these is tested (tests/model_shards/models/test_shapes.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from shoal.model_shards.models.config import MLAConfig, ModelConfig
from shoal.model_shards.parallel.split import HeadSplit, split_evenly


class Split(Enum):
    """What of a matrix [out_features, in_features] a tensor-parallel rank holds."""

    NONE = auto()
    """All of it."""
    ROWS = auto()
    """An equal part of the output features (a column-parallel layer)."""
    KV_HEADS = auto()
    """The output features of its KV heads; with more ranks than KV heads, neighbours hold the same."""
    COLUMNS = auto()
    """An equal part of the input features (a row-parallel layer)."""


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """`name` is that of the file without ".weight"; the sizes are those of the whole tensor."""

    name: str
    out_features: int
    in_features: int
    split: Split = Split.NONE

    def rank_shape(self, config: ModelConfig, tp_size: int) -> tuple[int, int]:
        """(output, input features) on each tensor-parallel rank. Raises ConfigError where they do not divide."""
        rows, cols = self.out_features, self.in_features
        if self.split is Split.ROWS:
            rows = len(split_evenly(f"{self.name}: output features", rows, tp_size, 0))
        elif self.split is Split.KV_HEADS:
            mine = HeadSplit.of_rank(config.num_heads, config.num_kv_heads, tp_size, 0).num_kv_heads
            rows = rows // config.num_kv_heads * mine
        elif self.split is Split.COLUMNS:
            cols = len(split_evenly(f"{self.name}: input features", cols, tp_size, 0))
        return rows, cols


@dataclass(frozen=True, slots=True)
class Projection:
    """Matrices that share their input and run as one operator. With `bias`, each has one."""

    matrices: tuple[MatrixShape, ...]
    bias: bool = False

    def names(self) -> Iterator[str]:
        for matrix in self.matrices:
            yield f"{matrix.name}.weight"
            if self.bias:
                yield f"{matrix.name}.bias"


@dataclass(frozen=True, slots=True)
class LayerShapes:
    """One decoder layer."""

    projections: list[Projection]
    """Kept as the weights' scheme says: attention and the MLP, or the experts that every token visits."""
    vectors: dict[str, int]
    """Name of the file -> size; kept whole and in fp32: norms, and the bias of a router."""
    unpacked: list[MatrixShape] = field(default_factory=list)
    """Kept in the weights' dtype whatever their scheme: products are made along either axis of them."""
    router: MatrixShape | None = None
    """Kept whole and in fp32."""
    experts: list[list[Projection]] = field(default_factory=list)
    """The projections of each expert. Ranks hold their split of all experts, or whole experts."""

    def names(self) -> Iterator[str]:
        yield from self.vectors
        if self.router is not None:
            yield f"{self.router.name}.weight"
        yield from (f"{matrix.name}.weight" for matrix in self.unpacked)
        for projections in [self.projections, *self.experts]:
            for projection in projections:
                yield from projection.names()


def layer_shapes(config: ModelConfig, layer: int) -> LayerShapes:
    prefix, hidden = f"model.layers.{layer}", config.hidden_size
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if config.sandwich_norms else []
    vectors = {f"{prefix}.{name}.weight": hidden for name in norms}
    unpacked: list[MatrixShape] = []
    if config.mla is None:
        attention = _attention(config, f"{prefix}.self_attn", vectors)
    else:
        attention = _latent_attention(config, config.mla, f"{prefix}.self_attn", vectors, unpacked)
    moe = config.moe
    if moe is None or layer in moe.dense_layers:
        mlp = mlp_projections(f"{prefix}.mlp", hidden, config.intermediate_size, bias=config.mlp_bias)
        return LayerShapes(attention + mlp, vectors, unpacked)
    block = moe_names(config, layer)
    shared = mlp_projections(block.shared, hidden, moe.shared_size) if moe.shared_size else []
    if moe.selection_bias:
        vectors[block.selection_bias] = moe.num_experts
    experts = [expert_projections(config, layer, expert) for expert in range(moe.num_experts)]
    router = MatrixShape(block.router, moe.num_experts, hidden)
    return LayerShapes(attention + shared, vectors, unpacked, router, experts)


def _attention(config: ModelConfig, prefix: str, vectors: dict[str, int]) -> list[Projection]:
    """Adds its norms to `vectors`."""
    hidden, dim = config.hidden_size, config.head_dim
    query, kv = config.num_heads * dim, config.num_kv_heads * dim
    if config.qk_norm:
        vectors.update({f"{prefix}.{name}.weight": dim for name in ("q_norm", "k_norm")})
    qkv = (
        MatrixShape(f"{prefix}.q_proj", query, hidden, Split.ROWS),
        MatrixShape(f"{prefix}.k_proj", kv, hidden, Split.KV_HEADS),
        MatrixShape(f"{prefix}.v_proj", kv, hidden, Split.KV_HEADS),
    )
    output = MatrixShape(f"{prefix}.o_proj", hidden, query, Split.COLUMNS)
    return [Projection(qkv, config.qkv_bias), Projection((output,), config.output_bias)]


def _latent_attention(
    config: ModelConfig, mla: MLAConfig, prefix: str, vectors: dict[str, int], unpacked: list[MatrixShape]
) -> list[Projection]:
    """Adds its norms to `vectors`, and what latents are projected up by to `unpacked`."""
    hidden, heads = config.hidden_size, config.num_heads
    kv_a = MatrixShape(f"{prefix}.kv_a_proj_with_mqa", mla.latent_dim, hidden)
    vectors[f"{prefix}.kv_a_layernorm.weight"] = mla.kv_lora_rank
    up = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    unpacked.append(MatrixShape(f"{prefix}.kv_b_proj", up, mla.kv_lora_rank, Split.ROWS))
    query, rank = heads * config.head_dim, mla.q_lora_rank
    output = MatrixShape(f"{prefix}.o_proj", hidden, heads * mla.v_head_dim, Split.COLUMNS)
    last = Projection((output,), config.output_bias)
    if rank is None:
        q_proj = MatrixShape(f"{prefix}.q_proj", query, hidden, Split.ROWS)
        return [Projection((q_proj, kv_a)), last]
    vectors[f"{prefix}.q_a_layernorm.weight"] = rank
    q_a = MatrixShape(f"{prefix}.q_a_proj", rank, hidden)
    q_b = MatrixShape(f"{prefix}.q_b_proj", query, rank, Split.ROWS)
    return [Projection((q_a, kv_a), config.qkv_bias), Projection((q_b,)), last]


def mlp_projections(
    prefix: str,
    hidden: int,
    inner: int,
    *,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    bias: bool = False,
) -> list[Projection]:
    """A gated MLP: [gate and up as one, down]. `names`: what the file calls gate, up and down."""
    gate, up, down = (f"{prefix}.{name}" for name in names)
    gate_up = MatrixShape(gate, inner, hidden, Split.ROWS), MatrixShape(up, inner, hidden, Split.ROWS)
    return [Projection(gate_up, bias), Projection((MatrixShape(down, hidden, inner, Split.COLUMNS),), bias)]


@dataclass(frozen=True, slots=True)
class MoENames:
    """What the file calls the parts of one layer's experts."""

    prefix: str
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Gate, up and down of an expert."""

    @property
    def router(self) -> str:
        return f"{self.prefix}.gate"

    @property
    def selection_bias(self) -> str:
        return f"{self.prefix}.gate.e_score_correction_bias"

    @property
    def shared(self) -> str:
        return f"{self.prefix}.shared_experts"


def moe_names(config: ModelConfig, layer: int) -> MoENames:
    prefix = f"model.layers.{layer}"
    if config.family == "mixtral":
        return MoENames(f"{prefix}.block_sparse_moe", ("w1", "w3", "w2"))
    return MoENames(f"{prefix}.mlp")


def expert_projections(config: ModelConfig, layer: int, expert: int) -> list[Projection]:
    """[gate and up as one, down] of one expert of a layer that has some."""
    assert config.moe is not None
    block = moe_names(config, layer)
    prefix = f"{block.prefix}.experts.{expert}"
    return mlp_projections(prefix, config.hidden_size, config.moe.expert_size, names=block.matrices)
