# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Paged attention for prefill, chunked prefill and decode: one kernel family, and the exact merge of split decodes.

A program owns BLOCK_M rows of one KV head. A row is one query token of one query head of that KV head's group, so that
each key and value is read once for the whole group:

    row r  ->  token r // GROUP of the program's BLOCK_M // GROUP tokens, head kv_head * GROUP + r % GROUP

and walks over the keys that its rows may see, TILE_N at a time, with the online softmax in base 2 (Milakov & Gimelshein
2018, arXiv:1805.02867; Dao 2023, arXiv:2307.08691). For a window w and query positions p0..p1 of a program these are:

    key_lo = p0-w+1       p1-w+1                p0             p1 = key_hi - 1
    | seen by some rows | seen by every row   | seen by some |
    | masked tiles      | unmasked tiles      | masked tiles |

Decode (one query token) waits for memory, so nothing is gained from unmasked tiles; there, instead, the keys of a long
sequence are split into segments (`decode_segments`) that a second kernel merges. How they are split depends on the
length of that sequence alone: a row's result never depends on what else is in the batch.

Rows of a key tile that no query may see are never loaded: slots not yet written may hold NaN, and 0 * NaN is NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shoal.kernels.triton_ops.launch import UPCAST_DOT

LN2 = tl.constexpr(0.6931471805599453)
MIN_SEGMENT = tl.constexpr(256)
"""Fewest keys in a segment of a split decode: below this the fp32 partial result costs more than 2 % of the keys."""
MAX_SEGMENTS = tl.constexpr(32)
"""Most segments of one sequence; bounds the workspace. Longer sequences get longer segments."""


@triton.jit
def decode_segments(num_keys, TILE_N: tl.constexpr):
    """(keys in a segment, a multiple of TILE_N, number of segments) for the walk over `num_keys` keys."""
    per_segment = tl.cdiv(tl.cdiv(num_keys, MAX_SEGMENTS), TILE_N) * TILE_N
    per_segment = tl.maximum(per_segment, MIN_SEGMENT)
    return per_segment, tl.cdiv(num_keys, per_segment)


@triton.jit
def _find_sequence(query_start_ptr, block, first_seq, num_seqs, BLOCK_Q: tl.constexpr):
    """(sequence, first block of it) that owns query block `block`. Sequence i starts at block
    (query_start[i] - query_start[first]) // BLOCK_Q + (i - first): an upper bound of the blocks before it that needs no
    prefix sum, so the grid is known on the host without a sync; the surplus blocks of a sequence return at once."""
    low = first_seq
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        # The sequences before first_seq have one token each: query_start[first_seq] == first_seq.
        start = (tl.load(query_start_ptr + middle) - first_seq) // BLOCK_Q + middle - first_seq
        if start <= block:
            low = middle
        else:
            high = middle
    return low, (tl.load(query_start_ptr + low) - first_seq) // BLOCK_Q + low - first_seq


