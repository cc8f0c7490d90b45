"""Ring attention over stripes (Liu et al. 2023, arXiv:2310.01889): queries of all ranks against keys of all ranks.

Every rank holds a stripe of the keys in its pages (`stripes.py`) and has a stripe of the queries. One of the two goes
round the ring, in size - 1 turns, each under way while attention to what came before is computed. Which of the two is
chosen by their bytes (Yang et al. 2024, arXiv:2411.01783): a fresh prompt has as many keys as queries, and fewer heads
of them; a piece of a prompt behind a long cached one has few queries.

`RingPages`: pages travel as they lie in memory, so that no backend packs anything anew, and partial results are merged
as they come. `RingQueries`: queries travel, and all partial results come home in one all-to-all. Either way a row's
parts are merged in fp32 in the same order, from its own stripe down and around: row and keys alone decide its bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.kernels.ops import AttentionMetadata, Ops
from shoal.kernels.page_format import KVPages, PageFormat
from shoal.model_shards.parallel.context import ParallelContext

Partial = tuple[torch.Tensor, torch.Tensor]
"""Attention to some of the keys: fp32 (output [n, num_heads, head_dim], log-sum-exp [n, num_heads])."""


@dataclass(frozen=True, slots=True)
class RingPages:
    """The pages of the striped chunks go round; each rank keeps its queries."""

    page_ids: torch.Tensor
    """[num_pages] int64: the pages that travel, each once."""
    turns: list[AttentionMetadata]
    """Turn i: this rank's rows against the stripe of rank index - i. Block tables count the pages that travel."""

    def attend(
        self, ops: Ops, context: ParallelContext, q: torch.Tensor, pages: KVPages, scale: float, window: int | None
    ) -> Partial:
        """q [rows of this rank, num_heads, head_dim] -> attention to all stripes."""
        travelling, count = gather_pages(pages, self.page_ids), len(self.page_ids)
        merged: Partial | None = None
        for turn, meta in enumerate(self.turns):
            arriving = context.start_shift(travelling) if turn + 1 < len(self.turns) else None
            part = ops.paged_attention_lse(q, pages_in(travelling, pages.format, count), meta, scale, window)
            merged = part if merged is None else merge(ops, merged, part)
            if arriving is not None:
                travelling = arriving()
        assert merged is not None
        return merged

    @staticmethod
    def bytes_sent(size: int, num_pages: int, page: PageFormat) -> int:
        """By each rank, in each layer."""
        return (size - 1) * num_pages * page.bytes_per_block


@dataclass(frozen=True, slots=True)
class RingQueries:
    """The queries go round; each rank keeps its pages."""

    rows: list[int]
    """Of each rank's stripe of queries. In flight they are filled up to the most of them."""
    turns: list[AttentionMetadata]
    """Turn i: the rows of rank index - i against this rank's stripe."""

    def attend(
        self, ops: Ops, context: ParallelContext, q: torch.Tensor, pages: KVPages, scale: float, window: int | None
    ) -> Partial:
        """Like `RingPages.attend`."""
        size, index = len(self.rows), context.index("context")
        count, num_heads, head_dim = q.shape
        travelling = q.new_zeros((max(self.rows), num_heads, head_dim))
        travelling[:count] = q
        parts = q.new_empty((sum(self.rows), num_heads, head_dim + 1), dtype=torch.float32)
        of_home = torch.split_with_sizes(parts, self.rows)
        for turn, meta in enumerate(self.turns):
            arriving = context.start_shift(travelling) if turn + 1 < size else None
            home = (index - turn) % size
            part = ops.paged_attention_lse(travelling[: self.rows[home]], pages, meta, scale, window)
            for target, values in zip(unpack(of_home[home]), part, strict=True):
                target.copy_(values)
            if arriving is not None:
                travelling = arriving()
        brought = context.all_to_all(parts, self.rows, [count] * size, axis="context")
        stripes = brought.view(size, count, num_heads, head_dim + 1)
        merged = unpack(stripes[index])
        for turn in range(1, size):
            merged = merge(ops, merged, unpack(stripes[(index - turn) % size]))
        return merged

    @staticmethod
    def bytes_sent(size: int, rows: int, num_heads: int, head_dim: int, itemsize: int) -> int:
        """By each rank, in each layer: queries of `itemsize` bytes an element out, fp32 parts back. `rows`: of the
        longest stripe."""
        part = (head_dim + 1) * torch.float32.itemsize
        return (size - 1) * rows * num_heads * (head_dim * itemsize + part)


def merge(ops: Ops, into: Partial, part: Partial) -> Partial:
    """In place."""
    ops.merge_attention(*into, *part)
    return into


def pack(part: Partial) -> torch.Tensor:
    """As one tensor, to travel: fp32 [n, num_heads, head_dim + 1], the log-sum-exp behind the output."""
    out, lse = part
    return torch.cat((out, lse.unsqueeze(-1)), -1)


def unpack(packed: torch.Tensor) -> Partial:
    """Views."""
    return packed[..., :-1], packed[..., -1]


def gather_pages(pages: KVPages, page_ids: torch.Tensor) -> torch.Tensor:
    """K and V of these pages, one behind the other, as bytes."""
    page, count = pages.format, len(page_ids)
    travelling = torch.empty(count * page.bytes_per_block, dtype=torch.uint8, device=pages.k.device)
    copy = pages_in(travelling, page, count)
    torch.index_select(pages.k, 0, page_ids, out=copy.k)
    torch.index_select(pages.v, 0, page_ids, out=copy.v)
    return travelling


def pages_in(travelling: torch.Tensor, page: PageFormat, count: int) -> KVPages:
    """The pages that `gather_pages` put there: views."""
    k, v = travelling.view(page.dtype).chunk(2)
    return KVPages(page, k.view(page.k_shape(count)), v.view(page.v_shape(count)))
