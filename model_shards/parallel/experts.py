"""The experts of a layer, as models call them: rows, which experts they visit, and how much each counts.

One rank holds all of them; with tensor parallelism each rank holds a slice of every expert, and the results are summed.
Nothing is dropped and nothing padded: an expert takes as many rows as chose it, or none.

A token's result is the sum of its experts' in the order in which they were chosen, in fp32: a function of the token
alone wherever the operators' products are, whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shoal.kernels.ops import GroupedWeight
from shoal.model_shards.models.config import ModelConfig
from shoal.model_shards.models.shapes import expert_projections
from shoal.model_shards.parallel.dispatch import inverse, sort_by_slot
from shoal.model_shards.parallel.loader import WeightLoader
from shoal.model_shards.parallel.split import split_evenly
from shoal.model_shards.quantization.schemes import Matrix


class ExpertMLP:
    """activation(gate(x)) * up(x), projected back, by the experts that each token chose; weighted and summed."""

    def __init__(self, load: WeightLoader, config: ModelConfig, layer: int) -> None:
        assert config.moe is not None
        self.layer = layer
        self.num_experts = config.moe.num_experts
        self.context = load.context
        self._slots = ExpertSlots(load, config, layer, range(self.num_experts))

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [n, hidden], expert_ids int64 [n, k], weights fp32 [n, k] -> [n, hidden], in x's dtype. n may be 0."""
        order, starts = sort_by_slot(expert_ids.flatten(), self.num_experts)
        results = self._slots(x[order // expert_ids.shape[1]], starts)
        return self.context.all_reduce(_weighted_sum(results[inverse(order)], weights).to(x.dtype))


class ExpertSlots:
    """Experts held by this rank, one a slot: a slice of each over the tensor-parallel ranks."""

    def __init__(self, load: WeightLoader, config: ModelConfig, layer: int, experts: Sequence[int]) -> None:
        """`experts`: which expert each slot holds."""
        assert config.moe is not None
        position = load.context.position
        mine = split_evenly("expert_size", config.moe.expert_size, position.tp_size, position.tp_rank)

        def read(part: int, **slices: range) -> Iterator[list[Matrix]]:
            for expert in experts:
                matrices = expert_projections(config, layer, expert)[part].matrices
                yield [load.matrix(f"{m.name}.weight", (m.out_features, m.in_features), **slices) for m in matrices]

        self.ops = load.ops
        self.gate_up: GroupedWeight = load.grouped(read(0, rows=mine))
        self.down: GroupedWeight = load.grouped(read(1, cols=mine))
        self._activate = {"silu": load.ops.silu_and_mul, "gelu_tanh": load.ops.gelu_tanh_and_mul}[config.activation]

    def __call__(self, rows: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """rows [m, hidden] in the order of the slots, starts int32 [slots + 1] -> [m, hidden]."""
        gate_up = self.ops.grouped_linear(rows, self.gate_up, starts)
        return self.ops.grouped_linear(self._activate(gate_up), self.down, starts)


def _weighted_sum(results: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """results [n * k, hidden], weights fp32 [n, k] -> fp32 [n, hidden]. One choice after the other, since a reduction
    may take them in an order that depends on n; each product and sum rounds on its own."""
    results = results.view(*weights.shape, -1)
    total = results[:, 0].float() * weights[:, 0:1]
    for choice in range(1, weights.shape[1]):
        total += results[:, choice].float() * weights[:, choice : choice + 1]
    return total
