"""Launches of the paged attention kernels: tile sizes by GPU, one launch for the decodes and one for the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from shoal.kernels.ops import AttentionMetadata
from shoal.kernels.page_format import KVPages
from shoal.kernels.triton_ops import attention_kernels as kernels
from shoal.kernels.triton_ops.launch import GpuTarget, Launch, cdiv, next_power_of_2, require_dense

LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows and keys of one program's inner step."""

    block_m: int
    tile_n: int
    num_warps: int
    num_stages: int


PIPELINED = 3
"""Stages: the block table's entries arrive one stage before the keys and values that they point to, those one before
their use. That keeps a tile of K and V in flight, and each of the several programs of an SM keeps its own."""


def decode_tiles(head_dim: int, group: int, itemsize: int) -> Tiles:
    """Memory-bound: the fewest rows that the tensor cores take, and so little shared memory (a tile of K and of V) and
    so few registers that four programs share an SM."""
    tile_n = 64 if head_dim * itemsize <= 256 else 32
    num_warps = 4 if head_dim * itemsize <= 512 else 8
    return Tiles(max(16, next_power_of_2(group)), tile_n, num_warps, PIPELINED)


def prefill_tiles(head_dim: int, group: int, itemsize: int, windowed: bool, target: GpuTarget) -> Tiles:
    """Compute-bound: as many rows and keys as fit into registers without a spill (`budgets.py`). Hopper's wgmma and
    Blackwell's tcgen05 need at least 64 rows, and read K and V of two tiles from shared memory."""
    least_rows = next_power_of_2(group)
    wide = 90 <= target.capability < 120
    small = head_dim <= 128
    if itemsize > 2:
        # fp32 as three tf32 products: each operand is held twice.
        return Tiles(max(16, least_rows), 32, num_warps=8, num_stages=PIPELINED if small else 1)
    block_m = max(128 if wide or small else 64, least_rows)
    if wide:
        tile_n = (64 if windowed else 128) if small else 32
    else:
        tile_n = 64 if small else 32
    return Tiles(block_m, tile_n, num_warps=8, num_stages=PIPELINED)


def padded_dim(head_dim: int) -> int:
    """Columns of a tile: a power of two, and no fewer than a tensor-core product can sum over."""
    return max(16, next_power_of_2(head_dim))


def max_segments(max_keys: int) -> int:
    """Upper bound of `decode_segments` for sequences of at most `max_keys` keys."""
    most, fewest_keys = int(kernels.MAX_SEGMENTS.value), int(kernels.MIN_SEGMENT.value)
    return max(1, min(most, cdiv(max_keys, fewest_keys)))


def attention_launches(
    q: torch.Tensor,
    pages: KVPages,
    meta: AttentionMetadata,
    scale: float,
    window: int | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    target: GpuTarget,
) -> list[Launch]:
    """What `Ops.paged_attention` runs, in order. Writes `out` [num_tokens, num_heads, head_dim] and, unless None,
    `lse` [num_tokens, num_heads]. Only host-side numbers decide the grids: no sync."""
    num_seqs = meta.seq_lens.shape[0]
    num_decodes = num_seqs if meta.max_query_len == 1 else meta.num_decodes
    step = _Step(q, pages, meta, scale, window, out, lse, target, num_decodes)
    launches = step.decode() if num_decodes else []
    if num_decodes < num_seqs:
        launches.append(step.prefill())
    return launches


