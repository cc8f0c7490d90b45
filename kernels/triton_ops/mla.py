"""Launches of the latent attention kernels: tile sizes by GPU, one launch for the decodes and one for the rest."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.kernels.ops import AttentionMetadata, LatentNorm
from shoal.kernels.page_format import KVPages
from shoal.kernels.triton_ops import attention_kernels, mla_kernels
from shoal.kernels.triton_ops.attention import LOG2_E, PIPELINED, Tiles, max_segments, padded_dim
from shoal.kernels.triton_ops.launch import GpuTarget, Launch, cdiv, next_power_of_2, require_dense
from shoal.kernels.triton_ops.rotary import HEAD_BLOCK

MAX_GROUP = 16
"""Heads of a token in one program. Of many heads a program of prefill takes these for several tokens, rather than more
of one's: keys are read as often, and the addresses of 16 heads leave Hopper's registers to the sums."""


def decode_tiles(latent_dim: int, itemsize: int) -> Tiles:
    """Memory-bound: few rows, so that two programs share an SM though 16 rows' sums over 512 channels take half of the
    registers of four warps; programs of the same token read its keys from L2."""
    return Tiles(16, 32 if latent_dim * itemsize <= 1024 else 16, num_warps=4, num_stages=PIPELINED)


def prefill_tiles(latent_dim: int, itemsize: int, target: GpuTarget) -> Tiles:
    """Compute-bound: the 64 rows that wgmma and tcgen05 need, whose sums are half of what eight warps can hold. Beside
    them Hopper's have room for the scores of 16 keys (`budgets.py`)."""
    if itemsize > 2:
        return decode_tiles(latent_dim, itemsize)  # fp32 as three tf32 products: each operand is held twice
    return Tiles(64, 16 if 90 <= target.capability < 100 else 32, num_warps=8, num_stages=2)


