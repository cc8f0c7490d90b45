"""The grouped product against fp32, for groups of every size."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from shoal.kernels.triton_ops.grouped import FEW_ROWS, grouped_linear_launch, grouped_tiles

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def starts_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "counts",
    [[3, 0, 17, 1, 0], [0, 0, 0, 0, 5], [140, 0, 1, 128, 129], [1], [0, 0, 0]],
    ids=["few", "last", "many", "one", "none"],
)
@pytest.mark.parametrize(("outputs", "depth"), [(200, 72), (128, 128)])
def test_each_group_meets_its_own_matrix(
    triton_ops, counts: list[int], dtype: torch.dtype, outputs: int, depth: int
) -> None:
    ops, spare = triton_ops(dtype), 3
    wide = torch.randn(sum(counts) + spare, depth + 16).to(dtype)
    x = wide[:, :depth]
    wide[sum(counts) :] = torch.nan  # rows of no group are read by none
    matrices = [torch.randn(outputs, depth) / depth**0.5 for _ in counts]
    out = ops.grouped_linear(x, ops.prepare_grouped(matrices), starts_of(counts))
    assert (out.shape, out.dtype) == ((sum(counts) + spare, outputs), dtype)
    for matrix, (start, stop) in zip(matrices, pairwise(starts_of(counts).tolist()), strict=True):
        expected = x[start:stop].float() @ matrix.to(dtype).float().T
        torch.testing.assert_close(out[start:stop].float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_rows_of_no_group_are_not_written(triton_ops) -> None:
    ops = triton_ops(torch.float32)
    weight, x, out = ops.prepare_grouped([torch.randn(32, 16)]), torch.randn(9, 16), torch.full((9, 32), 7.0)
    grouped_linear_launch(x, weight, starts_of([4]), out).run()
    assert torch.equal(out[4:], torch.full((5, 32), 7.0))
    assert not out[:4].eq(7).any()


@pytest.mark.parametrize("counts", [[200, 0, 1], [0, 1, 0], [67, 67, 67], [1, 199, 1]])
def test_the_grid_holds_every_sharing_out_of_the_rows(triton_ops, counts: list[int]) -> None:
    """The grid is that of the number of rows; what the groups take of them is known on the device alone."""
    ops = triton_ops(torch.bfloat16)
    weight, x = ops.prepare_grouped(torch.randn(16, 16) for _ in counts), torch.ones(201, 16).bfloat16()
    launch = grouped_linear_launch(x, weight, starts_of(counts), torch.empty(201, 16).bfloat16())
    tile = grouped_tiles(201, len(counts), 2).block_m
    assert launch.grid[0] >= sum(-(-count // tile) for count in counts)
    assert launch.grid[0] <= 201 // tile + len(counts)


def test_few_rows_take_small_tiles() -> None:
    assert grouped_tiles(8 * FEW_ROWS, 8, 2).block_m == 16
    assert grouped_tiles(8 * FEW_ROWS + 1, 8, 2).block_m == 128


def test_a_matrix_is_replaced_in_place(triton_ops) -> None:
    ops = triton_ops(torch.bfloat16)
    weight, x = ops.prepare_grouped([torch.zeros(16, 16), torch.zeros(16, 16)]), torch.randn(5, 16).bfloat16()
    (slot,) = weight.slot_tensors(1)
    slot.copy_(torch.eye(16))
    assert torch.equal(ops.grouped_linear(x, weight, starts_of([0, 5])), x)
    assert weight.nbytes == 2 * 16 * 16 * 2


def test_no_rows_is_no_work(triton_ops) -> None:
    ops = triton_ops(torch.float32)
    weight = ops.prepare_grouped([torch.randn(8, 16)])
    assert ops.grouped_linear(torch.empty(0, 16), weight, starts_of([0])).shape == (0, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "k"), [(48, 1), (1030, 3), (2048, 8)])
def test_results_of_experts_are_summed_where_they_lie(triton_ops, dtype: torch.dtype, hidden: int, k: int) -> None:
    rows = 5
    results, weights = torch.randn(rows * k, hidden).to(dtype), torch.rand(rows, k)
    places = torch.randperm(rows * k).view(rows, k)
    out = triton_ops(dtype).combine_experts(results, places, weights)
    assert out.dtype == dtype
    expected = (results.float()[places] * weights[:, :, None]).sum(1)
    torch.testing.assert_close(out.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    alone = triton_ops(dtype).combine_experts(results, places[2:3], weights[2:3])
    assert torch.equal(alone, out[2:3])
    assert triton_ops(dtype).combine_experts(results, places[:0], weights[:0]).shape == (0, hidden)


def test_a_router_is_fp32_whatever_the_activations(triton_ops) -> None:
    ops, weight = triton_ops(torch.bfloat16), torch.randn(8, 64)
    x = torch.randn(5, 64).bfloat16()
    logits = ops.router_logits(x, ops.prepare_router(weight))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, x.float() @ weight.T)
