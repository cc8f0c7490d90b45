"""Products with packed weights: equal to fp64 within fp32 rounding, and the same bits in any batch."""

from __future__ import annotations

import pytest
import torch

DTYPES = [torch.float32, torch.bfloat16]


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(1, 1), (15, 3), (16, 64), (17, 65), (130, 1000), (960, 576), (48, 1537)]
)
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 13, 33, 100])
def test_against_fp64(cpu_ops, dtype, outputs, inputs, rows) -> None:
    torch.manual_seed(outputs + rows)
    weight, bias, x = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype), torch.randn(rows, inputs)
    expected = exact(x, weight, bias)
    out = cpu_ops.linear(x, cpu_ops.prepare_linear(weight, bias))
    # fp32 sums of n terms of N(0, 1): the error grows like eps * n at worst, like eps * sqrt(n) in practice.
    bound = 2.0**-23 * (4 + inputs**0.5) * expected.abs().max().clamp(min=1)
    assert (out - expected).abs().max() <= bound
    assert out.dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(144, 576), (50, 1537)])
def test_rows_have_the_same_bits_in_any_batch(native_ops, threads, dtype, outputs, inputs) -> None:
    torch.manual_seed(0)
    weight = native_ops.prepare_linear(torch.randn(outputs, inputs).to(dtype), torch.randn(outputs))
    x = torch.randn(150, inputs)
    threads(2)
    whole = native_ops.linear(x, weight)
    for rows in range(1, 71):
        assert torch.equal(native_ops.linear(x[:rows], weight), whole[:rows]), rows
        assert torch.equal(native_ops.linear(x[rows : rows + 1], weight), whole[rows : rows + 1]), rows
    threads(1)
    assert torch.equal(native_ops.linear(x, weight), whole)
    assert native_ops.batch_invariant


def test_no_rows_and_leading_axes(cpu_ops) -> None:
    weight = cpu_ops.prepare_linear(torch.randn(5, 8))
    assert cpu_ops.linear(torch.empty(0, 8), weight).shape == (0, 5)
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(cpu_ops.linear(x, weight)[1], cpu_ops.linear(x[1], weight))


def test_rows_apart_in_memory_are_read_in_place(native_ops) -> None:
    weight, wide = native_ops.prepare_linear(torch.randn(20, 32)), torch.randn(9, 100)
    assert torch.equal(
        native_ops.linear(wide[:, 10:42], weight), native_ops.linear(wide[:, 10:42].contiguous(), weight)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_weight_for_a_tied_embedding(cpu_ops, dtype) -> None:
    table = torch.randn(101, 24).to(dtype)
    weight = cpu_ops.prepare_linear(table.clone())
    index = torch.tensor([100, 0, 57, 57, 16])
    assert torch.equal(weight.rows(index), table[index].float())
    assert weight.rows(torch.empty(0, dtype=torch.int64)).shape == (0, 24)
    with pytest.raises(IndexError):
        weight.rows(torch.tensor([101]))


def test_size_is_what_the_planner_must_count(native_ops) -> None:
    weight = native_ops.prepare_linear(torch.randn(64, 10).bfloat16(), torch.randn(64))
    assert (weight.out_features, weight.in_features) == (64, 10)
    assert weight.nbytes == 64 * 10 * 2 + 64 * 4


def test_what_cannot_be_packed_is_refused(native_ops) -> None:
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        native_ops.prepare_linear(torch.randn(4, 4).half())
    with pytest.raises(ValueError, match="bias"):
        native_ops.prepare_linear(torch.randn(4, 4), torch.randn(5))
