"""Random paged-attention inputs, laid out as the engine lays them out and hostile everywhere else.

Every slot that no query may read holds NaN: unwritten tails of blocks, blocks of nobody, the null block, and what lies
before a sliding window; whole blocks before it are the null block in the table, as if they had been freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from shoal.kernels.ops import AttentionMetadata
from shoal.kernels.page_format import KVPages, PageFormat


@dataclass(frozen=True)
class PagedCase:
    """Inputs of one `paged_attention` call, and the same in fp32 without traps for the reference."""

    q: torch.Tensor
    pages: KVPages
    meta: AttentionMetadata
    scale: float
    window: int | None
    reference_q: torch.Tensor
    reference_pages: KVPages
    reference_meta: AttentionMetadata


def paged_case(
    sequences: Sequence[tuple[int, int]],
    *,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    window: int | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> PagedCase:
    """`sequences` are (tokens in the cache after this step, query tokens), decodes first; `heads` is (query, KV)."""
    generator = torch.Generator(device=device).manual_seed(seed)
    lengths = [length for length, _ in sequences]
    blocks_of = [-(-length // block_size) for length in lengths]
    num_blocks = sum(blocks_of) + 3
    # Blocks of a sequence lie in no order. Block 0 is the null block; the last two belong to nobody.
    order = (torch.randperm(num_blocks - 3, generator=torch.Generator().manual_seed(seed)) + 1).split(blocks_of)
    tables = torch.zeros(len(sequences), max(blocks_of) + 1, dtype=torch.int32)
    for i, blocks in enumerate(order):
        tables[i, : len(blocks)] = blocks

    page_format = PageFormat("canonical", block_size, heads[1], head_dim, kv_dtype or dtype)
    pages = page_format.allocate(num_blocks, torch.device(device))
    for x in (pages.k, pages.v):
        x.copy_(torch.randn(x.shape, generator=generator, device=device))
    reference_pages = KVPages(
        replace(page_format, dtype=torch.float32), pages.k.float().clone(), pages.v.float().clone()
    )

    readable = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    live_tables = tables.clone()
    for i, (length, queries) in enumerate(sequences):
        first = 0 if window is None else max(0, length - queries - window + 1)
        live_tables[i, : first // block_size] = 0
        slots = torch.arange(first, length)
        readable[tables[i, slots // block_size].long(), slots % block_size] = True
    trap = ~readable.to(device)
    pages.k[trap] = torch.nan
    pages.v[trap] = torch.nan

    query_start = torch.tensor([0, *[queries for _, queries in sequences]]).cumsum(0).int()
    num_tokens = int(query_start[-1])
    q = torch.randn(num_tokens, heads[0], head_dim, generator=generator, device=device).to(dtype)
    decodes = [queries == 1 for _, queries in sequences]
    meta = AttentionMetadata(
        query_start=query_start.to(device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=live_tables.to(device),
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
        positions=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        max_query_len=max(queries for _, queries in sequences),
        max_seq_len=max(lengths),
        num_decodes=decodes.index(False) if False in decodes else len(decodes),
    )
    reference_meta = replace(meta, block_tables=tables.to(device))
    return PagedCase(q, pages, meta, head_dim**-0.5, window, q.float(), reference_pages, reference_meta)
