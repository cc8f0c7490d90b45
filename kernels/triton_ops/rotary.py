# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Rotary position embedding in place, half-split convention (Su et al. 2021, arXiv:2104.09864)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.triton_ops.launch import Launch, cdiv, next_power_of_2, require_dense

HEAD_BLOCK = 16
"""Heads of one token that a program rotates: they share the token's cosines and sines."""


@triton.jit
def _rotate(x_ptr, head, num_heads, cos, sin, HALF: tl.constexpr, PADDED_HALF: tl.constexpr):
    pair = tl.arange(0, PADDED_HALF)
    valid = (head < num_heads)[:, None] & (pair < HALF)[None, :]
    low_ptr = x_ptr + (head * (2 * HALF))[:, None] + pair[None, :]
    low = tl.load(low_ptr, mask=valid, other=0.0).to(tl.float32)
    high = tl.load(low_ptr + HALF, mask=valid, other=0.0).to(tl.float32)
    tl.store(low_ptr, (low * cos - high * sin).to(x_ptr.dtype.element_ty), mask=valid)
    tl.store(low_ptr + HALF, (high * cos + low * sin).to(x_ptr.dtype.element_ty), mask=valid)


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
    pair = tl.arange(0, PADDED_HALF)
    row_ptr = cos_sin_ptr + tl.load(positions_ptr + token) * (2 * HALF)
    cos = tl.load(row_ptr + pair, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(row_ptr + HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    head = tl.arange(0, HEAD_BLOCK)
    if block < Q_BLOCKS:
        _rotate(q_ptr + token * q_stride_token, block * HEAD_BLOCK + head, NUM_HEADS, cos, sin, HALF, PADDED_HALF)
    else:
        _rotate(
            k_ptr + token * k_stride_token, (block - Q_BLOCKS) * HEAD_BLOCK + head, NUM_KV_HEADS, cos, sin,
            HALF, PADDED_HALF,
        )  # fmt: skip


def rotary_launch(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> Launch:
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    for x in (q, k):
        require_dense(x, first_axis=1)
    require_dense(cos_sin, first_axis=0)
    assert cos_sin.shape[1] == dim, (cos_sin.shape, dim)
    head_block = min(HEAD_BLOCK, next_power_of_2(max(heads, kv_heads)))
    return Launch(
        rotary_kernel,
        (tokens, cdiv(heads, head_block) + cdiv(kv_heads, head_block), 1),
        {
            "q_ptr": q,
            "k_ptr": k,
            "positions_ptr": positions,
            "cos_sin_ptr": cos_sin,
            "q_stride_token": q.stride(0),
            "k_stride_token": k.stride(0),
        },
        {
            "NUM_HEADS": heads,
            "NUM_KV_HEADS": kv_heads,
            "HALF": dim // 2,
            "PADDED_HALF": next_power_of_2(dim // 2),
            "HEAD_BLOCK": head_block,
        },
    )