def rotary_store_latent_launch(
    q: torch.Tensor,
    kv: torch.Tensor,
    norm: LatentNorm,
    cos_sin: torch.Tensor,
    pages: KVPages,
    meta: AttentionMetadata,
) -> Launch:
    """q is rotated in place, kv is read only."""
    tokens, heads, rope = q.shape
    latent = kv.shape[1] - rope
    _check_pages(pages, kv.shape[1])
    for x in (q, kv):
        require_dense(x, first_axis=1)
    assert norm.weight.shape == (latent,), (norm.weight.shape, latent)
    assert cos_sin.shape[1] == rope, (cos_sin.shape, rope)
    head_block = min(HEAD_BLOCK, next_power_of_2(heads))
    return Launch(
        mla_kernels.rotary_store_latent_kernel,
        (tokens, cdiv(heads, head_block) + 1, 1),
        {
            "q_ptr": q,
            "kv_ptr": kv,
            "weight_ptr": norm.weight,
            "eps": norm.eps,
            "positions_ptr": meta.positions,
            "slots_ptr": meta.slot_mapping,
            "cos_sin_ptr": cos_sin,
            "pages_ptr": pages.k,
            "q_stride_token": q.stride(0),
            "kv_stride_token": kv.stride(0),
        },
        {
            "NUM_HEADS": heads,
            "LATENT": latent,
            "PADDED_LATENT": next_power_of_2(latent),
            "HALF": rope // 2,
            "PADDED_HALF": next_power_of_2(rope // 2),
            "HEAD_BLOCK": head_block,
        },
    )


def mla_attention_launches(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    pages: KVPages,
    meta: AttentionMetadata,
    scale: float,
    out: torch.Tensor,
    target: GpuTarget,
) -> list[Launch]:
    """What `Ops.paged_mla_attention` runs, in order. Only host-side numbers decide the grids: no sync."""
    num_seqs = meta.seq_lens.shape[0]
    num_decodes = num_seqs if meta.max_query_len == 1 else meta.num_decodes
    step = _Step(q, q_rope, pages, meta, scale, out, target, num_decodes)
    launches = step.decode() if num_decodes else []
    if num_decodes < num_seqs:
        launches.append(step.prefill())
    return launches


@dataclass(slots=True)
class _Step:
    """The arguments of one call, shared by its launches."""

    q: torch.Tensor
    q_rope: torch.Tensor
    pages: KVPages
    meta: AttentionMetadata
    scale: float
    out: torch.Tensor
    target: GpuTarget
    num_decodes: int

    def __post_init__(self) -> None:
        assert self.q.shape[:2] == self.q_rope.shape[:2], (self.q.shape, self.q_rope.shape)
        _check_pages(self.pages, self.q.shape[2] + self.q_rope.shape[2])
        assert self.scale > 0, "the kernel takes maxima before it scales"
        for x in (self.q, self.q_rope):
            require_dense(x, first_axis=1)

    @property
    def group(self) -> int:
        """Heads of a head block."""
        return min(self.q.shape[1], MAX_GROUP)

    def decode(self) -> list[Launch]:
        """One program per (sequence, head block, segment); with more than one segment, the merge after it."""
        _, heads, latent = self.q.shape
        tiles = decode_tiles(latent, self.q.element_size())
        splits = max_segments(self.meta.max_seq_len)
        grid = (self.num_decodes, cdiv(heads, self.group), splits)
        if splits == 1:
            return [self._attention(grid, tiles, self.out, None, decode=True)]
        rows = (self.num_decodes, heads, splits)
        partial_out = torch.empty((*rows, latent), dtype=torch.float32, device=self.q.device)
        partial_lse = torch.empty(rows, dtype=torch.float32, device=self.q.device)
        merge = Launch(
            attention_kernels.merge_segments_kernel,
            (self.num_decodes, heads, 1),
            {
                "out_ptr": self.out,
                "lse_ptr": None,
                "partial_out_ptr": partial_out,
                "partial_lse_ptr": partial_lse,
                "query_start_ptr": self.meta.query_start,
                "seq_lens_ptr": self.meta.seq_lens,
                "window": 0,
                "max_splits": splits,
            },
            {
                "NUM_HEADS": heads,
                "HEAD_DIM": latent,
                "PADDED_DIM": padded_dim(latent),
                "TILE_N": tiles.tile_n,
                "HAS_WINDOW": False,
            },
            num_warps=2,
            num_stages=4,
        )
        return [self._attention(grid, tiles, partial_out, partial_lse, decode=True), merge]

    def prefill(self) -> Launch:
        """One program per (block of query tokens, head block) of the sequences after the decodes."""
        tokens, heads, latent = self.q.shape
        tiles = prefill_tiles(latent, self.q.element_size(), self.target)
        num_seqs = self.meta.seq_lens.shape[0] - self.num_decodes
        blocks = (tokens - self.num_decodes) // (tiles.block_m // self.group) + num_seqs
        return self._attention((blocks, cdiv(heads, self.group), 1), tiles, self.out, None, decode=False)

    def _attention(
        self, grid: tuple[int, int, int], tiles: Tiles, out: torch.Tensor, lse: torch.Tensor | None, *, decode: bool
    ) -> Launch:
        q, q_rope, meta = self.q, self.q_rope, self.meta
        latent, rope = q.shape[2], q_rope.shape[2]
        return Launch(
            mla_kernels.mla_attention_kernel,
            grid,
            {
                "out_ptr": out,
                "lse_ptr": lse,
                "q_ptr": q,
                "q_rope_ptr": q_rope,
                "pages_ptr": self.pages.k,
                "table_ptr": meta.block_tables,
                "query_start_ptr": meta.query_start,
                "seq_lens_ptr": meta.seq_lens,
                "qk_scale": self.scale * LOG2_E,
                "q_stride_token": q.stride(0),
                "q_rope_stride_token": q_rope.stride(0),
                "table_stride": meta.block_tables.stride(0),
                "first_seq": self.num_decodes,
                "num_seqs": meta.seq_lens.shape[0],
                "max_splits": grid[2],
            },
            {
                "NUM_HEADS": q.shape[1],
                "GROUP": self.group,
                "LATENT": latent,
                "PADDED_LATENT": padded_dim(latent),
                "ROPE": rope,
                "PADDED_ROPE": padded_dim(rope),
                "BLOCK_SIZE": self.pages.format.block_size,
                "BLOCK_M": tiles.block_m,
                "TILE_N": tiles.tile_n,
                "DECODE": decode,
                "SPLIT": grid[2] > 1,
            },
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )


def _check_pages(pages: KVPages, width: int) -> None:
    page = pages.format
    assert page.layout == "canonical", f"Triton reads and writes canonical pages, not {page.layout}"
    assert page.is_latent, page
    assert page.head_dim == width, (page, width)
    assert pages.k.is_contiguous(), pages.k.stride()