@triton.jit
def _dot(a, b, acc):
    if UPCAST_DOT:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def _attend(
    acc, row_max, row_sum, q, q_position, qk_scale,
    k_ptr, v_ptr, table_ptr, block_stride, slot_stride,
    start, stop, key_lo, key_hi, window,
    HAS_WINDOW: tl.constexpr, MASKED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Folds the keys [start, stop) into (acc, row_max, row_sum). `row_max` is in base 2 and already scaled."""
    dim = tl.arange(0, PADDED_DIM)
    for tile in tl.range(start, stop, TILE_N):
        key = tile + tl.arange(0, TILE_N)
        if MASKED:
            in_range = (key >= key_lo) & (key < key_hi)
            block = tl.load(table_ptr + key // BLOCK_SIZE, mask=in_range, other=0).to(tl.int64)
        else:
            block = tl.load(table_ptr + key // BLOCK_SIZE).to(tl.int64)
        offset = (block * block_stride + key % BLOCK_SIZE * slot_stride)[:, None] + dim[None, :]
        valid = dim[None, :] < HEAD_DIM
        if MASKED:
            valid = valid & in_range[:, None]
        # A mask that holds everywhere still costs: it is passed only where it can fail.
        if MASKED or HEAD_DIM != PADDED_DIM:
            k = tl.load(k_ptr + offset, mask=valid, other=0.0)
            v = tl.load(v_ptr + offset, mask=valid, other=0.0)
        else:
            k = tl.load(k_ptr + offset)
            v = tl.load(v_ptr + offset)

        scores = tl.zeros([q.shape[0], TILE_N], dtype=tl.float32)
        scores = _dot(q, tl.trans(k.to(q.dtype)), scores)
        if MASKED:
            visible = key[None, :] <= q_position[:, None]
            if HAS_WINDOW:
                visible = visible & (key[None, :] > q_position[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        # Unscaled scores, so that the scaling below is one fused multiply-add; qk_scale > 0 keeps their order.
        new_max = tl.maximum(row_max, tl.max(scores, 1) * qk_scale)
        # A row that has seen no key yet: subtract 0, or exp2(-inf - -inf) would be NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores * qk_scale - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = _dot(weights.to(q.dtype), v.to(q.dtype), acc * rescale[:, None])
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def _attend_rows(
    q, first_position, last_position, qk_scale, k_ptr, v_ptr, table_ptr, block_stride, start, stop, key_lo, window,
    slot_stride: tl.constexpr, GROUP: tl.constexpr, DECODE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """(acc, row_max, row_sum) of a program's rows over the keys [start, stop), masked only where needed; decode always
    masks: it waits for memory anyway."""
    BLOCK_M: tl.constexpr = q.shape[0]
    acc = tl.zeros([BLOCK_M, PADDED_DIM], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    q_position = first_position + tl.arange(0, BLOCK_M) // GROUP
    key_hi = last_position + 1
    if not DECODE:
        seen_by_all = tl.maximum((first_position + 1) // TILE_N * TILE_N, start)
        if HAS_WINDOW:
            masked_stop = tl.maximum(tl.cdiv(last_position - window + 1, TILE_N) * TILE_N, start)
            masked_stop = tl.minimum(masked_stop, seen_by_all)
            acc, row_max, row_sum = _attend(
                acc, row_max, row_sum, q, q_position, qk_scale, k_ptr, v_ptr, table_ptr, block_stride, slot_stride,
                start, masked_stop, key_lo, key_hi, window, HAS_WINDOW, True, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, TILE_N,
            )  # fmt: skip
            start = masked_stop
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q, q_position, qk_scale, k_ptr, v_ptr, table_ptr, block_stride, slot_stride,
            start, seen_by_all, key_lo, key_hi, window, HAS_WINDOW, False, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, TILE_N,
        )  # fmt: skip
        start = seen_by_all
    return _attend(
        acc, row_max, row_sum, q, q_position, qk_scale, k_ptr, v_ptr, table_ptr, block_stride, slot_stride,
        start, stop, key_lo, key_hi, window, HAS_WINDOW, True, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, TILE_N,
    )  # fmt: skip


# What changes from step to step is not specialised: a value of 1 or a multiple of 16 would compile another kernel.
@triton.jit(do_not_specialize=["table_stride", "first_seq", "num_seqs", "window", "max_splits"])
def paged_attention_kernel(
    out_ptr,  # [num_tokens, num_heads, HEAD_DIM]; split: fp32 [num_decodes, num_heads, max_splits, HEAD_DIM]
    lse_ptr,  # fp32 [num_tokens, num_heads], natural, or None; split: [num_decodes, num_heads, max_splits], base 2
    q_ptr, k_ptr, v_ptr, table_ptr, query_start_ptr, seq_lens_ptr,
    qk_scale,  # softmax scale * log2(e)
    q_stride_token, block_stride, table_stride, first_seq, num_seqs, window, max_splits,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, TILE_N: tl.constexpr,
    DECODE: tl.constexpr, HAS_WINDOW: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Grid (query blocks, KV heads, max_splits). DECODE: block i is the one token of sequence i. See the module."""
    BLOCK_Q: tl.constexpr = 1 if DECODE else BLOCK_M // GROUP
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    kv_head = tl.program_id(1)
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
    dim = tl.arange(0, PADDED_DIM)
    token = first_token + row // GROUP
    q_row = (query_start + token).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    row_valid = (row < BLOCK_Q * GROUP) & (token < query_len)
    q_valid = row_valid[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + (q_row * q_stride_token + head * HEAD_DIM)[:, None] + dim[None, :], mask=q_valid, other=0.0)

    key_lo = 0
    if HAS_WINDOW:
        key_lo = tl.maximum(first_position - window + 1, 0)
    start = key_lo // TILE_N * TILE_N
    stop = last_position + 1
    if SPLIT:
        per_segment, num_splits = decode_segments(stop - start, TILE_N)
        if split >= num_splits:
            return
        start += split * per_segment
        stop = tl.minimum(start + per_segment, stop)
    acc, row_max, row_sum = _attend_rows(
        q, first_position, last_position, qk_scale, k_ptr + kv_head * HEAD_DIM, v_ptr + kv_head * HEAD_DIM,
        table_ptr + seq.to(tl.int64) * table_stride, block_stride, start, stop, key_lo, window,
        NUM_KV_HEADS * HEAD_DIM, GROUP, DECODE, HAS_WINDOW, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, TILE_N,
    )  # fmt: skip

    # Rows beyond the tokens may have seen no key. They are not stored, but should not divide by zero either.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc / row_sum[:, None]
    lse = row_max + tl.log2(row_sum)
    target = q_row * NUM_HEADS + head
    if SPLIT:
        target = target * max_splits + split
        tl.store(lse_ptr + target, lse, mask=row_valid)
    elif lse_ptr is not None:
        tl.store(lse_ptr + target, lse * LN2, mask=row_valid)
    tl.store(out_ptr + (target * HEAD_DIM)[:, None] + dim[None, :], acc.to(out_ptr.dtype.element_ty), mask=q_valid)


@triton.jit(do_not_specialize=["window", "max_splits"])
def merge_segments_kernel(
    out_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    lse_ptr,  # fp32 [num_tokens, num_heads] (natural), may be None
    partial_out_ptr,  # fp32 [num_decodes, num_heads, max_splits, HEAD_DIM], each normalised over its segment
    partial_lse_ptr,  # fp32 [num_decodes, num_heads, max_splits], base 2
    query_start_ptr, seq_lens_ptr, window, max_splits,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, TILE_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Grid (sequences, heads). Adds a row's segments in order, weighted by exp2(lse - max): exact up to fp32 rounding,
    and the order does not depend on max_splits. Segments that the sequence does not have were never written and are not
    read. A sequence without a query token, which pads a captured step, has no row to write."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    query_start = tl.load(query_start_ptr + seq)
    if tl.load(query_start_ptr + seq + 1) == query_start:
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    start = 0
    if HAS_WINDOW:
        start = tl.maximum(seq_len - window, 0) // TILE_N * TILE_N
    _, num_splits = decode_segments(seq_len - start, TILE_N)

    row = query_start.to(tl.int64) * NUM_HEADS + head
    split = tl.arange(0, MAX_SEGMENTS)
    all_lse = tl.load(partial_lse_ptr + row * max_splits + split, mask=split < num_splits, other=float("-inf"))
    lse_max = tl.max(all_lse, 0)
    dim = tl.arange(0, PADDED_DIM)
    acc = tl.zeros([PADDED_DIM], dtype=tl.float32)
    total = 0.0
    for i in tl.range(0, num_splits):
        weight = tl.exp2(tl.load(partial_lse_ptr + row * max_splits + i) - lse_max)
        partial = tl.load(partial_out_ptr + (row * max_splits + i) * HEAD_DIM + dim, mask=dim < HEAD_DIM, other=0.0)
        acc += weight * partial
        total += weight
    # A query without keys: zeros, as without a split.
    total = tl.where(total == 0.0, 1.0, total)
    out = (acc / total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * HEAD_DIM + dim, out, mask=dim < HEAD_DIM)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, (lse_max + tl.log2(total)) * LN2)
