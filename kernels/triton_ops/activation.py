# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Gated activations of the MLP: act(gate) * up, fp32 inside."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from shoal.kernels.triton_ops.launch import Launch, cdiv, next_power_of_2, require_dense

MAX_BLOCK = 2048

GELU_SLOPE = tl.constexpr(1.5957691216057308)
"""2 * sqrt(2 / pi)."""


@triton.jit
def gated_kernel(
    out_ptr, x_ptr, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr
):  # fmt: skip
    """Grid (tokens, chunks of a row)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = column < SIZE
    gate = tl.load(x_ptr + token * x_stride + column, mask=valid, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * x_stride + SIZE + column, mask=valid, other=0.0).to(tl.float32)
    argument = gate
    if GELU:
        # 0.5 * (1 + tanh(y)) == sigmoid(2 * y), y = sqrt(2 / pi) * (x + 0.044715 * x^3)
        argument = GELU_SLOPE * (gate + 0.044715 * gate * gate * gate)
    out = gate * tl.sigmoid(argument) * up
    tl.store(out_ptr + token * SIZE + column, out.to(out_ptr.dtype.element_ty), mask=valid)


def gated_launch(x: torch.Tensor, activation: Literal["silu", "gelu_tanh"], out: torch.Tensor) -> Launch:
    tokens, width = x.shape
    require_dense(x, first_axis=1)
    assert width % 2 == 0, x.shape
    size = width // 2
    block = min(MAX_BLOCK, next_power_of_2(size))
    return Launch(
        gated_kernel,
        (tokens, cdiv(size, block), 1),
        {"out_ptr": out, "x_ptr": x, "x_stride": x.stride(0)},
        {"SIZE": size, "BLOCK": block, "GELU": activation == "gelu_tanh"},
    )
