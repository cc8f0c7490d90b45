"""A quantized weight, packed for the native product (`quantized.cpp`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.kernels.cpu import checks
from shoal.kernels.cpu.native import Native
from shoal.kernels.huge_pages import Arena
from shoal.kernels.ops import LinearWeight
from shoal.kernels.quantized import GROUP, PANEL, QuantFormat, QuantizedMatrix, stack


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring output features of one format, in panels of their own."""

    format: QuantFormat
    first: int
    """Column of the output where it begins."""
    out_features: int
    packed: torch.Tensor
    bias: torch.Tensor | None
    """float32, padded to whole panels."""

    @classmethod
    def pack(
        cls, native: Native, arena: Arena, part: QuantizedMatrix, first: int, bias: torch.Tensor | None
    ) -> Segment:
        packed = arena.empty((part.format.packed_bytes(*part.shape),), torch.uint8)
        quants, scales = part.quants.contiguous(), part.scales.contiguous()
        minima = None if part.minima is None else part.minima.contiguous()
        native.pack_quantized(
            part.format, quants.data_ptr(), scales.data_ptr(), None if minima is None else minima.data_ptr(),
            part.out_features, -(-part.in_features // GROUP), packed.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        padded = None
        if bias is not None:
            padded = torch.zeros(-(-part.out_features // PANEL) * PANEL)
            padded[: part.out_features] = bias[first : first + part.out_features]
        return cls(part.format, first, part.out_features, packed, padded)


class PackedQuantizedWeight(LinearWeight):
    """Parts that share their input, stacked along the output features; usually one segment."""

    def __init__(
        self, native: Native, arena: Arena, parts: Sequence[QuantizedMatrix], bias: torch.Tensor | None
    ) -> None:
        self.in_features = parts[0].in_features
        self.out_features = sum(part.out_features for part in parts)
        if any(part.in_features != self.in_features for part in parts):
            raise ValueError(f"parts of {[part.in_features for part in parts]} input features cannot be stacked")
        if bias is not None and bias.shape != (self.out_features,):
            raise ValueError(f"bias {tuple(bias.shape)} does not fit {self.out_features} output features")
        self._native = native
        self.segments: list[Segment] = []
        first = 0
        for part in stack(list(parts)):
            self.segments.append(Segment.pack(native, arena, part, first, bias))
            first += part.out_features
        # The tensors live as long as this object; their addresses are asked for once, not in every step.
        self._calls = [
            (
                int(segment.format), segment.packed.data_ptr(),
                None if segment.bias is None else segment.bias.data_ptr(),
                segment.first * torch.float32.itemsize, segment.out_features,
            )
            for segment in self.segments
        ]  # fmt: skip

    def tensors(self) -> list[torch.Tensor]:
        biases = [segment.bias for segment in self.segments if segment.bias is not None]
        return [segment.packed for segment in self.segments] + biases

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out = x * weight^T + bias; x [rows, in_features] with contiguous columns, out contiguous."""
        rows, threads = x.shape[0], torch.get_num_threads()
        at, stride, to = x.data_ptr(), x.stride(0), out.data_ptr()
        for code, packed, bias, first_byte, outputs in self._calls:
            self._native.quantized_linear(
                code, at, stride, packed, bias, to + first_byte, self.out_features, rows, outputs, self.in_features,
                threads,
            )  # fmt: skip

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        index = index.to(torch.int64).contiguous()
        checks.check_rows(index, self.out_features)
        out = torch.empty((len(index), self.in_features))
        if len(self.segments) == 1:
            self._unpack(self.segments[0], index, out)
            return out
        for segment in self.segments:
            mine = ((index >= segment.first) & (index < segment.first + segment.out_features)).nonzero().flatten()
            rows = torch.empty((len(mine), self.in_features))
            self._unpack(segment, index[mine] - segment.first, rows)
            out[mine] = rows
        return out

    def _unpack(self, segment: Segment, index: torch.Tensor, out: torch.Tensor) -> None:
        self._native.quantized_rows(
            segment.format, segment.packed.data_ptr(), self.in_features, index.data_ptr(), len(index), out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
