"""The projections of latent attention (DeepSeek-AI 2024, arXiv:2405.04434), split over the ranks by heads.

What all heads share (the down projections, and so the latents) is computed by every rank. Rotary channels that a
checkpoint stores as pairs of neighbours are put into halves here, once, with the rows of the matrices that make them:
queries and keys alike, so that no score changes.
"""

from __future__ import annotations

import torch

from shoal.kernels.ops import HeadWeights
from shoal.kernels.quantized import QuantizedMatrix
from shoal.model_shards.models.config import MLAConfig, ModelConfig
from shoal.model_shards.parallel.loader import WeightLoader
from shoal.model_shards.parallel.split import split_evenly
from shoal.model_shards.quantization.schemes import Matrix

LORA_NORM_EPS = 1e-6
"""Of the norms of both latents, whatever `rms_norm_eps` says: so the models were made."""


class LatentProjection:
    """What a token's queries, latent and shared key are projected by."""

    def __init__(self, load: WeightLoader, config: ModelConfig, mla: MLAConfig, prefix: str) -> None:
        position, hidden = load.context.position, config.hidden_size
        heads = split_evenly("num_heads", config.num_heads, position.tp_size, position.tp_rank)
        self.num_heads = len(heads)
        self.ops, self.context, self.mla = load.ops, load.context, mla
        rows = range(heads.start * config.head_dim, heads.stop * config.head_dim)
        query = config.num_heads * config.head_dim
        kv_name, kv_order = f"{prefix}.kv_a_proj_with_mqa", _latent_order(mla)
        kv = _reordered(load.matrix(f"{kv_name}.weight", (mla.latent_dim, hidden)), kv_order)
        rank, self.norm = mla.q_lora_rank, None
        if rank is None:
            q = load.matrix(f"{prefix}.q_proj.weight", (query, hidden), rows)
            self.first = load.linear([_reordered(q, _head_order(mla, self.num_heads)), kv], [])
            self._first_width = len(rows)
            return
        biases = []
        if config.qkv_bias:
            kv_bias = load.vector(f"{kv_name}.bias", mla.latent_dim)
            biases = [load.vector(f"{prefix}.q_a_proj.bias", rank), kv_bias[kv_order.to(kv_bias.device)]]
        self.first = load.linear([load.matrix(f"{prefix}.q_a_proj.weight", (rank, hidden)), kv], biases)
        self._first_width = rank
        self.norm = load.norm(f"{prefix}.q_a_layernorm.weight", rank, 0.0)
        q = load.matrix(f"{prefix}.q_b_proj.weight", (query, rank), rows)
        self.second = load.linear([_reordered(q, _head_order(mla, self.num_heads))], [])

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [n, hidden] -> the queries' parts [n, num_heads, qk_nope_head_dim] and [n, num_heads, qk_rope_head_dim],
        and [n, kv_lora_rank + qk_rope_head_dim], not yet normed nor rotated; views of one or two tensors."""
        first = self.ops.linear(self.context.whole_rows(x), self.first)
        q, kv = first[:, : self._first_width], first[:, self._first_width :]
        if self.norm is not None:
            q = self.ops.linear(self.ops.rms_norm(q, self.norm, LORA_NORM_EPS)[0], self.second)
        plain = self.num_heads * self.mla.qk_nope_head_dim
        nope, rope = q[:, :plain].view(len(q), self.num_heads, -1), q[:, plain:].view(len(q), self.num_heads, -1)
        return nope, rope, kv


def head_projections(
    load: WeightLoader, config: ModelConfig, mla: MLAConfig, name: str
) -> tuple[HeadWeights, HeadWeights]:
    """The up projection of this rank's heads, absorbed: (queries [qk_nope_head_dim] into the space of the latents, what
    attention made of the latents into values [v_head_dim]). With K = W_k c and V = W_v c of a latent c, the score q.K
    is (W_k^T q).c, and the weighted sum of V is W_v times that of c."""
    position = load.context.position
    heads = split_evenly("num_heads", config.num_heads, position.tp_size, position.tp_rank)
    width = mla.qk_nope_head_dim + mla.v_head_dim
    rows = range(heads.start * width, heads.stop * width)
    weight = load.unpacked(f"{name}.weight", (config.num_heads * width, mla.kv_lora_rank), rows)
    by_head = weight.view(len(heads), width, -1)
    keys, values = by_head[:, : mla.qk_nope_head_dim], by_head[:, mla.qk_nope_head_dim :]
    return load.ops.prepare_heads(keys.transpose(1, 2).contiguous()), load.ops.prepare_heads(values.contiguous())


def _rope_order(mla: MLAConfig) -> torch.Tensor:
    """Where the rotary channels of the halves stand in the checkpoint."""
    channels = torch.arange(mla.qk_rope_head_dim)
    return torch.cat((channels[::2], channels[1::2])) if mla.rope_interleave else channels


def _latent_order(mla: MLAConfig) -> torch.Tensor:
    return torch.cat((torch.arange(mla.kv_lora_rank), mla.kv_lora_rank + _rope_order(mla)))


def _head_order(mla: MLAConfig, num_heads: int) -> torch.Tensor:
    """Rows head by head, each | nope | rope |, become | nope of all heads | rope of all heads |."""
    nope = mla.qk_nope_head_dim
    starts = torch.arange(num_heads).unsqueeze(1) * (nope + mla.qk_rope_head_dim)
    return torch.cat(((starts + torch.arange(nope)).flatten(), (starts + nope + _rope_order(mla)).flatten()))


def _reordered(matrix: Matrix, rows: torch.Tensor) -> Matrix:
    if isinstance(matrix, QuantizedMatrix):
        return matrix.reordered(rows)
    return matrix[rows.to(matrix.device)]
