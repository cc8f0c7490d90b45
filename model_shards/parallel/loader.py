"""What a layer needs to come into being: the weights, which part of them is this rank's, and the operators."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.kernels.ops import LinearWeight, Ops
from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.weights.checkpoint import CheckpointReader


@dataclass(frozen=True, slots=True)
class WeightLoader:
    """Reads this rank's slices of a checkpoint. Names are Hugging Face's; shapes are those of the whole tensor; a range
    of rows or cols that is None means all of them."""

    reader: CheckpointReader
    ops: Ops
    context: ParallelContext
    dtype: torch.dtype
    """What weights are stored in."""
    device: torch.device

    def matrix(
        self, name: str, shape: tuple[int, int], rows: range | None = None, cols: range | None = None
    ) -> torch.Tensor:
        return self.reader.read(name, shape, self.dtype, _slice(rows), _slice(cols)).to(self.device)

    def vector(self, name: str, size: int, rows: range | None = None) -> torch.Tensor:
        """A bias: in the weights' dtype."""
        return self.reader.read(name, (size,), self.dtype, _slice(rows)).to(self.device)

    def norm(self, name: str, size: int, offset: float) -> torch.Tensor:
        """An RMSNorm's multiplier: fp32, with the family's offset already in it."""
        return (self.reader.read(name, (size,), torch.float32) + offset).to(self.device)

    def linear(self, weights: list[torch.Tensor], biases: list[torch.Tensor]) -> LinearWeight:
        """One operator out of parts stacked along the output features."""
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        bias = torch.cat(biases) if biases else None
        return self.ops.prepare_linear(weight, bias)


def _slice(part: range | None) -> slice:
    return slice(None) if part is None else slice(part.start, part.stop)
