# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Products of many groups of rows (experts), each with a matrix of its own, in one launch.

How many rows each group has is known on the device alone. So the grid is for the worst case, and a program finds its
tile itself: group g has ceil(count / BLOCK_M) tiles of rows, and tile t belongs to the group whose tiles, summed over
the groups, first exceed t. Programs beyond the last tile return at once:

    rows   | group 0      | group 2 | group 3          |         (group 1 has none)
    tiles  | 0    | 1     | 2       | 3     | 4    | 5 |  6, 7: return

There are at most n // BLOCK_M full tiles, and one more for each group that has rows, so the grid holds every case.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shoal.kernels.ops import GroupedWeight
from shoal.kernels.triton_ops.launch import UPCAST_DOT, Launch, cdiv, next_power_of_2, require_dense

PANEL_M = tl.constexpr(8)
"""Tiles of rows that meet the same columns one after the other, so that what they read stays in L2."""


class StackedGroups(GroupedWeight):
    """Matrices [num_groups, out_features, in_features] in the activation dtype, one behind the other."""

    def __init__(self, stacked: torch.Tensor) -> None:
        self.stacked = stacked
        self.num_groups, self.out_features, self.in_features = stacked.shape

    def slot_tensors(self, slot: int) -> list[torch.Tensor]:
        return [self.stacked[slot]]


@triton.jit
def _find_tile(starts_ptr, tile, NUM_GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr, BLOCK_M: tl.constexpr):
    """(group, first row of the tile in the batch, end of the group's rows); the group is PADDED_GROUPS, and the rest
    nothing, for a tile beyond the last."""
    index = tl.arange(0, PADDED_GROUPS)
    start = tl.load(starts_ptr + index, mask=index < NUM_GROUPS, other=0)
    stop = tl.load(starts_ptr + index + 1, mask=index < NUM_GROUPS, other=0)
    tiles = tl.cdiv(stop - start, BLOCK_M)
    ends = tl.cumsum(tiles, 0)
    group = tl.sum((ends <= tile).to(tl.int32), 0)
    mine = index == group
    row = tl.sum(tl.where(mine, start + (tile - ends + tiles) * BLOCK_M, 0), 0)
    return group, row, tl.sum(tl.where(mine, stop, 0), 0)


@triton.jit(do_not_specialize=["num_tiles"])
def grouped_linear_kernel(
    out_ptr, x_ptr, weight_ptr, starts_ptr, x_stride, num_tiles,
    NUM_GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (num_tiles * columns of tiles)."""
    program = tl.program_id(0)
    per_panel = PANEL_M * tl.cdiv(OUT, BLOCK_N)
    first = program // per_panel * PANEL_M
    height = tl.minimum(num_tiles - first, PANEL_M)
    tile = first + program % per_panel % height
    group, row, stop = _find_tile(starts_ptr, tile, NUM_GROUPS, PADDED_GROUPS, BLOCK_M)
    if group >= NUM_GROUPS:
        return
    rows = row + tl.arange(0, BLOCK_M)
    columns = program % per_panel // height * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + rows[:, None].to(tl.int64) * x_stride + depth[None, :]
    weight_ptrs = weight_ptr + group.to(tl.int64) * OUT * IN + columns[None, :] * IN + depth[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, IN, BLOCK_K):
        inside = depth < IN - k
        x = tl.load(x_ptrs + k, mask=(rows < stop)[:, None] & inside[None, :], other=0.0)
        weight = tl.load(weight_ptrs + k, mask=inside[:, None] & (columns < OUT)[None, :], other=0.0)
        if UPCAST_DOT:
            x = x.to(tl.float32)
            weight = weight.to(tl.float32)
        acc = tl.dot(x, weight, acc, input_precision="tf32x3")
    out_ptrs = out_ptr + rows[:, None].to(tl.int64) * OUT + columns[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(rows < stop)[:, None] & (columns < OUT)[None, :])


@dataclass(frozen=True, slots=True)
class GroupedTiles:
    """Of one program: rows, columns, and how much of the sum over the input features is in flight at once."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


FEW_ROWS = 16
"""Rows of a group, on average, up to which a step waits for the weights to be read."""


def grouped_tiles(num_rows: int, num_groups: int, itemsize: int) -> GroupedTiles:
    """Two forms only, so that a warm-up of the smallest and the largest step compiles all that serving will run. Few
    rows wait for memory: the fewest that the tensor cores take, in so little shared memory that several programs share
    an SM and keep its copies in flight. Many: what wgmma and tcgen05 multiply at once."""
    few = num_rows <= FEW_ROWS * num_groups
    if itemsize > 2:
        # fp32 as three tf32 products: each operand is held twice.
        return GroupedTiles(16 if few else 64, 64, 32, num_warps=4, num_stages=3)
    if few:
        return GroupedTiles(16, 128, 64, num_warps=4, num_stages=4)
    return GroupedTiles(128, 128, 64, num_warps=8, num_stages=3)


def grouped_linear_launch(x: torch.Tensor, weight: StackedGroups, starts: torch.Tensor, out: torch.Tensor) -> Launch:
    """x [n, in_features], starts int32 [num_groups + 1] -> out [n, out_features]. Only n decides the grid: no sync."""
    num_rows, num_groups = len(x), weight.num_groups
    assert x.shape[1] == weight.in_features, (x.shape, weight.in_features)
    assert (starts.shape, starts.dtype) == ((num_groups + 1,), torch.int32), (starts.shape, starts.dtype)
    require_dense(x, first_axis=1)
    require_dense(weight.stacked, first_axis=0)
    tiles = grouped_tiles(num_rows, num_groups, x.itemsize)
    most_tiles = num_rows // tiles.block_m + min(num_groups, num_rows)
    return Launch(
        grouped_linear_kernel,
        (most_tiles * cdiv(weight.out_features, tiles.block_n), 1, 1),
        {
            "out_ptr": out,
            "x_ptr": x,
            "weight_ptr": weight.stacked,
            "starts_ptr": starts,
            "x_stride": x.stride(0),
            "num_tiles": most_tiles,
        },
        {
            "NUM_GROUPS": num_groups,
            "PADDED_GROUPS": next_power_of_2(num_groups),
            "OUT": weight.out_features,
            "IN": weight.in_features,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "BLOCK_K": tiles.block_k,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
