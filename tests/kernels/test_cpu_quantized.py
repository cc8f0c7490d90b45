"""Native products with quantized weights: the stated arithmetic exactly, and the same bits in any batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.kernels.cpu.build import build
from shoal.kernels.cpu.native import Native
from shoal.kernels.cpu.ops import CpuOps
from shoal.kernels.ops import Ops
from shoal.kernels.quantized import GROUP, QuantFormat, QuantizedMatrix, quantize_int8

FORMATS = list(QuantFormat)
SHAPES = [(1, 32), (15, 64), (16, 576), (17, 96), (130, 1024), (333, 1536)]


def random_matrix(kind: QuantFormat, outputs: int, inputs: int, *, powers: bool = False) -> QuantizedMatrix:
    """Every byte is possible; with `powers` scales and minima are powers of two, so that fp32 sums are exact."""
    groups = -(-inputs // GROUP)
    quants = torch.randint(0, 256, (outputs, groups, kind.quant_bytes), dtype=torch.uint8)

    def numbers() -> torch.Tensor:
        if powers:
            return torch.pow(2.0, torch.randint(-3, 0, (outputs, groups))).half()
        return (torch.randn(outputs, groups) * 0.05).half()

    return QuantizedMatrix(kind, inputs, quants, numbers(), numbers() if kind is QuantFormat.INT4_MIN else None)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(integers, scales) of activations as the native unit must make them: [rows, groups, 32] and [rows, groups, 1]."""
    groups = torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP)).view(len(x), -1, GROUP)
    peak = groups.abs().amax(2, keepdim=True)
    inverse = torch.where(peak > 0, 127 / peak, 0)
    return (groups.double() * inverse.double()).round().float(), peak / 127  # each product rounded once


def expected_product(x: torch.Tensor, matrix: QuantizedMatrix) -> torch.Tensor:
    """fp64, over the same integers."""
    q, scale = quantize_rows(x)
    padded = matrix.integers().double() * matrix.scales.double()[..., None]
    if matrix.minima is not None:
        padded += matrix.minima.double()[..., None]
    return (q * scale).double().flatten(1) @ padded.flatten(1).T


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 33, 100])
def test_against_the_same_integers_in_fp64(native_ops: Ops, kind, outputs, inputs, rows) -> None:
    torch.manual_seed(outputs + rows)
    matrix, x, bias = random_matrix(kind, outputs, inputs), torch.randn(rows, inputs), torch.randn(outputs)
    out = native_ops.linear(x, native_ops.prepare_quantized([matrix], bias))
    expected = expected_product(x, matrix) + bias
    assert (out - expected).abs().max() <= 2.0**-22 * (4 + (inputs / GROUP) ** 0.5) * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_integers_are_exact(native_ops: Ops, kind, rows) -> None:
    """Activations that are integers up to 127, the largest in every group: nothing is rounded anywhere."""
    x = torch.randint(-127, 128, (rows, 160)).float()
    x.view(rows, -1, GROUP)[:, :, 5] = 127
    matrix = random_matrix(kind, 50, 160, powers=True)
    out = native_ops.linear(x, native_ops.prepare_quantized([matrix]))
    assert torch.equal(out.double(), x.double() @ matrix.dequantize().double().T)


@pytest.mark.parametrize("kind", FORMATS)
def test_largest_integers_do_not_overflow(native_ops: Ops, kind) -> None:
    byte = {QuantFormat.INT8: 0x80}.get(kind, 0xFF)
    for sign in (127.0, -127.0):
        matrix = random_matrix(kind, 16, 4096, powers=True)
        matrix.quants.fill_(byte)
        x = torch.full((6, 4096), sign)
        out = native_ops.linear(x, native_ops.prepare_quantized([matrix]))
        assert torch.equal(out.double(), x.double() @ matrix.dequantize().double().T)


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_have_the_same_bits_in_any_batch(native_ops: Ops, threads, kind) -> None:
    weight = native_ops.prepare_quantized([random_matrix(kind, 150, 576)], torch.randn(150))
    x = torch.randn(210, 576)
    threads(2)
    whole = native_ops.linear(x, weight)
    for rows in [*range(1, 30), 95, 96, 97, 200]:
        assert torch.equal(native_ops.linear(x[:rows], weight), whole[:rows]), rows
        assert torch.equal(native_ops.linear(x[rows : rows + 1], weight), whole[rows : rows + 1]), rows
    threads(1)
    assert torch.equal(native_ops.linear(x, weight), whole)


