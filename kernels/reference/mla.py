"""Latent attention, written to be read: one sequence at a time, fp32, absorbed."""

from __future__ import annotations

import torch

from shoal.kernels.ops import AttentionMetadata
from shoal.kernels.page_format import KVPages
from shoal.kernels.reference.attention import gather_sequence, visible_keys

MAX_SCORES = 16 << 20
"""Scores held at once, in elements: a sequence's queries go by in pieces that keep to it."""


def paged_mla_attention(
    q: torch.Tensor, q_rope: torch.Tensor, pages: KVPages, meta: AttentionMetadata, scale: float
) -> torch.Tensor:
    """See `Ops.paged_mla_attention`. Rows that no sequence owns are zero."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    latent_dim = q.shape[2]
    starts, lengths = meta.query_start.tolist(), meta.seq_lens.tolist()
    for i, length in enumerate(lengths):
        if starts[i] == starts[i + 1]:
            continue
        keys = gather_sequence(pages, meta.block_tables[i], length)[0].squeeze(1).float()
        visible = visible_keys(starts[i + 1] - starts[i], length, None, q.device)
        piece = max(1, MAX_SCORES // (q.shape[1] * length))
        for row in range(starts[i], starts[i + 1], piece):
            rows = slice(row, min(row + piece, starts[i + 1]))
            queries = torch.cat((q[rows], q_rope[rows]), dim=2).float()
            scores = torch.einsum("qhd,kd->hqk", queries, keys) * scale
            scores = scores.masked_fill(~visible[rows.start - starts[i] : rows.stop - starts[i]], -torch.inf)
            values = keys[:, :latent_dim]
            out[rows] = torch.einsum("hqk,kd->qhd", torch.softmax(scores, dim=-1), values).to(q.dtype)
    return out
