# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The weighted sum of what its experts made of each row, in one pass: the results are read where they lie."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.triton_ops.launch import Launch, cdiv, require_dense

BLOCK = 1024
"""Columns of one program."""


@triton.jit
def combine_experts_kernel(
    out_ptr, results_ptr, places_ptr, weights_ptr,
    SIZE: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of columns). Choices are added one after the other, so that a row's bits are its own."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = column < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOICES):
        place = tl.load(places_ptr + row * CHOICES + choice)
        weight = tl.load(weights_ptr + row * CHOICES + choice)
        total += weight * tl.load(results_ptr + place * SIZE + column, mask=valid, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + column, total.to(out_ptr.dtype.element_ty), mask=valid)


def combine_experts_launch(
    results: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> Launch:
    """`out` dense [n, hidden]; places int64 and weights fp32 [n, k]."""
    size = results.shape[1]
    for tensor in (results, places, weights):
        require_dense(tensor, first_axis=0)
    assert weights.dtype == torch.float32, weights.dtype
    return Launch(
        combine_experts_kernel,
        (len(places), cdiv(size, BLOCK), 1),
        {"out_ptr": out, "results_ptr": results, "places_ptr": places, "weights_ptr": weights},
        {"SIZE": size, "CHOICES": places.shape[1], "BLOCK": BLOCK},
    )
