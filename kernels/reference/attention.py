"""Paged attention, written to be read: one sequence at a time, all scores at once, fp32."""

from __future__ import annotations

import torch

from shoal.kernels.ops import AttentionMetadata
from shoal.kernels.page_format import KVPages


def paged_attention(
    q: torch.Tensor, pages: KVPages, meta: AttentionMetadata, scale: float, window: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of q [num_tokens, num_heads, head_dim] over pages of any layout.

    Returns the output in fp32 and the log-sum-exp of the scaled scores [num_tokens, num_heads]. Head h reads the
    key-value head h // (num_heads // num_kv_heads). Rows that no sequence owns, and queries before the first key, are
    zero and -inf.
    """
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    starts, lengths = meta.query_start.tolist(), meta.seq_lens.tolist()
    for i, length in enumerate(lengths):
        rows = slice(starts[i], starts[i + 1])
        if rows.start == rows.stop:
            continue
        keys, values = gather_sequence(pages, meta.block_tables[i], length)
        queries = q[rows].float()
        group = q.shape[1] // keys.shape[1]
        keys, values = (x.float().repeat_interleave(group, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        visible = visible_keys(len(queries), length, window, q.device)
        scores = scores.masked_fill(~visible, -torch.inf)
        lse[rows] = torch.logsumexp(scores, dim=-1).T
        # The softmax of a query that sees nothing would be NaN.
        weights = torch.softmax(scores, dim=-1).masked_fill(~visible.any(-1, keepdim=True), 0)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, values)
    return out, lse


def gather_sequence(pages: KVPages, block_table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `length` keys and values of a sequence, each [length, num_kv_heads, head_dim], in the pages' dtype."""
    num_blocks = -(-length // pages.format.block_size)
    k, v = pages.canonical(block_table[:num_blocks].long())
    return k.flatten(0, 1)[:length], v.flatten(0, 1)[:length]


def visible_keys(num_queries: int, length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [num_queries, length]: may query i, the token at position length - num_queries + i, see key j?"""
    position = torch.arange(length - num_queries, length, device=device).unsqueeze(1)
    key = torch.arange(length, device=device)
    visible = key <= position
    return visible if window is None else visible & (key > position - window)
