"""Attention where the keys of each sequence are striped over the ranks.

The rows of a step on one rank:

    | replicated: decodes and short pieces, on every rank | striped: this rank's rows of long pieces |

A replicated row attends to each rank's keys on that rank, and the parts are gathered and merged on all of them, with
the same bits. Striped rows attend by a ring (`ring.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from shoal.kernels.ops import AttentionMetadata, Ops
from shoal.kernels.page_format import KVPages
from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.parallel.ring import RingPages, RingQueries, merge, pack, unpack


class AttentionOperator(Protocol):
    """`Ops.paged_attention`, or what stands in for it."""

    def __call__(
        self, q: torch.Tensor, pages: KVPages, meta: AttentionMetadata, scale: float, window: int | None = None
    ) -> torch.Tensor: ...


@dataclass(slots=True, kw_only=True)
class StripedMetadata(AttentionMetadata):
    """`positions` and `slot_mapping` are of all rows of this rank; the other fields of the base say how the replicated
    rows see its own keys."""

    num_replicated: int
    """They are the first rows."""
    parts: torch.Tensor
    """[ranks, num_replicated] int64: where each replicated row's parts lie among those of all ranks (rank after rank),
    in the order in which they are merged."""
    ring: RingPages | RingQueries | None
    """How the other rows attend, if there are any."""


class ContextParallelAttention:
    """Stands in for `Ops.paged_attention` on context-parallel ranks."""

    def __init__(self, ops: Ops, context: ParallelContext) -> None:
        self.ops, self.context = ops, context

    def __call__(
        self, q: torch.Tensor, pages: KVPages, meta: AttentionMetadata, scale: float, window: int | None = None
    ) -> torch.Tensor:
        """q [rows of this rank, num_heads, head_dim] -> the same shape. A `window` is a multiple of the ranks, so that
        it holds equally many keys of each."""
        assert isinstance(meta, StripedMetadata)
        if window is not None:
            window //= self.context.size("context")
        count = meta.num_replicated
        if meta.ring is None:
            return self._replicated(q, pages, meta, scale, window).to(q.dtype)
        out, _ = meta.ring.attend(self.ops, self.context, q[count:], pages, scale, window)
        if count:
            out = torch.cat((self._replicated(q[:count], pages, meta, scale, window), out))
        return out.to(q.dtype)

    def _replicated(
        self, q: torch.Tensor, pages: KVPages, meta: StripedMetadata, scale: float, window: int | None
    ) -> torch.Tensor:
        part = pack(self.ops.paged_attention_lse(q, pages, meta, scale, window))
        parts = self.context.all_gather(part, dim=0, axis="context")
        merged = unpack(parts[meta.parts[0]])
        for rows in meta.parts[1:]:
            merged = merge(self.ops, merged, unpack(parts[rows]))
        return merged[0]
