"""The experts of a layer, as models call them: rows, which experts they visit, and how much each counts.

One rank holds all of them. Several ranks share them out in one of two ways: each holds a slice of every expert and the
results are summed (tensor parallelism), or each holds some experts whole and the rows travel (`expert_parallel`).
Nothing is dropped and nothing padded: an expert takes as many rows as chose it, or none.

A token's result is the sum of its experts' in the order in which they were chosen, in fp32, weighted where the token is
at home: a function of the token alone wherever the operators' products are, whatever else is in the batch and wherever
its experts are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shoal.kernels.ops import GroupedWeight
from shoal.model_shards.models.config import ModelConfig
from shoal.model_shards.models.shapes import expert_projections
from shoal.model_shards.parallel.dispatch import ExpertDispatch
from shoal.model_shards.parallel.eplb import Placement
from shoal.model_shards.parallel.loader import WeightLoader
from shoal.model_shards.parallel.split import split_evenly
from shoal.model_shards.quantization.schemes import Matrix


class ExpertMLP:
    """activation(gate(x)) * up(x), projected back, by the experts that each token chose; weighted and summed.

    With sequence parallelism (`StepRows`) n is the rows that the rank holds, on the way in and out.
    """

    def __init__(self, load: WeightLoader, config: ModelConfig, layer: int) -> None:
        assert config.moe is not None
        self.layer = layer
        self.num_experts = config.moe.num_experts
        self.context = load.context
        position = load.context.position
        self.parallel: ParallelExperts | None = None
        if position.ep_size > 1:
            placement = Placement.initial(self.num_experts, position.shape.num_redundant_experts, position.ep_size)
            self.slots = ExpertSlots(load, config, layer, placement.on_rank(position.ep_rank))
            self.parallel = ParallelExperts(load, self.slots, placement)
        else:
            self.slots = ExpertSlots(load, config, layer, range(self.num_experts))

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [n, hidden], expert_ids int64 [n, k], weights fp32 [n, k] -> [n, hidden], in x's dtype. n may be 0; with
        `expert_parallel` all ranks of the stage call it nevertheless."""
        if self.parallel is not None:
            return self.parallel(x, expert_ids, weights)
        x, expert_ids, weights = (self.context.whole_rows(each) for each in (x, expert_ids, weights))
        ops = self.slots.ops
        rows, starts, places = ops.group_rows(x, expert_ids, self.num_experts)
        return self.context.sum_rows(ops.combine_experts(self.slots(rows, starts), places, weights))


class ExpertSlots:
    """The experts that a rank holds, one a slot: whole ones with `expert_parallel`, else slices."""

    def __init__(self, load: WeightLoader, config: ModelConfig, layer: int, experts: Sequence[int]) -> None:
        """`experts`: which expert each slot holds."""
        assert config.moe is not None
        position = load.context.position
        parts, part = (1, 0) if position.ep_size > 1 else (position.tp_size, position.tp_rank)
        mine = split_evenly("expert_size", config.moe.expert_size, parts, part)

        def read(step: int, **slices: range) -> Iterator[list[Matrix]]:
            for expert in experts:
                matrices = expert_projections(config, layer, expert)[step].matrices
                yield [load.matrix(f"{m.name}.weight", (m.out_features, m.in_features), **slices) for m in matrices]

        self.ops = load.ops
        self.gate_up: GroupedWeight = load.grouped(read(0, rows=mine))
        self.down: GroupedWeight = load.grouped(read(1, cols=mine))
        self._activate = {"silu": load.ops.silu_and_mul, "gelu_tanh": load.ops.gelu_tanh_and_mul}[config.activation]

    def __call__(self, rows: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """rows [m, hidden] in the order of the slots, starts int32 [slots + 1] -> [m, hidden]."""
        gate_up = self.ops.grouped_linear(rows, self.gate_up, starts)
        return self.ops.grouped_linear(self._activate(gate_up), self.down, starts)

    def tensors(self, slot: int) -> list[torch.Tensor]:
        """What makes up the expert in a slot: views of the operators' own memory, alike for every slot of a layer on
        every rank."""
        return self.gate_up.slot_tensors(slot) + self.down.slot_tensors(slot)


class ParallelExperts:
    """Whole experts on the ranks of a stage, as `placement` says: rows travel to them and results back.

    Tensor-parallel ranks have the same rows; each takes its share, so that each row leaves once, and afterwards they
    gather. Rows of an expert that has several slots are spread over them in turn.
    """

    def __init__(self, load: WeightLoader, slots: ExpertSlots, placement: Placement) -> None:
        self._context, self.slots, self._device = load.context, slots, load.device
        self.dispatch = ExpertDispatch(load.context, placement.slots_per_rank)
        self.load = torch.zeros(placement.num_experts, dtype=torch.int64, device=load.device)
        """Rows of this rank that chose each expert, since whoever reads it last set it to 0."""
        self.place(placement)

    def place(self, placement: Placement) -> None:
        """From now on slots hold what `placement` says; the caller has put it there."""
        self.placement = placement
        table = placement.slots_of_experts()
        self._num_slots = torch.tensor([len(slots) for slots in table], device=self._device)
        longest = max(len(slots) for slots in table)
        padded = [slots + slots[:1] * (longest - len(slots)) for slots in table]
        self._slot_table = torch.tensor(padded, device=self._device)

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        mine, held = self._share(len(x))
        ids, weights = expert_ids[mine], weights[mine]
        self.load.scatter_add_(0, ids.flatten(), torch.ones_like(ids).flatten())
        arrivals = self.dispatch.send(x[mine], self._slots_of(ids))
        results = self.dispatch.answer(arrivals, self.slots(arrivals.rows, arrivals.starts))
        out = x.new_zeros((held, x.shape[1]))
        out[: len(ids)] = self.slots.ops.combine_experts(results, arrivals.places, weights)
        return out if self._context.rows.scattered else self._context.all_gather(out, dim=0)[: len(x)]

    def _share(self, num_rows: int) -> tuple[slice, int]:
        """(which of the rows here leave from this rank, how many places it has in what is gathered or held). Where a
        rank holds a share already, all leave but padding."""
        position, rows = self._context.position, self._context.rows
        if rows.scattered:
            return slice(0, max(0, min(rows.held, rows.total - position.tp_rank * rows.held))), rows.held
        held = -(-num_rows // position.tp_size)
        return slice(position.tp_rank * held, (position.tp_rank + 1) * held), held

    def _slots_of(self, expert_ids: torch.Tensor) -> torch.Tensor:
        """expert_ids [m, k] -> slots of the layer int64 [m, k]. Ranks begin with different slots of an expert: steps
        of one row a rank would else all meet in the first."""
        row = torch.arange(len(expert_ids), device=expert_ids.device)[:, None] + self._context.index("expert")
        return self._slot_table[expert_ids, row % self._num_slots[expert_ids]]
