"""Latent attention's kernels beside their reference on random inputs, for `correctness.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from shoal.kernels.ops import AttentionMetadata, LatentNorm, Ops
from shoal.kernels.page_format import PageFormat

BLOCK_SIZE = 16
Sequences = list[tuple[int, int]]
"""(tokens in the cache, query tokens of the step), decodes first."""


def latent_outputs(
    ops: Ops, reference: Ops, device: torch.device, dtype: torch.dtype, *, small: bool
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(what, the kernels' result, the reference's in fp32 from the same rounded inputs)."""
    heads, latent, rope = (3, 48, 8) if small else (16, 512, 64)
    sequences = [(300, 1), (5, 1), (40, 12)] if small else [(9000, 1), (700, 1), (1, 1), (3000, 500), (257, 257)]
    tokens = sum(count for _, count in sequences)
    meta, num_blocks = _meta(sequences, device)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    q, fused, kv = random(tokens, heads, latent), random(tokens, heads * (rope + 8)), random(tokens, latent + rope)
    q_rope = fused[:, heads * 8 :].view(tokens, heads, rope)  # a view, as models have it
    norm = LatentNorm(1 + 0.1 * torch.randn(latent, device=device), 1e-6)
    cos_sin = torch.randn(meta.max_seq_len, rope, device=device)
    cached = random(num_blocks, BLOCK_SIZE, 1, latent + rope)

    expected_q = q_rope.float()
    page = PageFormat.latent("canonical", BLOCK_SIZE, latent + rope, dtype)
    pages, expected_pages = (replace(page, dtype=kind).allocate(num_blocks, device) for kind in (dtype, torch.float32))
    for each in (pages, expected_pages):
        each.k.copy_(cached)
    ops.rotary_store_latent(q_rope, kv, norm, cos_sin, pages, meta)
    reference.rotary_store_latent(expected_q, kv.float(), norm, cos_sin, expected_pages, meta)
    yield "rotary_store_latent, queries", q_rope, expected_q
    yield "rotary_store_latent, pages", pages.k, expected_pages.k
    expected_pages.k.copy_(pages.k)
    scale = (latent + rope) ** -0.5
    out = ops.paged_mla_attention(q, q_rope, pages, meta, scale)
    yield "latent attention", out, reference.paged_mla_attention(q.float(), q_rope.float(), expected_pages, meta, scale)
    weight = random(heads, 24, latent) / latent**0.5
    prepared = ops.prepare_heads(weight.clone())
    yield "head_linear", ops.head_linear(q, prepared), torch.einsum("nhi,hoi->nho", q.float(), weight.float())


def _meta(sequences: Sequences, device: torch.device) -> tuple[AttentionMetadata, int]:
    """Blocks of each sequence lie scattered. Returns the number of blocks too, the null block included."""
    lengths, queries = (torch.tensor(column) for column in zip(*sequences, strict=True))
    counts = -(-lengths // BLOCK_SIZE)
    ids = torch.randperm(int(counts.sum())) + 1
    tables = torch.zeros(len(sequences), int(counts.max()), dtype=torch.int64)
    for row, part in zip(tables, ids.split(counts.tolist()), strict=True):
        row[: len(part)] = part
    positions = torch.cat([torch.arange(length - count, length) for length, count in sequences])
    rows = torch.repeat_interleave(torch.arange(len(sequences)), queries)
    slots = tables[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    meta = AttentionMetadata(
        query_start=torch.cat((torch.zeros(1, dtype=torch.int64), queries.cumsum(0))).int().to(device),
        seq_lens=lengths.int().to(device),
        block_tables=tables.int().to(device),
        slot_mapping=slots.to(device),
        positions=positions.to(device),
        max_query_len=int(queries.max()),
        max_seq_len=int(lengths.max()),
        num_decodes=sum(count == 1 for _, count in sequences),
    )
    return meta, len(ids) + 1
