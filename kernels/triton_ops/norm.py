# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""RMSNorm kernels (Zhang & Sennrich 2019, arXiv:1910.07467), fp32 inside: over hidden rows with the residual added in
the same pass, and over single heads (q and k norms)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.triton_ops.launch import Launch, cdiv, next_power_of_2, require_dense

HEAD_TILE = 2048
"""Elements of one program of `head_rms_norm_kernel`."""


@triton.jit
def rms_norm_kernel(
    out_ptr, sum_ptr, x_ptr, residual_ptr, rows_ptr, weight_ptr, eps, x_stride, residual_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows). With a residual, x + residual is rounded to the activation dtype, kept in `sum_ptr`, and what was
    rounded is what is normalised: the next layer must see the same residual. With `rows_ptr`, row i is made of row
    rows[i] of x."""
    row = tl.program_id(0).to(tl.int64)
    source = row
    if rows_ptr is not None:
        source = tl.load(rows_ptr + row)
    column = tl.arange(0, BLOCK)
    valid = column < SIZE
    x = tl.load(x_ptr + source * x_stride + column, mask=valid, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + row * residual_stride + column, mask=valid, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * SIZE + column, rounded, mask=valid)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    weight = tl.load(weight_ptr + column, mask=valid, other=0.0)
    tl.store(out_ptr + row * SIZE + column, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["num_rows"])
def head_rms_norm_kernel(
    out_ptr, x_ptr, weight_ptr, eps, x_stride_token, num_rows,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows); a row is one head of one token."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dim = tl.arange(0, PADDED_DIM)
    valid = (row < num_rows)[:, None] & (dim < HEAD_DIM)[None, :]
    source = row // NUM_HEADS * x_stride_token + row % NUM_HEADS * HEAD_DIM
    x = tl.load(x_ptr + source[:, None] + dim[None, :], mask=valid, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)
    weight = tl.load(weight_ptr + dim, mask=dim < HEAD_DIM, other=0.0)
    out = (x * scale[:, None] * weight[None, :]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (row * HEAD_DIM)[:, None] + dim[None, :], out, mask=valid)


def rms_norm_launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    total: torch.Tensor,
) -> Launch:
    """`total` receives x + residual (unused without a residual); `out` and `total` are dense [num_tokens, hidden]."""
    rows, size = x.shape
    require_dense(x, first_axis=1)
    if residual is not None:
        require_dense(residual, first_axis=1)
    block = next_power_of_2(size)
    return Launch(
        rms_norm_kernel,
        (rows, 1, 1),
        {
            "out_ptr": out,
            "sum_ptr": total if residual is not None else None,
            "x_ptr": x,
            "residual_ptr": residual,
            "rows_ptr": None,
            "weight_ptr": weight,
            "eps": eps,
            "x_stride": x.stride(0),
            "residual_stride": residual.stride(0) if residual is not None else 0,
        },
        {"SIZE": size, "BLOCK": block},
        num_warps=_warps(block),
    )


def rms_norm_rows_launch(
    x: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> Launch:
    """`out` dense [len(rows), hidden]: the norms of these rows of x."""
    size = x.shape[1]
    require_dense(x, first_axis=1)
    block = next_power_of_2(size)
    return Launch(
        rms_norm_kernel,
        (len(rows), 1, 1),
        {
            "out_ptr": out,
            "sum_ptr": None,
            "x_ptr": x,
            "residual_ptr": None,
            "rows_ptr": rows,
            "weight_ptr": weight,
            "eps": eps,
            "x_stride": x.stride(0),
            "residual_stride": 0,
        },
        {"SIZE": size, "BLOCK": block},
        num_warps=_warps(block),
    )


def _warps(block: int) -> int:
    """Warps of a program over a row: so many for 512 elements each, the same for the same row in any batch."""
    return min(16, max(1, block // 512))


def head_rms_norm_launch(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> Launch:
    tokens, heads, dim = x.shape
    require_dense(x, first_axis=1)
    padded = next_power_of_2(dim)
    block_rows = max(1, HEAD_TILE // padded)
    return Launch(
        head_rms_norm_kernel,
        (cdiv(tokens * heads, block_rows), 1, 1),
        {
            "out_ptr": out,
            "x_ptr": x,
            "weight_ptr": weight,
            "eps": eps,
            "x_stride_token": x.stride(0),
            "num_rows": tokens * heads,
        },
        {"NUM_HEADS": heads, "HEAD_DIM": dim, "PADDED_DIM": padded, "BLOCK_ROWS": block_rows},
    )
