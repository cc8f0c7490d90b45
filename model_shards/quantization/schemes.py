"""How a model's matrices are kept in memory: a scheme reads them, and says beforehand what they will weigh.

Layers hold what a scheme read without looking at it, and hand it to the operators. Norms and biases stay as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import groupby

import torch

from shoal.configs.errors import ConfigError, ModelLoadError
from shoal.kernels.quantized import GROUP, PANEL, QuantFormat, QuantizedMatrix, quantize_int8
from shoal.model_shards.weights.checkpoint import ALL, Checkpoint, CheckpointReader, sliced_shape

Matrix = torch.Tensor | QuantizedMatrix


@dataclass(frozen=True, slots=True)
class LinearShape:
    """One rank's part of the matrices that make one operator, stacked along the output features."""

    names: tuple[str, ...]
    out_features: tuple[int, ...]
    """Of each."""
    in_features: int
    bias: bool = False


class WeightScheme(ABC):
    """`dtype` is what matrices that are not quantized are stored in."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    @abstractmethod
    def read(
        self, reader: CheckpointReader, name: str, shape: tuple[int, int], rows: slice = ALL, cols: slice = ALL
    ) -> Matrix:
        """A slice of the matrix whose full shape must be `shape`. Raises ModelLoadError for numbers that the scheme
        cannot hold."""

    @abstractmethod
    def format(self, name: str, in_features: int) -> QuantFormat | None:
        """What `read` makes of a matrix of which a rank has so many columns; None: a dense tensor."""

    def linear_bytes(self, linear: LinearShape) -> int:
        """What the operator will hold, padding included where the native unit pads."""
        formats = [self.format(name, linear.in_features) for name in linear.names]
        rows = sum(linear.out_features)
        if not all(kind is not None for kind in formats):  # what cannot be stacked is dense as a whole
            return rows * (linear.in_features + linear.bias) * self.dtype.itemsize
        total = 0
        for kind, parts in groupby(zip(formats, linear.out_features, strict=True), key=lambda part: part[0]):
            assert kind is not None
            rows = sum(size for _, size in parts)
            total += kind.packed_bytes(rows, linear.in_features)
            total += -(-rows // PANEL) * PANEL * torch.float32.itemsize if linear.bias else 0
        return total


class DenseScheme(WeightScheme):
    """Every matrix in the weights' dtype."""

    def read(
        self, reader: CheckpointReader, name: str, shape: tuple[int, int], rows: slice = ALL, cols: slice = ALL
    ) -> Matrix:
        return reader.read(name, shape, self.dtype, rows, cols)

    def format(self, name: str, in_features: int) -> QuantFormat | None:
        return None


class PackedScheme(WeightScheme):
    """What the checkpoint stores quantized stays so; other matrices, and slices that cut a group, are dense."""

    def __init__(self, dtype: torch.dtype, checkpoint: Checkpoint) -> None:
        super().__init__(dtype)
        self._checkpoint = checkpoint

    def read(
        self, reader: CheckpointReader, name: str, shape: tuple[int, int], rows: slice = ALL, cols: slice = ALL
    ) -> Matrix:
        quantized = None
        if self.format(name, sliced_shape(shape, rows, cols)[1]) is not None:
            quantized = reader.read_quantized(name, shape, rows, cols)
        return reader.read(name, shape, self.dtype, rows, cols) if quantized is None else quantized

    def format(self, name: str, in_features: int) -> QuantFormat | None:
        # Ranks have equal parts of the columns: when the length of one is whole groups, so is where each begins.
        return self._checkpoint.quant_format(name) if in_features % GROUP == 0 else None


class Int8Scheme(WeightScheme):
    """Every matrix rounded to 8 bits while it is loaded, whatever the checkpoint stores (`quantize_int8`)."""

    def read(
        self, reader: CheckpointReader, name: str, shape: tuple[int, int], rows: slice = ALL, cols: slice = ALL
    ) -> Matrix:
        values = reader.read(name, shape, torch.float32, rows, cols)
        if name not in reader.checkpoint.names() or reader.checkpoint.shape(name) != shape:
            return values.to(self.dtype)  # a placeholder, which the reader will report
        try:
            return quantize_int8(values)
        except ValueError as error:
            raise ModelLoadError(f"{reader.checkpoint.path}: {name} cannot be quantized: {error}.") from error

    def format(self, name: str, in_features: int) -> QuantFormat | None:
        return QuantFormat.INT8


def make_scheme(weights: str, dtype: torch.dtype, checkpoint: Checkpoint) -> WeightScheme:
    """`weights` as in EngineConfig. Raises ConfigError, for "packed", when the checkpoint has nothing quantized."""
    if weights == "dense":
        return DenseScheme(dtype)
    if weights == "int8":
        return Int8Scheme(dtype)
    assert weights == "packed", weights
    if all(checkpoint.quant_format(name) is None for name in checkpoint.names()):
        raise ConfigError(
            f"weights is packed, but {checkpoint.path} stores no matrix quantized. Set weights to int8 to quantize "
            "while loading, or to dense.",
            param="weights",
        )
    return PackedScheme(dtype, checkpoint)
