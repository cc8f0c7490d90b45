# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Latent attention (DeepSeek-AI 2024, arXiv:2405.04434), absorbed: multi-query attention whose values are the first
LATENT channels of its keys, so that a key's tile is read once for both products.

A program owns BLOCK_M rows; a row is one head of one query token:

    row r  ->  token r // GROUP of the program's BLOCK_M // GROUP tokens, head block * GROUP + r % GROUP

with GROUP the heads of a head block. The rotary channels of query and key are tiles of their own beside the latent
ones: a power of two each, where their sum (576 in DeepSeek-V3) is none. Decodes are split and merged as in
`attention_kernels`, by the sequence's length alone. Every tile is masked: what that costs is small beside products over
a thousand channels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shoal.kernels.triton_ops.attention_kernels import _dot, _find_sequence, decode_segments
from shoal.kernels.triton_ops.rotary import _cos_sin, _rotate, _rotated


@triton.jit
def rotary_store_latent_kernel(
    q_ptr, kv_ptr, weight_ptr, eps, positions_ptr, slots_ptr, cos_sin_ptr, pages_ptr,
    q_stride_token, kv_stride_token,
    NUM_HEADS: tl.constexpr, LATENT: tl.constexpr, PADDED_LATENT: tl.constexpr, HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr, HEAD_BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of query heads, then one for the latent). Queries in place; slot -1: nowhere."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    Q_BLOCKS: tl.constexpr = (NUM_HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    cos, sin = _cos_sin(cos_sin_ptr, positions_ptr, token, HALF, PADDED_HALF)
    if block < Q_BLOCKS:
        head = block * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
        _rotate(q_ptr + token * q_stride_token, head, NUM_HEADS, cos, sin, None, 0.0, HALF, PADDED_HALF)
        return
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    dtype: tl.constexpr = kv_ptr.dtype.element_ty
    page_dtype: tl.constexpr = pages_ptr.dtype.element_ty
    kv_ptr += token * kv_stride_token
    target = pages_ptr + slot * (LATENT + 2 * HALF)
    channel = tl.arange(0, PADDED_LATENT)
    x = tl.load(kv_ptr + channel, mask=channel < LATENT, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / LATENT + eps)
    weight = tl.load(weight_ptr + channel, mask=channel < LATENT, other=0.0)
    tl.store(target + channel, (x * scale * weight).to(dtype).to(page_dtype), mask=channel < LATENT)
    pair = tl.arange(0, PADDED_HALF)[None, :]
    low, high = _rotated(kv_ptr + LATENT, pair, pair < HALF, cos, sin, None, 0.0, HALF, PADDED_HALF)
    tl.store(target + LATENT + pair, low.to(page_dtype), mask=pair < HALF)
    tl.store(target + LATENT + HALF + pair, high.to(page_dtype), mask=pair < HALF)


