"""The gated MLP of dense layers, and of the experts that every token visits."""

from __future__ import annotations

import torch

from shoal.model_shards.models.config import ModelConfig
from shoal.model_shards.parallel.linear import ColumnLinear, RowLinear
from shoal.model_shards.parallel.loader import WeightLoader


class MLP:
    """activation(gate(x)) * up(x), projected back (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, load: WeightLoader, config: ModelConfig, prefix: str, inner: int) -> None:
        """Reads `{prefix}.{gate,up,down}_proj`; `inner`: intermediate size of the whole model."""
        hidden, bias = config.hidden_size, config.mlp_bias
        self.gate_up = ColumnLinear(load, [f"{prefix}.gate_proj", f"{prefix}.up_proj"], inner, hidden, bias=bias)
        self.down = RowLinear(load, f"{prefix}.down_proj", hidden, inner, bias=bias)
        activations = {"silu": load.ops.silu_and_mul, "gelu_tanh": load.ops.gelu_tanh_and_mul}
        self.activate = activations[config.activation]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, hidden] -> [n, hidden]."""
        return self.down(self.activate(self.gate_up(x)))
