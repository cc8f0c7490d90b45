"""Matrices of 4 or 8 bits in groups of 32 along the input features: what a quantized weight is to every backend.

`QuantizedMatrix` is the plain form that loaders make; a backend packs it as its product reads it fastest
(`Ops.prepare_quantized`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

GROUP = 32
"""Input features that share a scale."""
PANEL = 16
"""Output features that the native unit packs together; a weight is padded to whole panels."""
_CHUNK_ELEMENTS = 1 << 20
"""Elements quantized at a time, so that the temporaries stay small beside the weight."""


class QuantFormat(IntEnum):
    """What a quant q stands for, with its group's scale d and minimum m. The numbers are the native unit's."""

    INT4 = 0
    """d * (q - 8), q in [0, 15]: Q4_0 of GGUF."""
    INT4_MIN = 1
    """d * q + m, q in [0, 15]: Q4_1 of GGUF."""
    INT8 = 2
    """d * q, q in [-128, 127]: Q8_0 of GGUF."""

    @property
    def quant_bytes(self) -> int:
        """Of one group of one output feature."""
        return GROUP if self is QuantFormat.INT8 else GROUP // 2

    @property
    def group_bytes(self) -> int:
        """The same with its scale and minimum."""
        return self.quant_bytes + (4 if self is QuantFormat.INT4_MIN else 2)

    def packed_bytes(self, out_features: int, in_features: int) -> int:
        """Of a whole packed weight, padding included."""
        return -(-out_features // PANEL) * PANEL * -(-in_features // GROUP) * self.group_bytes


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """[out_features, in_features]; where in_features is no multiple of 32, the last group's other quants are zeros.

    Raises ValueError when the tensors do not fit together, or a scale or minimum is not finite.
    """

    format: QuantFormat
    in_features: int
    quants: torch.Tensor
    """uint8 [out_features, groups, 16 or 32]. At 4 bits byte i holds quant i (low nibble) and 16 + i (high)."""
    scales: torch.Tensor
    """float16 [out_features, groups]."""
    minima: torch.Tensor | None = None
    """float16 [out_features, groups], INT4_MIN only."""

    def __post_init__(self) -> None:
        shape = (self.quants.shape[0], -(-self.in_features // GROUP))
        if self.quants.shape != (*shape, self.format.quant_bytes) or self.quants.dtype != torch.uint8:
            raise ValueError(f"quants {tuple(self.quants.shape)} do not fit {self.format.name} of {shape} groups")
        numbers = [self.scales] if self.minima is None else [self.scales, self.minima]
        if len(numbers) != (2 if self.format is QuantFormat.INT4_MIN else 1):
            raise ValueError(f"{self.format.name} is given {len(numbers)} numbers a group")
        for tensor in numbers:
            if tensor.shape != shape or tensor.dtype != torch.float16:
                raise ValueError(f"scales {tensor.dtype} {tuple(tensor.shape)} do not fit float16 {shape}")
            if not tensor.isfinite().all():
                raise ValueError("a scale or minimum is not finite")

    @property
    def out_features(self) -> int:
        return self.quants.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    def padded(self, rows: int) -> QuantizedMatrix:
        """The same with `rows` rows of zeros more."""
        if rows == 0:
            return self
        parts = [
            None if part is None else torch.cat([part, part.new_zeros((rows, *part.shape[1:]))])
            for part in (self.quants, self.scales, self.minima)
        ]
        quants, scales, minima = parts
        assert quants is not None
        assert scales is not None
        return QuantizedMatrix(self.format, self.in_features, quants, scales, minima)

    def reordered(self, rows: torch.Tensor) -> QuantizedMatrix:
        """The output features `rows` (int64), in that order."""
        minima = None if self.minima is None else self.minima[rows]
        return QuantizedMatrix(self.format, self.in_features, self.quants[rows], self.scales[rows], minima)

    def columns(self, start: int, count: int) -> QuantizedMatrix:
        """Input features [start, start + count), which begin and end between groups."""
        if (start, count) == (0, self.in_features):
            return self
        assert start % GROUP == 0, start
        assert count % GROUP == 0 or start + count == self.in_features, (start, count)
        part = slice(start // GROUP, -(-(start + count) // GROUP))
        minima = None if self.minima is None else self.minima[:, part]
        return QuantizedMatrix(self.format, count, self.quants[:, part], self.scales[:, part], minima)

    def integers(self) -> torch.Tensor:
        """int8 [out_features, groups, 32]: what the scale is multiplied by."""
        if self.format is QuantFormat.INT8:
            return self.quants.view(torch.int8)
        integers = torch.cat([self.quants & 15, self.quants >> 4], dim=2).view(torch.int8)
        return integers - 8 if self.format is QuantFormat.INT4 else integers

    def dequantize(self) -> torch.Tensor:
        """float32 [out_features, in_features]."""
        values = self.integers().float() * self.scales.float().unsqueeze(2)
        if self.minima is not None:
            values += self.minima.float().unsqueeze(2)
        return values.flatten(1)[:, : self.in_features].contiguous()


def stack(parts: list[QuantizedMatrix]) -> list[QuantizedMatrix]:
    """Parts one above the other; neighbours of one format become one."""
    stacked: list[QuantizedMatrix] = []
    for part in parts:
        if stacked and stacked[-1].format is part.format and stacked[-1].in_features == part.in_features:
            above = stacked.pop()
            minima = None
            if above.minima is not None and part.minima is not None:
                minima = torch.cat([above.minima, part.minima])
            quants, scales = torch.cat([above.quants, part.quants]), torch.cat([above.scales, part.scales])
            part = QuantizedMatrix(part.format, part.in_features, quants, scales, minima)
        stacked.append(part)
    return stacked


def quantize_int8(weight: torch.Tensor) -> QuantizedMatrix:
    """INT8 by rounding to nearest, symmetric: d is the group's largest magnitude / 127, rounded up to fp16.

    The error of an element is at most half of d: 1/254 of the group's largest magnitude (1/253 with d's rounding; more
    where that magnitude is under 0.008, whose d is subnormal in fp16). `weight` is a float matrix. Raises ValueError
    for values that are not finite or whose scale fp16 cannot hold (above 8.3e6).
    """
    rows, in_features = weight.shape
    groups = -(-in_features // GROUP)
    quants = torch.empty((rows, groups, GROUP), dtype=torch.int8)
    scales = torch.empty((rows, groups), dtype=torch.float16)
    share = max(1, _CHUNK_ELEMENTS // max(1, in_features))
    for start in range(0, rows, share):
        values = weight[start : start + share].float()
        values = torch.nn.functional.pad(values, (0, groups * GROUP - in_features)).view(-1, groups, GROUP)
        exact = values.abs().amax(dim=2) / 127
        half = exact.half()
        scale = torch.where(half.float() < exact, half.nextafter(half.new_tensor(torch.inf)), half)
        inverse = torch.where(scale > 0, 1 / scale.float(), 0.0)
        scales[start : start + share] = scale
        quants[start : start + share] = (values * inverse.unsqueeze(2)).round().to(torch.int8)
    return QuantizedMatrix(QuantFormat.INT8, in_features, quants.view(torch.uint8), scales)
