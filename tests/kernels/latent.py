"""Builders of latent batches: sequences with the history of what latent attention reads, for all backends' tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.kernels.ops import AttentionMetadata, LatentNorm, Ops
from shoal.kernels.page_format import KVPages, PageFormat

CPU = torch.device("cpu")
EPS = 1e-6


@dataclass(frozen=True)
class LatentBatch:
    """What the projections gave for every token of some sequences; any chunk of it can be made a step."""

    lengths: tuple[int, ...]
    block_size: int
    q: list[torch.Tensor]
    """Of each sequence [length, heads, latent]."""
    q_rope: list[torch.Tensor]
    """[length, heads, rope], not yet rotated."""
    kv: list[torch.Tensor]
    """[length, latent + rope], neither normed nor rotated."""
    norm: LatentNorm
    cos_sin: torch.Tensor
    block_tables: torch.Tensor
    num_blocks: int
    dtype: torch.dtype

    @classmethod
    def random(
        cls,
        lengths: tuple[int, ...],
        heads: int = 4,
        dims: tuple[int, int] = (32, 16),
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> LatentBatch:
        """`dims`: (latent, rope)."""
        generator = torch.Generator().manual_seed(seed)
        latent, rope = dims

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        counts = [-(-n // block_size) for n in lengths]
        shuffled = torch.randperm(sum(counts), generator=generator).int() + 1  # block 0 is the null block
        tables = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32)
        for i, ids in enumerate(shuffled.split(counts)):
            tables[i, : len(ids)] = ids
        angles = torch.outer(torch.arange(max(lengths)), 100.0 ** (-torch.arange(0, rope, 2) / rope))
        return cls(
            lengths,
            block_size,
            [normal(n, heads, latent) for n in lengths],
            [normal(n, heads, rope) for n in lengths],
            [normal(n, latent + rope) for n in lengths],
            LatentNorm(1 + 0.1 * normal(latent), EPS),
            torch.cat((angles.cos(), angles.sin()), dim=1),
            tables,
            sum(counts) + 1,
            dtype,
        )

    def meta(self, chunks: dict[int, tuple[int, int]]) -> AttentionMetadata:
        query_lens = [end - start for start, end in chunks.values()]
        positions = torch.cat([torch.arange(start, end) for start, end in chunks.values()])
        rows = torch.cat([torch.full((n,), i) for i, n in zip(chunks, query_lens, strict=True)])
        blocks = self.block_tables[rows, positions // self.block_size].long()
        return AttentionMetadata(
            query_start=torch.tensor([0, *query_lens]).cumsum(0).int(),
            seq_lens=torch.tensor([end for _, end in chunks.values()], dtype=torch.int32),
            block_tables=self.block_tables[list(chunks)].contiguous(),
            slot_mapping=blocks * self.block_size + positions % self.block_size,
            positions=positions,
            max_query_len=max(query_lens),
            max_seq_len=max(end for _, end in chunks.values()),
            num_decodes=next((n for n, length in enumerate(query_lens) if length != 1), len(query_lens)),
        )

    def pages(self, ops: Ops) -> KVPages:
        """Of NaN, so that a read of a slot that holds no token shows."""
        width = self.kv[0].shape[1]
        pages = PageFormat.latent(ops.layout, self.block_size, width, self.dtype).allocate(self.num_blocks, CPU)
        pages.k.fill_(torch.nan)
        return pages

    @property
    def scale(self) -> float:
        return self.kv[0].shape[1] ** -0.5

    def run(self, ops: Ops, pages: KVPages, chunks: dict[int, tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """One step as a model makes it: (the output of attention, the rotated queries)."""
        meta, dtype = self.meta(chunks), ops.activation_dtype

        def rows(of: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([of[i][start:end] for i, (start, end) in chunks.items()]).to(dtype)

        q, q_rope = rows(self.q), rows(self.q_rope)
        ops.rotary_store_latent(q_rope, rows(self.kv), self.norm, self.cos_sin, pages, meta)
        return ops.paged_mla_attention(q, q_rope, pages, meta, self.scale), q_rope

    def stored(self, ops: Ops) -> KVPages:
        """Pages that hold every token."""
        pages = self.pages(ops)
        self.run(ops, pages, {i: (0, n) for i, n in enumerate(self.lengths)})
        return pages
