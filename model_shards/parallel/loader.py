"""What a layer needs to come into being: the weights, which part of them is this rank's, and the operators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from shoal.kernels.ops import GroupedWeight, GroupMatrix, LinearWeight, Ops
from shoal.kernels.quantized import QuantizedMatrix
from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.parallel.context_parallel import AttentionOperator, ContextParallelAttention
from shoal.model_shards.quantization.schemes import Matrix, WeightScheme
from shoal.model_shards.weights.checkpoint import CheckpointReader


@dataclass(frozen=True, slots=True)
class WeightLoader:
    """Reads this rank's slices of a checkpoint. Names are Hugging Face's; shapes are those of the whole tensor; a range
    of rows or cols that is None means all of them."""

    reader: CheckpointReader
    ops: Ops
    context: ParallelContext
    scheme: WeightScheme
    device: torch.device

    @property
    def attention(self) -> AttentionOperator:
        """Attention over the pages of all ranks that share a sequence."""
        if self.context.position.cp_size == 1:
            return self.ops.paged_attention
        return ContextParallelAttention(self.ops, self.context)

    @property
    def dtype(self) -> torch.dtype:
        """What weights are stored in where they are not quantized."""
        return self.scheme.dtype

    def matrix(self, name: str, shape: tuple[int, int], rows: range | None = None, cols: range | None = None) -> Matrix:
        """As the scheme keeps it: to be handed to `linear`."""
        matrix = self.scheme.read(self.reader, name, shape, _slice(rows), _slice(cols))
        return matrix.to(self.device) if isinstance(matrix, torch.Tensor) else matrix

    def vector(self, name: str, size: int, rows: range | None = None) -> torch.Tensor:
        """A bias: in the weights' dtype."""
        return self.reader.read(name, (size,), self.dtype, _slice(rows)).to(self.device)

    def norm(self, name: str, size: int, offset: float) -> torch.Tensor:
        """An RMSNorm's multiplier: fp32, with the family's offset already in it."""
        return self.fp32(name, (size,)) + offset

    def fp32(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor that is kept whole and in fp32, whatever the weights are."""
        return self.reader.read(name, shape, torch.float32).to(self.device)

    def unpacked(self, name: str, shape: tuple[int, int], rows: range) -> torch.Tensor:
        """A matrix in the weights' dtype, whatever their scheme: products are made along either axis of it."""
        return self.reader.read(name, shape, self.dtype, _slice(rows)).to(self.device)

    def linear(self, weights: Sequence[Matrix], biases: list[torch.Tensor]) -> LinearWeight:
        """One operator out of parts stacked along the output features; dense when any of them is."""
        bias = torch.cat(biases) if biases else None
        stacked = self._stacked(weights)
        if isinstance(stacked, torch.Tensor):
            return self.ops.prepare_linear(stacked, bias)
        return self.ops.prepare_quantized(stacked, bias)

    def grouped(self, groups: Iterable[Sequence[Matrix]]) -> GroupedWeight:
        """One operator for each group (an expert), out of parts as in `linear`. Groups are read as they are wanted, so
        that no more than one is held twice."""
        return self.ops.prepare_grouped(self._stacked(parts) for parts in groups)

    def _stacked(self, weights: Sequence[Matrix]) -> GroupMatrix:
        quantized = [weight for weight in weights if isinstance(weight, QuantizedMatrix)]
        if len(quantized) == len(weights):
            return quantized
        dense = [
            weight.dequantize().to(self.dtype) if isinstance(weight, QuantizedMatrix) else weight for weight in weights
        ]
        return dense[0] if len(dense) == 1 else torch.cat(dense)


def _slice(part: range | None) -> slice:
    return slice(None) if part is None else slice(part.start, part.stop)
