"""Quantized matrices in their plain form: what they stand for, and rounding to 8 bits."""

from __future__ import annotations

import pytest
import torch

from shoal.kernels.quantized import GROUP, PANEL, QuantFormat, QuantizedMatrix, quantize_int8, stack


def one_group(kind: QuantFormat, quants: list[int], minimum: float | None = None) -> QuantizedMatrix:
    minima = None if minimum is None else torch.tensor([[minimum]], dtype=torch.float16)
    return QuantizedMatrix(
        kind, GROUP, torch.tensor([[quants]], dtype=torch.uint8), torch.tensor([[0.5]]).half(), minima
    )


def test_what_quants_stand_for() -> None:
    nibbles = [0xF0 + i for i in range(16)]  # low nibbles 0 to 15, high nibbles 15
    expected = torch.tensor([[*range(16), *[15] * 16]]).float()
    assert torch.equal(one_group(QuantFormat.INT4, nibbles).dequantize(), (expected - 8) / 2)
    assert torch.equal(one_group(QuantFormat.INT4_MIN, nibbles, -3.0).dequantize(), expected / 2 - 3)
    signed = one_group(QuantFormat.INT8, [0x80, 0xFF, 0x7F, *[1] * 29]).dequantize()
    assert signed[0, :4].tolist() == [-64.0, -0.5, 63.5, 0.5]


@pytest.mark.parametrize("in_features", [1, 31, 32, 33, 640])
def test_rounding_to_8_bits_errs_by_half_a_step(in_features: int) -> None:
    torch.manual_seed(in_features)
    weight = torch.randn(70, in_features) * torch.logspace(-3, 3, 70)[:, None]
    matrix = quantize_int8(weight)
    assert matrix.shape == weight.shape
    groups = torch.nn.functional.pad(weight, (0, -in_features % GROUP)).view(70, -1, GROUP)
    error = torch.nn.functional.pad(matrix.dequantize() - weight, (0, -in_features % GROUP)).view_as(groups).abs()
    assert (error <= matrix.scales.float()[..., None] * 0.50001).all()
    usual = groups.abs().amax(2) > 0.008  # the scale is a normal fp16 number
    assert (error.amax(2) <= groups.abs().amax(2) / 253)[usual].all()
    assert matrix.integers().abs().max() <= 127


def test_zeros_and_tiny_groups_stay_finite() -> None:
    weight = torch.tensor([[0.0] * 32 + [1e-9] * 32 + [1e-5] * 32])
    values = quantize_int8(weight).dequantize()
    assert torch.equal(values[:, :32], weight[:, :32])
    assert (values - weight).abs().max() < 1e-7


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e8])
def test_what_has_no_scale_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        quantize_int8(torch.tensor([[1.0, bad]]))


def test_tensors_that_do_not_fit_are_refused() -> None:
    quants, scales = torch.zeros(2, 1, 16, dtype=torch.uint8), torch.zeros(2, 1).half()
    with pytest.raises(ValueError, match="do not fit INT8"):
        QuantizedMatrix(QuantFormat.INT8, 32, quants, scales)
    with pytest.raises(ValueError, match="do not fit float16"):
        QuantizedMatrix(QuantFormat.INT4, 32, quants, scales.float())
    with pytest.raises(ValueError, match="1 numbers a group"):
        QuantizedMatrix(QuantFormat.INT4_MIN, 32, quants, scales)


def test_stacking_joins_neighbours_of_one_format() -> None:
    eight, four = quantize_int8(torch.randn(3, 64)), one_group(QuantFormat.INT4, [7] * 16)
    wide = QuantizedMatrix(four.format, 64, four.quants.repeat(1, 2, 1), four.scales.repeat(1, 2))
    parts = stack([eight, eight, wide, eight])
    assert [(part.format.name, part.out_features) for part in parts] == [("INT8", 6), ("INT4", 1), ("INT8", 3)]
    assert torch.equal(parts[0].dequantize(), torch.cat([eight.dequantize()] * 2))


def test_columns_and_rows_of_padding() -> None:
    matrix = quantize_int8(torch.randn(5, 100))
    assert torch.equal(matrix.columns(64, 36).dequantize(), matrix.dequantize()[:, 64:])
    assert torch.equal(matrix.columns(32, 32).dequantize(), matrix.dequantize()[:, 32:64])
    assert torch.equal(matrix.padded(2).dequantize()[5:], torch.zeros(2, 100))


@pytest.mark.parametrize(("kind", "bytes_a_group"), [("INT4", 18), ("INT4_MIN", 20), ("INT8", 34)])
def test_packed_size(kind: str, bytes_a_group: int) -> None:
    assert QuantFormat[kind].packed_bytes(PANEL + 1, GROUP + 1) == 2 * PANEL * 2 * bytes_a_group