@dataclass(slots=True)
class _Step:
    """The arguments of one call, shared by its launches."""

    q: torch.Tensor
    pages: KVPages
    meta: AttentionMetadata
    scale: float
    window: int | None
    out: torch.Tensor
    lse: torch.Tensor | None
    target: GpuTarget
    num_decodes: int

    def __post_init__(self) -> None:
        q, page = self.q, self.pages.format
        assert page.layout == "canonical", f"Triton attention reads canonical pages, not {page.layout}"
        assert q.shape[2] == page.head_dim, (q.shape, page)
        assert q.shape[1] % page.num_kv_heads == 0, (q.shape, page.num_kv_heads)
        assert self.scale > 0, "the kernel takes maxima before it scales"
        assert self.pages.k.stride(0) == self.pages.v.stride(0), "K and V blocks must lie at the same distances"
        for x in (q, self.pages.k, self.pages.v):
            require_dense(x, first_axis=1)

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.pages.format.num_kv_heads

    def decode(self) -> list[Launch]:
        """One program per (sequence, KV head, segment); with more than one segment, the merge after it."""
        q, page = self.q, self.pages.format
        _, heads, dim = q.shape
        tiles = decode_tiles(dim, self.group, q.element_size())
        max_keys = self.meta.max_seq_len
        if self.window is not None:
            # The walk starts at the tile that holds the window's first key.
            max_keys = min(max_keys, self.window + tiles.tile_n - 1)
        splits = max_segments(max_keys)
        grid = (self.num_decodes, page.num_kv_heads, splits)
        if splits == 1:
            return [self._attention(grid, tiles, self.out, self.lse, decode=True)]
        rows = (self.num_decodes, heads, splits)
        partial_out = torch.empty((*rows, dim), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(rows, dtype=torch.float32, device=q.device)
        merge = Launch(
            kernels.merge_segments_kernel,
            (self.num_decodes, heads, 1),
            {
                "out_ptr": self.out,
                "lse_ptr": self.lse,
                "partial_out_ptr": partial_out,
                "partial_lse_ptr": partial_lse,
                "query_start_ptr": self.meta.query_start,
                "seq_lens_ptr": self.meta.seq_lens,
                "window": self.window or 0,
                "max_splits": splits,
            },
            {
                "NUM_HEADS": heads,
                "HEAD_DIM": dim,
                "PADDED_DIM": padded_dim(dim),
                "TILE_N": tiles.tile_n,
                "HAS_WINDOW": self.window is not None,
            },
            num_warps=2,
            num_stages=4,
        )
        return [self._attention(grid, tiles, partial_out, partial_lse, decode=True), merge]

    def prefill(self) -> Launch:
        """One program per (block of query tokens, KV head) of the sequences after the decodes."""
        q = self.q
        tiles = prefill_tiles(q.shape[2], self.group, q.element_size(), self.window is not None, self.target)
        block_q = tiles.block_m // self.group
        num_seqs = self.meta.seq_lens.shape[0] - self.num_decodes
        blocks = (q.shape[0] - self.num_decodes) // block_q + num_seqs
        grid = (blocks, self.pages.format.num_kv_heads, 1)
        return self._attention(grid, tiles, self.out, self.lse, decode=False)

    def _attention(
        self,
        grid: tuple[int, int, int],
        tiles: Tiles,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        *,
        decode: bool,
    ) -> Launch:
        q, pages, page, meta = self.q, self.pages, self.pages.format, self.meta
        return Launch(
            kernels.paged_attention_kernel,
            grid,
            {
                "out_ptr": out,
                "lse_ptr": lse,
                "q_ptr": q,
                "k_ptr": pages.k,
                "v_ptr": pages.v,
                "table_ptr": meta.block_tables,
                "query_start_ptr": meta.query_start,
                "seq_lens_ptr": meta.seq_lens,
                "qk_scale": self.scale * LOG2_E,
                "q_stride_token": q.stride(0),
                "block_stride": pages.k.stride(0),
                "table_stride": meta.block_tables.stride(0),
                "first_seq": self.num_decodes,
                "num_seqs": meta.seq_lens.shape[0],
                "window": self.window or 0,
                "max_splits": grid[2],
            },
            {
                "NUM_KV_HEADS": page.num_kv_heads,
                "GROUP": self.group,
                "HEAD_DIM": page.head_dim,
                "PADDED_DIM": padded_dim(page.head_dim),
                "BLOCK_SIZE": page.block_size,
                "BLOCK_M": tiles.block_m,
                "TILE_N": tiles.tile_n,
                "DECODE": decode,
                "HAS_WINDOW": self.window is not None,
                "SPLIT": grid[2] > 1,
            },
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
