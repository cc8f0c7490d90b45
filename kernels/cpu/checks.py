"""Checks of the indices that native code follows blindly: each costs a pass, so all but `check_rows` are made with
SHOAL_KERNEL_CHECKS=1 only."""

from __future__ import annotations

import torch

from shoal.kernels.ops import AttentionMetadata
from shoal.kernels.page_format import KVPages


def check_rows(index: torch.Tensor, num_rows: int) -> None:
    """Rows of a weight by token id. In numpy: a fraction of the time, and a capture need not know of it."""
    ids = index.numpy()
    if ids.size and not 0 <= ids.min() <= ids.max() < num_rows:
        raise IndexError(f"row index outside of the weight's {num_rows} rows")


def check_positions(positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    _check_range("position", positions, len(cos_sin))


def check_slots(slot_mapping: torch.Tensor, pages: KVPages) -> None:
    _check_range("slot", slot_mapping[slot_mapping != -1], len(pages.k) * pages.format.block_size)


def check_groups(group_starts: torch.Tensor, num_rows: int) -> None:
    starts = group_starts.tolist()
    if starts[0] != 0 or starts != sorted(starts) or starts[-1] > num_rows:
        raise IndexError(f"group starts {starts} do not ascend from 0 to at most {num_rows} rows")


def check_experts(index: torch.Tensor, end: int) -> None:
    _check_range("expert or its row", index, end)


def check_attention(meta: AttentionMetadata, pages: KVPages, num_tokens: int, *, keyless: bool = False) -> None:
    """Raises IndexError unless every block that a sequence reaches is in the pool, and every query is a token; with
    `keyless` there may be queries before the first key."""
    query_lens = meta.query_start.diff()
    if len(meta.query_start) != len(meta.seq_lens) + 1 or int(meta.query_start[0]) != 0:
        raise IndexError("query_start must have one entry more than seq_lens and start at 0")
    too_many = not keyless and (query_lens > meta.seq_lens).any()
    if (query_lens < 0).any() or too_many or int(meta.query_start[-1]) > num_tokens:
        raise IndexError(f"query_start {meta.query_start.tolist()} does not fit seq_lens {meta.seq_lens.tolist()}")
    capacity = meta.block_tables.shape[1] * pages.format.block_size
    if (meta.seq_lens > capacity).any():
        raise IndexError(f"a sequence is longer than the {capacity} slots of its block table")
    _check_range("block", meta.block_tables, len(pages.k))


def _check_range(what: str, index: torch.Tensor, end: int) -> None:
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < end:
        raise IndexError(f"{what} out of range [0, {end}): from {int(index.min())} to {int(index.max())}")
