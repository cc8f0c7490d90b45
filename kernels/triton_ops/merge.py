# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The exact merge of attention over disjoint keys, in place and in fp32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.triton_ops.launch import Launch, cdiv, next_power_of_2

TILE = 1024
"""Channels of a program, over its rows."""


@triton.jit(do_not_specialize=["num_rows"])
def merge_attention_kernel(
    out_ptr, lse_ptr, other_ptr, other_lse_ptr, out_stride, lse_stride, other_stride, other_lse_stride, num_rows,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows). A row is one head of one token."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED_DIM)
    in_range = row < num_rows
    valid = in_range[:, None] & (column < HEAD_DIM)[None, :]
    lse = tl.load(lse_ptr + row * lse_stride, mask=in_range, other=0.0)
    other_lse = tl.load(other_lse_ptr + row * other_lse_stride, mask=in_range, other=0.0)
    # Without any key both are -inf: subtract 0, or exp(-inf - -inf) would be NaN. A NaN of either stays in the sum.
    top = tl.maximum(lse, other_lse)
    top = tl.where(top == float("-inf"), 0.0, top)
    mine = tl.exp(lse - top)
    theirs = tl.exp(other_lse - top)
    total = mine + theirs
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    inverse = 1.0 / total
    target = out_ptr + (row * out_stride)[:, None] + column[None, :]
    out = tl.load(target, mask=valid, other=0.0) * (mine * inverse)[:, None]
    other = tl.load(other_ptr + (row * other_stride)[:, None] + column[None, :], mask=valid, other=0.0)
    tl.store(target, out + other * (theirs * inverse)[:, None], mask=valid)
    merged = tl.where(nothing, float("-inf"), top + tl.log(total))
    tl.store(lse_ptr + row * lse_stride, merged, mask=in_range)


def merge_attention_launch(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> Launch:
    tokens, heads, dim = out.shape
    assert other.shape == out.shape, (other.shape, out.shape)
    assert lse.shape == other_lse.shape == (tokens, heads), (lse.shape, other_lse.shape)
    for x in (out, lse, other, other_lse):
        assert x.dtype == torch.float32, x.dtype
        # Heads of all tokens lie evenly apart, so that they count as rows; channels side by side.
        assert tokens <= 1 or x.stride(0) == heads * x.stride(1), (x.shape, x.stride())
        assert x.dim() == 2 or x.stride(2) == 1, x.stride()
    padded = next_power_of_2(dim)
    rows = max(1, TILE // padded)
    return Launch(
        merge_attention_kernel,
        (cdiv(tokens * heads, rows), 1, 1),
        {
            "out_ptr": out,
            "lse_ptr": lse,
            "other_ptr": other,
            "other_lse_ptr": other_lse,
            "out_stride": out.stride(1),
            "lse_stride": lse.stride(1),
            "other_stride": other.stride(1),
            "other_lse_stride": other_lse.stride(1),
            "num_rows": tokens * heads,
        },
        {"HEAD_DIM": dim, "PADDED_DIM": padded, "ROWS": rows},
    )