@pytest.mark.parametrize("flags", [("-DSHOAL_NO_INTRINSICS",), ("-DSHOAL_VL=4",), ("-DSHOAL_VL=16",)])
def test_every_version_has_the_same_bits(native_ops: Ops, tmp_path: Path, flags) -> None:
    other = CpuOps(Native(build(tmp_path, (*flags, "-O2"))))
    for kind in FORMATS:
        matrix, x = random_matrix(kind, 77, 320), torch.randn(9, 320)
        mine, theirs = (ops.prepare_quantized([matrix], torch.ones(77)) for ops in (native_ops, other))
        assert torch.equal(native_ops.linear(x, mine), other.linear(x, theirs)), kind
        index = torch.tensor([76, 0, 16])
        assert torch.equal(mine.rows(index), theirs.rows(index)), kind


@pytest.mark.parametrize("inputs", [1, 31, 33, 100])
def test_input_features_that_fill_no_group(native_ops: Ops, inputs) -> None:
    matrix, x = quantize_int8(torch.randn(20, inputs)), torch.randn(5, 200)[:, :inputs]
    weight = native_ops.prepare_quantized([matrix])
    torch.testing.assert_close(native_ops.linear(x, weight).double(), expected_product(x, matrix), atol=1e-5, rtol=1e-5)
    assert torch.equal(weight.rows(torch.arange(20)), matrix.dequantize())


def test_parts_of_several_formats_are_one_operator(native_ops: Ops) -> None:
    four, four_min, eight = FORMATS
    sizes = ((four, 20), (four_min, 3), (four_min, 30), (eight, 17))
    parts = [random_matrix(kind, size, 96) for kind, size in sizes]
    bias, x = torch.randn(70), torch.randn(4, 96)
    weight = native_ops.prepare_quantized(parts, bias)
    expected = torch.cat([expected_product(x, part) for part in parts], dim=1) + bias
    torch.testing.assert_close(native_ops.linear(x, weight).double(), expected, atol=1e-4, rtol=1e-5)
    dense = torch.cat([part.dequantize() for part in parts])
    index = torch.tensor([69, 0, 20, 19, 22, 23, 53])
    assert torch.equal(weight.rows(index), dense[index])
    padded = [(20 + 12, QuantFormat.INT4), (33 + 15, QuantFormat.INT4_MIN), (17 + 15, QuantFormat.INT8)]
    assert weight.nbytes == sum(rows * 3 * kind.group_bytes + rows * 4 for rows, kind in padded)
    with pytest.raises(IndexError):
        weight.rows(torch.tensor([70]))


def test_a_row_that_is_not_finite_stays_so_and_spoils_no_other(native_ops: Ops) -> None:
    x = torch.randn(4, 64)
    weight = native_ops.prepare_quantized([random_matrix(QuantFormat.INT4_MIN, 20, 64)])
    clean = native_ops.linear(x, weight)
    x[1, 3], x[2, 40] = torch.nan, -torch.inf
    out = native_ops.linear(x, weight)
    assert out[1:3].isnan().all()
    assert torch.equal(out[[0, 3]], clean[[0, 3]])


def test_zero_and_tiny_activations(native_ops: Ops) -> None:
    weight = native_ops.prepare_quantized([random_matrix(QuantFormat.INT8, 16, 32)])
    assert torch.equal(native_ops.linear(torch.zeros(2, 32), weight), torch.zeros(2, 16))
    assert native_ops.linear(torch.full((1, 32), 1e-38), weight).abs().max() < 1e-30


def test_no_rows_and_leading_axes(native_ops: Ops) -> None:
    weight = native_ops.prepare_quantized([random_matrix(QuantFormat.INT4, 20, 64)])
    assert native_ops.linear(torch.empty(0, 64), weight).shape == (0, 20)
    x, wide = torch.randn(2, 3, 64), torch.randn(5, 100)
    assert torch.equal(native_ops.linear(x, weight)[1], native_ops.linear(x[1], weight))
    assert torch.equal(native_ops.linear(wide[:, 7:71], weight), native_ops.linear(wide[:, 7:71].contiguous(), weight))


def test_what_does_not_fit_is_refused(native_ops: Ops) -> None:
    matrix = random_matrix(QuantFormat.INT4, 20, 64)
    with pytest.raises(ValueError, match="bias"):
        native_ops.prepare_quantized([matrix], torch.zeros(21))
    with pytest.raises(ValueError, match="stacked"):
        native_ops.prepare_quantized([matrix, random_matrix(QuantFormat.INT4, 20, 96)])


def test_other_backends_hold_the_same_numbers(reference: Ops) -> None:
    parts = [random_matrix(kind, 8, 64) for kind in FORMATS]
    weight = reference.prepare_quantized(parts)
    assert torch.equal(weight.rows(torch.arange(24)), torch.cat([part.dequantize() for part in parts]))
