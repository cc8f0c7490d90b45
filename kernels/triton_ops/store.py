# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Writing this step's keys and values to their slots of canonical pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.page_format import KVPages
from shoal.kernels.triton_ops.launch import Launch, cdiv, next_power_of_2, require_dense

MAX_BLOCK = 4096


@triton.jit
def store_kv_kernel(
    k_ptr, v_ptr, k_pages_ptr, v_pages_ptr, slots_ptr, k_stride_token, v_stride_token, k_stride_block, v_stride_block,
    ROW: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, chunks of a row); a row is a token's num_kv_heads * head_dim channels. Slot -1 stores nothing."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = column < ROW
    inside = slot % BLOCK_SIZE * ROW
    k = tl.load(k_ptr + token * k_stride_token + column, mask=valid, other=0.0)
    v = tl.load(v_ptr + token * v_stride_token + column, mask=valid, other=0.0)
    k_target = k_pages_ptr + slot // BLOCK_SIZE * k_stride_block + inside + column
    v_target = v_pages_ptr + slot // BLOCK_SIZE * v_stride_block + inside + column
    tl.store(k_target, k.to(k_pages_ptr.dtype.element_ty), mask=valid)
    tl.store(v_target, v.to(v_pages_ptr.dtype.element_ty), mask=valid)


def store_kv_launch(k: torch.Tensor, v: torch.Tensor, pages: KVPages, slot_mapping: torch.Tensor) -> Launch:
    tokens, heads, dim = k.shape
    page = pages.format
    assert page.layout == "canonical", f"Triton stores to canonical pages, not {page.layout}"
    assert (heads, dim) == (page.num_kv_heads, page.head_dim), (page, k.shape)
    for x in (k, v, pages.k, pages.v):
        require_dense(x, first_axis=1)
    row = heads * dim
    block = min(MAX_BLOCK, next_power_of_2(row))
    return Launch(
        store_kv_kernel,
        (tokens, cdiv(row, block), 1),
        {
            "k_ptr": k,
            "v_ptr": v,
            "k_pages_ptr": pages.k,
            "v_pages_ptr": pages.v,
            "slots_ptr": slot_mapping,
            "k_stride_token": k.stride(0),
            "v_stride_token": v.stride(0),
            "k_stride_block": pages.k.stride(0),
            "v_stride_block": pages.v.stride(0),
        },
        {"ROW": row, "BLOCK_SIZE": page.block_size, "BLOCK": block},
    )
