"""Calls of the native unit for latent attention: what `CpuOps` does for DeepSeek's models."""

from __future__ import annotations

import ctypes

import torch

from shoal.kernels.cpu.native import Native
from shoal.kernels.huge_pages import Arena
from shoal.kernels.ops import AttentionMetadata, HeadWeights, LatentNorm
from shoal.kernels.page_format import KVPages

_Shape = ctypes.c_int64 * 9
_LatentShape = ctypes.c_int64 * 3


def pack_heads(native: Native, arena: Arena, weight: torch.Tensor, threads: int) -> HeadWeights:
    """Panels as in `PackedWeight`, head after head: [num_heads, panels, in_features, panel_outputs]."""
    if weight.dim() != 3 or weight.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"weights of heads are float32 or bfloat16 matrices, not {weight.dtype} {tuple(weight.shape)}")
    heads, outputs, depth = weight.shape
    width = native.panel_outputs
    packed = arena.empty((heads, -(-outputs // width), depth, width), weight.dtype)
    weight = weight.contiguous()
    for matrix, target in zip(weight, packed, strict=True):
        native.pack_weight(matrix.data_ptr(), weight.itemsize, outputs, depth, target.data_ptr(), threads)
    return HeadWeights(heads, outputs, depth, packed)


def head_linear(native: Native, x: torch.Tensor, weight: HeadWeights) -> torch.Tensor:
    """x [num_tokens, num_heads, in_features], heads side by side -> [num_tokens, num_heads, out_features]."""
    assert x.shape[1:] == (weight.num_heads, weight.in_features), (x.shape, weight.num_heads, weight.in_features)
    out = torch.empty((len(x), weight.num_heads, weight.out_features))
    native.head_linear(
        x.data_ptr(), x.stride(0), weight.packed.data_ptr(), weight.packed.itemsize, out.data_ptr(), len(x),
        weight.num_heads, weight.out_features, weight.in_features, torch.get_num_threads(),
    )  # fmt: skip
    return out


def rotary_store_latent(
    native: Native,
    q_kv: tuple[torch.Tensor, torch.Tensor],
    norm: LatentNorm,
    cos_sin: torch.Tensor,
    pages: KVPages,
    meta: AttentionMetadata,
) -> None:
    """See `Ops.rotary_store_latent`; q's heads lie side by side, kv's channels too. kv is only read."""
    (q, kv), slots = q_kv, meta.slot_mapping
    tokens, heads, rope = q.shape
    latent = len(norm.weight)
    _check_pages(pages, latent + rope)
    assert kv.shape == (tokens, latent + rope), (kv.shape, q.shape, latent)
    assert norm.weight.dtype == cos_sin.dtype == torch.float32
    assert cos_sin.shape[1] == rope, (cos_sin.shape, rope)
    assert slots.shape == meta.positions.shape == (tokens,), (slots.shape, meta.positions.shape)
    assert slots.dtype == meta.positions.dtype == torch.int64
    assert all(x.is_contiguous() for x in (norm.weight, cos_sin, slots, meta.positions))
    native.rotary_store_latent(
        q.data_ptr(), q.stride(0), kv.data_ptr(), kv.stride(0), norm.weight.data_ptr(), norm.eps,
        meta.positions.data_ptr(), cos_sin.data_ptr(), pages.k.data_ptr(), pages.k.itemsize, slots.data_ptr(), tokens,
        _LatentShape(heads, latent, rope), torch.get_num_threads(),
    )  # fmt: skip


def attention(
    native: Native, queries: tuple[torch.Tensor, torch.Tensor], pages: KVPages, meta: AttentionMetadata, scale: float
) -> torch.Tensor:
    """See `Ops.paged_mla_attention`; the heads of both parts of the queries lie side by side."""
    q, q_rope = queries
    tokens, heads, latent = q.shape
    page = pages.format
    _check_pages(pages, latent + q_rope.shape[2])
    assert q_rope.shape[:2] == (tokens, heads), (q.shape, q_rope.shape)
    assert meta.block_tables.is_contiguous()
    assert meta.query_start.dtype == meta.seq_lens.dtype == meta.block_tables.dtype == torch.int32
    num_seqs, table_width = meta.block_tables.shape
    shape = _Shape(num_seqs, heads, 1, page.head_dim, latent, page.block_size, table_width, q.stride(0), 0)
    out = torch.empty((tokens, heads, latent))
    native.mla_attention(
        q.data_ptr(), q_rope.data_ptr(), q_rope.stride(0), pages.k.data_ptr(), page.dtype.itemsize,
        meta.query_start.data_ptr(), meta.seq_lens.data_ptr(), meta.block_tables.data_ptr(), shape, scale,
        out.data_ptr(), tokens, torch.get_num_threads(),
    )  # fmt: skip
    return out


def _check_pages(pages: KVPages, width: int) -> None:
    page = pages.format
    assert page.layout == "cpu_packed", page
    assert page.is_latent, page
    assert page.head_dim == width, (page, width)
    assert pages.k.is_contiguous(), pages.k.stride()
