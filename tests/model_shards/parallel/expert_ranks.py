"""What the ranks of test_experts.py do: `python expert_ranks.py RANK RENDEZVOUS`, four of them.

Their mesh is two data-parallel parts of two tensor-parallel ranks, which share whole experts out (4 ranks). The pairs
also stand for two ranks with whole experts each, and for two with slices.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from shoal.kernels.registry import select_ops
from shoal.model_shards.models.config import ModelConfig, MoEConfig
from shoal.model_shards.models.shapes import expert_projections
from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.parallel.experts import ExpertMLP
from shoal.model_shards.parallel.loader import WeightLoader
from shoal.model_shards.parallel.mesh import MeshShape
from shoal.model_shards.parallel.rebalance import ExpertRebalancer
from shoal.model_shards.quantization.schemes import make_scheme
from shoal.model_shards.weights.checkpoint import ALL, Checkpoint, CheckpointReader

K, HIDDEN = 3, 48
CONFIG = ModelConfig(
    family="qwen3_moe",
    hidden_size=HIDDEN,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=0,
    vocab_size=1,
    max_position=1,
    rms_eps=1e-6,
    rope_theta=1e4,
    moe=MoEConfig(num_experts=8, experts_per_token=K, expert_size=32),
)

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class InMemory(Checkpoint):
    """The experts of one layer, drawn from the names."""

    def __init__(self) -> None:
        self.path, self.config, self._tensors = Path("memory"), CONFIG, {}
        random = torch.Generator().manual_seed(0)
        for expert in range(8):
            for projection in expert_projections(CONFIG, 0, expert):
                for m in projection.matrices:
                    tensor = torch.randn(m.out_features, m.in_features, generator=random) / 5
                    self._tensors[f"{m.name}.weight"] = tensor

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL, cols: slice = ALL) -> torch.Tensor:
        return self._tensors[name][rows, cols].to(dtype, copy=True).contiguous()


def experts(context: ParallelContext, weights: str = "dense") -> ExpertMLP:
    checkpoint = InMemory()
    ops = select_ops(torch.device("cpu"), torch.float32)
    scheme = make_scheme(weights, torch.float32, checkpoint)
    load = WeightLoader(CheckpointReader(checkpoint), ops, context, scheme, torch.device("cpu"))
    return ExpertMLP(load, CONFIG, 0)


def rows_of(part: int, count: int, among: int = 8) -> Rows:
    """Rows of a data-parallel part that choose K of the first `among` experts."""
    random = torch.Generator().manual_seed(100 * count + part)
    ids = torch.stack([torch.randperm(among, generator=random)[:K] for _ in range(count)] or [torch.empty(0, K).long()])
    x, weights = torch.randn(count, HIDDEN, generator=random), torch.rand(count, K, generator=random)
    return x, ids[:count].reshape(count, K), weights


def loop(dense: ExpertMLP, rows: Rows) -> torch.Tensor:
    """Token by token, choice by choice."""
    ops, out = dense.slots.ops, torch.zeros_like(rows[0])
    for i, (x, ids, weights) in enumerate(zip(*rows, strict=True)):
        for expert, weight in zip(ids.tolist(), weights, strict=True):
            starts = torch.tensor([0] * (expert + 1) + [1] * (8 - expert), dtype=torch.int32)
            inner = ops.silu_and_mul(ops.grouped_linear(x[None], dense.slots.gate_up, starts))
            out[i] += ops.grouped_linear(inner, dense.slots.down, starts)[0] * weight
    return out


STEPS = [((0, 0), 8), ((1, 0), 8), ((0, 5), 8), ((1, 1), 3), ((4, 9), 4), ((16, 33), 8)]
"""(rows of each data-parallel part, among how many experts they choose): parts, and so ranks, without rows; ranks none
of whose experts is chosen."""


def check_whole_experts(context: ParallelContext, dense: ExpertMLP, mlp: ExpertMLP) -> None:
    assert mlp.parallel is not None
    for counts, among in STEPS:
        count = counts[context.position.dp_rank]
        rows = rows_of(context.position.dp_rank, count, among)
        before, bytes_before = mlp.parallel.dispatch.rows.copy(), context.traffic["all_to_all"]
        context.begin_step(count, 0)
        assert torch.equal(mlp(*rows), loop(dense, rows)), (counts, among)
        moved, moved_bytes = mlp.parallel.dispatch.rows - before, context.traffic["all_to_all"] - bytes_before
        share = -(-count // context.position.tp_size)
        mine = rows[1][context.position.tp_rank * share :][:share]
        slots = mlp.parallel.placement.slots_per_rank
        away = int((mine // slots != context.index("expert")).sum())
        sums = torch.tensor([moved["sent"], moved["received"], len(mine), moved_bytes, away])
        sent, received, total, sent_bytes, away = context.all_reduce(sums, "expert").tolist()
        assert sent == received == K * total, (sent, received, total)
        ranks = context.size("expert")
        count_bytes = ranks * (ranks - 1) * slots * 4
        assert sent_bytes == 2 * away * HIDDEN * 4 + count_bytes, "there and back, but what is at home already"


def main(rank: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    shape = MeshShape(tp_size=2, dp_size=2, expert_parallel=True)
    cpu = torch.device("cpu")
    four = ParallelContext.connect(shape.position(rank), rendezvous, cpu, 30.0)
    groups = four._groups
    assert groups is not None
    with torch.inference_mode():
        dense = experts(ParallelContext.single())
        rows = rows_of(0, 9)
        assert torch.equal(dense(*rows), loop(dense, rows))

        # Slices of every expert on two ranks.
        sliced = ParallelContext(MeshShape(tp_size=2).position(rank % 2), groups)
        sliced.begin_step(9, 0)
        mlp = experts(sliced)
        torch.testing.assert_close(mlp(*rows), loop(dense, rows))
        whole = mlp(*rows)
        sliced.begin_step(9, 1)  # scattered: 5 rows, and 4 with one of padding
        mine = slice(5 * (rank % 2), 5 * (rank % 2 + 1))
        held = [torch.nn.functional.pad(each[mine], (0, 0, 0, 5 - len(each[mine]))) for each in rows]
        assert torch.equal(mlp(*held)[: len(whole[mine])], whole[mine])

        # Whole experts on two ranks that have the same rows, and on two with rows of their own.
        for position in (
            MeshShape(tp_size=2, expert_parallel=True).position(rank % 2),
            MeshShape(dp_size=2, expert_parallel=True).position(rank % 2),
        ):
            two = ParallelContext(position, replace(groups, expert=groups.tensor))
            check_whole_experts(two, dense, experts(two))

        mlp = experts(four)
        assert mlp.parallel is not None
        check_whole_experts(four, dense, mlp)
        four.begin_step(9, 1)  # as above, and padding is not sent
        mine = slice(5 * four.position.tp_rank, 5 * (four.position.tp_rank + 1))
        held = [torch.nn.functional.pad(each[mine], (0, 0, 0, 5 - len(each[mine]))) for each in rows]
        before = mlp.parallel.dispatch.rows["sent"]
        assert torch.equal(mlp(*held)[: len(rows[0][mine])], loop(dense, rows)[mine])
        assert mlp.parallel.dispatch.rows["sent"] - before == K * len(rows[0][mine]), "padding was sent"
        four.begin_step(0, 0)
        rebalanced(four, dense)
        rebalanced(four, dense, weights="int8")
    print("agreed", flush=True)


def rebalanced(four: ParallelContext, dense: ExpertMLP, weights: str = "dense") -> None:
    """Rows crowd on two experts with a slot each: after rebalancing these have several, and nothing else changes."""
    shape = replace(four.position.shape, num_redundant_experts=4)
    redundant = ParallelContext(shape.position(four.position.rank), four._groups)
    mlp = experts(redundant, weights)
    assert mlp.parallel is not None
    rebalancer = ExpertRebalancer([mlp.parallel], redundant, 2, num_groups=1)
    rows = rows_of(four.position.dp_rank, 24)
    rows[1][:, 0], rows[1][:, 1] = 6, 7
    rows[1][:, 2] = torch.arange(24) % 6
    redundant.begin_step(24, 0)

    def received() -> list[int]:
        before = mlp.parallel.dispatch.rows["received"]
        results.append(mlp(*rows))
        mine = torch.tensor([mlp.parallel.dispatch.rows["received"] - before])
        return redundant.all_gather(mine, dim=0, axis="expert").tolist()

    results: list[torch.Tensor] = []
    placement = mlp.parallel.placement
    crowded = received()
    rebalancer.after_step()
    assert mlp.parallel.placement == placement, "before the interval was over"
    received()
    rebalancer.after_step()
    assert mlp.parallel.placement != placement
    even = received()
    assert sum(even) == sum(crowded)
    assert max(even) < 0.8 * max(crowded), (crowded, even)
    assert rebalancer.imbalance is not None
    assert rebalancer.imbalance == 4 * max(crowded) / sum(crowded), "what was counted is what was predicted"
    if weights == "dense":
        assert torch.equal(results[0], loop(dense, rows))
    assert all(torch.equal(result, results[0]) for result in results)
    for _ in range(2):  # idle, then again with the same loads: nothing to win
        placement = mlp.parallel.placement
        rebalancer.rebalance()
        assert mlp.parallel.placement == placement
        received()
    assert redundant.traffic["exchange"] > 0 or four.position.rank > 0


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
