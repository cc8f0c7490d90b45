# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Rotary position embedding, half-split convention (Su et al. 2021, arXiv:2104.09864): by itself, in place, and as the
one kernel between the projection and attention, which also norms heads and stores keys and values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.ops import AttentionMetadata, HeadNorms
from shoal.kernels.page_format import KVPages
from shoal.kernels.triton_ops.launch import Launch, cdiv, next_power_of_2, require_dense

HEAD_BLOCK = 16
"""Heads of one token that a program rotates: they share the token's cosines and sines."""


@triton.jit
def _cos_sin(cos_sin_ptr, positions_ptr, token, HALF: tl.constexpr, PADDED_HALF: tl.constexpr):
    pair = tl.arange(0, PADDED_HALF)
    row_ptr = cos_sin_ptr + tl.load(positions_ptr + token) * (2 * HALF)
    cos = tl.load(row_ptr + pair, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(row_ptr + HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    return cos, sin


@triton.jit
def _places(head, num_heads, HALF: tl.constexpr, PADDED_HALF: tl.constexpr):
    """(offsets of the lower halves of these heads [heads, PADDED_HALF], which of them exist)."""
    pair = tl.arange(0, PADDED_HALF)
    return (head * (2 * HALF))[:, None] + pair[None, :], (head < num_heads)[:, None] & (pair < HALF)[None, :]


@triton.jit
def _rotated(x_ptr, low, valid, cos, sin, weight_ptr, eps, HALF: tl.constexpr, PADDED_HALF: tl.constexpr):
    """The two halves of these heads, normed if there is a weight, rotated, in the dtype they lie in."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    a = tl.load(x_ptr + low, mask=valid, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + low + HALF, mask=valid, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        pair = tl.arange(0, PADDED_HALF)
        scale = tl.rsqrt(tl.sum(a * a + b * b, 1) / (2 * HALF) + eps)[:, None]
        weight_a = tl.load(weight_ptr + pair, mask=pair < HALF, other=0.0)[None, :]
        weight_b = tl.load(weight_ptr + HALF + pair, mask=pair < HALF, other=0.0)[None, :]
        # Rounded as if it had been stored in between: the result is that of the operators one after the other.
        a = (a * scale * weight_a).to(dtype).to(tl.float32)
        b = (b * scale * weight_b).to(dtype).to(tl.float32)
    return (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)


@triton.jit
def _rotate(x_ptr, head, num_heads, cos, sin, weight_ptr, eps, HALF: tl.constexpr, PADDED_HALF: tl.constexpr):
    low, valid = _places(head, num_heads, HALF, PADDED_HALF)
    a, b = _rotated(x_ptr, low, valid, cos, sin, weight_ptr, eps, HALF, PADDED_HALF)
    tl.store(x_ptr + low, a, mask=valid)
    tl.store(x_ptr + low + HALF, b, mask=valid)


@triton.jit
def rotary_kernel(
    q_ptr, k_ptr, positions_ptr, cos_sin_ptr, q_stride_token, k_stride_token,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of query heads then blocks of KV heads)."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    Q_BLOCKS: tl.constexpr = (NUM_HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    cos, sin = _cos_sin(cos_sin_ptr, positions_ptr, token, HALF, PADDED_HALF)
    head = tl.arange(0, HEAD_BLOCK)
    if block < Q_BLOCKS:
        q_ptr += token * q_stride_token
        _rotate(q_ptr, block * HEAD_BLOCK + head, NUM_HEADS, cos, sin, None, 0.0, HALF, PADDED_HALF)
    else:
        k_ptr += token * k_stride_token
        _rotate(k_ptr, (block - Q_BLOCKS) * HEAD_BLOCK + head, NUM_KV_HEADS, cos, sin, None, 0.0, HALF, PADDED_HALF)


@triton.jit
def rotary_store_kv_kernel(
    q_ptr, k_ptr, v_ptr, k_pages_ptr, v_pages_ptr, positions_ptr, slots_ptr, cos_sin_ptr,
    q_weight_ptr, k_weight_ptr, eps,  # head norms, or None
    q_stride_token, k_stride_token, v_stride_token, k_stride_block, v_stride_block,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of query heads then blocks of KV heads). q in place; k and v to their slot, -1: nowhere."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    Q_BLOCKS: tl.constexpr = (NUM_HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    cos, sin = _cos_sin(cos_sin_ptr, positions_ptr, token, HALF, PADDED_HALF)
    head = tl.arange(0, HEAD_BLOCK)
    if block < Q_BLOCKS:
        q_ptr += token * q_stride_token
        _rotate(q_ptr, block * HEAD_BLOCK + head, NUM_HEADS, cos, sin, q_weight_ptr, eps, HALF, PADDED_HALF)
        return
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    low, valid = _places((block - Q_BLOCKS) * HEAD_BLOCK + head, NUM_KV_HEADS, HALF, PADDED_HALF)
    inside = slot % BLOCK_SIZE * (NUM_KV_HEADS * 2 * HALF)
    k_low, k_high = _rotated(k_ptr + token * k_stride_token, low, valid, cos, sin, k_weight_ptr, eps, HALF, PADDED_HALF)
    page_dtype: tl.constexpr = k_pages_ptr.dtype.element_ty
    k_target = k_pages_ptr + slot // BLOCK_SIZE * k_stride_block + inside + low
    tl.store(k_target, k_low.to(page_dtype), mask=valid)
    tl.store(k_target + HALF, k_high.to(page_dtype), mask=valid)
    v_source = v_ptr + token * v_stride_token + low
    v_target = v_pages_ptr + slot // BLOCK_SIZE * v_stride_block + inside + low
    tl.store(v_target, tl.load(v_source, mask=valid, other=0.0).to(page_dtype), mask=valid)
    tl.store(v_target + HALF, tl.load(v_source + HALF, mask=valid, other=0.0).to(page_dtype), mask=valid)


def rotary_launch(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> Launch:
    grid, shape = _shape(q, k, cos_sin)
    return Launch(
        rotary_kernel,
        grid,
        {
            "q_ptr": q,
            "k_ptr": k,
            "positions_ptr": positions,
            "cos_sin_ptr": cos_sin,
            "q_stride_token": q.stride(0),
            "k_stride_token": k.stride(0),
        },
        shape,
    )


def rotary_store_kv_launch(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cos_sin: torch.Tensor,
    pages: KVPages,
    meta: AttentionMetadata,
    norms: HeadNorms | None,
) -> Launch:
    """q is normed and rotated in place, k and v are read only."""
    q, k, v = qkv
    grid, shape = _shape(q, k, cos_sin)
    page = pages.format
    assert page.layout == "canonical", f"Triton stores to canonical pages, not {page.layout}"
    assert k.shape == v.shape == (len(q), page.num_kv_heads, page.head_dim), (page, k.shape, v.shape)
    for x in (v, pages.k, pages.v):
        require_dense(x, first_axis=1)
    return Launch(
        rotary_store_kv_kernel,
        grid,
        {
            "q_ptr": q,
            "k_ptr": k,
            "v_ptr": v,
            "k_pages_ptr": pages.k,
            "v_pages_ptr": pages.v,
            "positions_ptr": meta.positions,
            "slots_ptr": meta.slot_mapping,
            "cos_sin_ptr": cos_sin,
            "q_weight_ptr": None if norms is None else norms.q_weight,
            "k_weight_ptr": None if norms is None else norms.k_weight,
            "eps": 0.0 if norms is None else norms.eps,
            "q_stride_token": q.stride(0),
            "k_stride_token": k.stride(0),
            "v_stride_token": v.stride(0),
            "k_stride_block": pages.k.stride(0),
            "v_stride_block": pages.v.stride(0),
        },
        {**shape, "BLOCK_SIZE": page.block_size},
    )


def _shape(
    q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[tuple[int, int, int], dict[str, int | bool]]:
    """(grid, constants) of both kernels."""
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    for x in (q, k):
        require_dense(x, first_axis=1)
    require_dense(cos_sin, first_axis=0)
    assert cos_sin.shape[1] == dim, (cos_sin.shape, dim)
    head_block = min(HEAD_BLOCK, next_power_of_2(max(heads, kv_heads)))
    constants: dict[str, int | bool] = {
        "NUM_HEADS": heads,
        "NUM_KV_HEADS": kv_heads,
        "HALF": dim // 2,
        "PADDED_HALF": next_power_of_2(dim // 2),
        "HEAD_BLOCK": head_block,
    }
    return (tokens, cdiv(heads, head_block) + cdiv(kv_heads, head_block), 1), constants