@triton.jit
def _attend_latent(
    q, q_rope, q_position, qk_scale, pages_ptr, table_ptr, start, stop, key_hi,
    BLOCK_SIZE: tl.constexpr, LATENT: tl.constexpr, PADDED_LATENT: tl.constexpr, ROPE: tl.constexpr,
    PADDED_ROPE: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """(acc, row_max, row_sum) of the rows over the keys [start, stop). `row_max` is in base 2 and already scaled."""
    BLOCK_M: tl.constexpr = q.shape[0]
    acc = tl.zeros([BLOCK_M, PADDED_LATENT], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    channel = tl.arange(0, PADDED_LATENT)
    rotated = tl.arange(0, PADDED_ROPE)
    for tile in tl.range(start, stop, TILE_N):
        key = tile + tl.arange(0, TILE_N)
        # Slots not yet written may hold NaN, and 0 * NaN is NaN: they are never loaded.
        in_range = key < key_hi
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=in_range, other=0).to(tl.int64)
        row = pages_ptr + ((block * BLOCK_SIZE + key % BLOCK_SIZE) * (LATENT + ROPE))[:, None]
        c_valid = in_range[:, None] & (channel < LATENT)[None, :]
        r_valid = in_range[:, None] & (rotated < ROPE)[None, :]
        latent = tl.load(row + channel[None, :], mask=c_valid, other=0.0).to(q.dtype)
        k_rope = tl.load(row + LATENT + rotated[None, :], mask=r_valid, other=0.0).to(q.dtype)

        scores = tl.zeros([BLOCK_M, TILE_N], dtype=tl.float32)
        scores = _dot(q, tl.trans(latent), scores)
        scores = _dot(q_rope, tl.trans(k_rope), scores)
        scores = tl.where(key[None, :] <= q_position[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * qk_scale)
        # A row that has seen no key yet: subtract 0, or exp2(-inf - -inf) would be NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores * qk_scale - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = _dot(weights.to(q.dtype), latent, acc * rescale[:, None])
        row_max = new_max
    return acc, row_max, row_sum


# What changes from step to step is not specialised: a value of 1 or a multiple of 16 would compile another kernel.
@triton.jit(do_not_specialize=["table_stride", "first_seq", "num_seqs", "max_splits"])
def mla_attention_kernel(
    out_ptr,  # [num_tokens, NUM_HEADS, LATENT]; split: fp32 [num_decodes, NUM_HEADS, max_splits, LATENT]
    lse_ptr,  # split: fp32 [num_decodes, NUM_HEADS, max_splits], base 2; else None
    q_ptr, q_rope_ptr, pages_ptr, table_ptr, query_start_ptr, seq_lens_ptr,
    qk_scale,  # softmax scale * log2(e)
    q_stride_token, q_rope_stride_token, table_stride, first_seq, num_seqs, max_splits,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, LATENT: tl.constexpr, PADDED_LATENT: tl.constexpr,
    ROPE: tl.constexpr, PADDED_ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    TILE_N: tl.constexpr, DECODE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Grid (query blocks, head blocks, max_splits). DECODE: block i is the one token of sequence i. See the module."""
    BLOCK_Q: tl.constexpr = 1 if DECODE else BLOCK_M // GROUP
    split = tl.program_id(2)
    if DECODE:
        seq = tl.program_id(0)
        first_token = 0
    else:
        # The last query blocks of a sequence see the most keys: start them first.
        block = tl.num_programs(0) - 1 - tl.program_id(0)
        seq, first_block = _find_sequence(query_start_ptr, block, first_seq, num_seqs, BLOCK_Q)
        first_token = (block - first_block) * BLOCK_Q
    query_start = tl.load(query_start_ptr + seq)
    query_len = tl.load(query_start_ptr + seq + 1) - query_start
    if first_token >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    first_position = seq_len - query_len + first_token
    last_position = tl.minimum(first_position + BLOCK_Q, seq_len) - 1

    row = tl.arange(0, BLOCK_M)
    channel = tl.arange(0, PADDED_LATENT)
    rotated = tl.arange(0, PADDED_ROPE)
    token = first_token + row // GROUP
    head = tl.program_id(1) * GROUP + row % GROUP
    row_valid = (row < BLOCK_Q * GROUP) & (token < query_len) & (head < NUM_HEADS)
    q_row = (query_start + token).to(tl.int64)
    c_valid = row_valid[:, None] & (channel < LATENT)[None, :]
    r_valid = row_valid[:, None] & (rotated < ROPE)[None, :]
    q = tl.load(q_ptr + (q_row * q_stride_token + head * LATENT)[:, None] + channel[None, :], mask=c_valid, other=0.0)
    rope_at = (q_row * q_rope_stride_token + head * ROPE)[:, None] + rotated[None, :]
    q_rope = tl.load(q_rope_ptr + rope_at, mask=r_valid, other=0.0)

    start = 0
    stop = last_position + 1
    if SPLIT:
        per_segment, num_splits = decode_segments(stop, TILE_N)
        if split >= num_splits:
            return
        start += split * per_segment
        stop = tl.minimum(start + per_segment, stop)
    acc, row_max, row_sum = _attend_latent(
        q, q_rope, first_position + row // GROUP, qk_scale, pages_ptr, table_ptr + seq.to(tl.int64) * table_stride,
        start, stop, last_position + 1, BLOCK_SIZE, LATENT, PADDED_LATENT, ROPE, PADDED_ROPE, TILE_N,
    )  # fmt: skip

    # Rows beyond the tokens may have seen no key. They are not stored, but should not divide by zero either.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc / row_sum[:, None]
    target = q_row * NUM_HEADS + head
    if SPLIT:
        target = target * max_splits + split
        tl.store(lse_ptr + target, row_max + tl.log2(row_sum), mask=row_valid)
    tl.store(out_ptr + (target * LATENT)[:, None] + channel[None, :], acc.to(out_ptr.dtype.element_ty), mask=c_valid)
