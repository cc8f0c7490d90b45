"""What the ranks of test_moe_models.py do: `python model_ranks.py RANK RENDEZVOUS CASES`, four of them.

CASES is a JSON file: [{"name", "path", "expected" (tokens of one rank for each prompt), "skewed"}, ...]. The first two
ranks run each model with a slice of every expert and with whole experts, then all four with whole experts.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.model_shards.models.moe import parallel_experts
from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.parallel.mesh import MeshShape
from shoal.model_shards.runner.model_runner import ModelRunner

PROMPTS = [[65, 66, 67], list(range(10, 60)), [200] * 17, [5]]
NUM_TOKENS = 12

spec = importlib.util.spec_from_file_location("driver", Path(__file__).parents[1] / "runner" / "driver.py")
assert spec is not None
assert spec.loader is not None
driver = importlib.util.module_from_spec(spec)
sys.modules["driver"] = driver
spec.loader.exec_module(driver)


def generate(runner: ModelRunner) -> list[list[int]]:
    tokens: list[list[int]] = driver.generate(runner.execute, runner.settings, PROMPTS, NUM_TOKENS, chunk_size=16)
    runner.execute(driver.Driver(runner.settings).plan([], removed=list(range(len(PROMPTS)))))
    while runner._unreceived:  # of the last step; the next runner has the same way to its peers
        runner.context.receive_tokens(len(runner._unreceived.popleft()))
    runner.context.all_reduce(torch.zeros(1))  # the sampling rank may drop its sends now
    return tokens


class Case:
    def __init__(self, case: dict[str, Any]) -> None:
        self.name, self.expected = case["name"], case["expected"]
        self.settings = driver.settings_for(Path(case["path"]))

    def check(self, context: ParallelContext, **changes: Any) -> ModelRunner:
        shape = context.position.shape
        settings = replace(
            self.settings,
            tensor_parallel_size=shape.tp_size,
            expert_parallel=shape.expert_parallel,
            num_redundant_experts=shape.num_redundant_experts,
            **changes,
        )
        runner = ModelRunner(settings, context)
        self.check_tokens(runner)
        return runner

    def check_tokens(self, runner: ModelRunner) -> None:
        """Every rank samples what it must, and the others what reached them: nothing."""
        expected = self.expected if runner.samples else [[] for _ in PROMPTS]
        assert generate(runner) == expected, (self.name, runner.context.position.shape)


def imbalance(case: Case, runner: ModelRunner) -> float:
    """Rows that the busiest rank got over the mean, as counted while a generation runs; mean of the layers."""
    experts = parallel_experts(layer.mlp for layer in runner.model.layers)

    def received() -> torch.Tensor:
        return torch.tensor([[float(each.dispatch.rows["received"]) for each in experts]])

    before = received()
    case.check_tokens(runner)
    rows = runner.context.all_gather(received() - before, dim=0, axis="expert")
    return (rows.max(dim=0).values / rows.mean(dim=0)).mean().item()


def check_rebalancing(case: Case, context: ParallelContext) -> None:
    """In the middle of a generation, which runs on as if nothing had happened; the next is more even than one whose
    experts stay where they are."""
    moving = case.check(context, expert_rebalance_interval=5)
    staying = case.check(context)
    placements = [
        [each.placement for each in parallel_experts(layer.mlp for layer in runner.model.layers)]
        for runner in (moving, staying)
    ]
    assert all(moved != stayed for moved, stayed in zip(*placements, strict=True))
    assert staying.rebalancer is None
    even, crowded = imbalance(case, moving), imbalance(case, staying)
    assert even < 0.8 * crowded, (even, crowded)


def main(rank: int, rendezvous: str, cases: Path) -> None:
    torch.set_num_threads(1)
    shape = MeshShape(tp_size=4, expert_parallel=True)
    four = ParallelContext.connect(shape.position(rank), rendezvous, torch.device("cpu"), 30.0)
    assert four._groups is not None
    pair = dist.new_group([0, 1], backend="gloo")
    groups = replace(four._groups, tensor=pair, expert=pair, control=pair)
    for case in map(Case, json.loads(cases.read_text())):
        if rank < 2 and case.name != "skewed":
            for shape in (MeshShape(tp_size=2), MeshShape(tp_size=2, expert_parallel=True)):
                case.check(ParallelContext(shape.position(rank), groups))
        if case.name != "skewed":
            case.check(four)
        else:
            shape = MeshShape(tp_size=4, expert_parallel=True, num_redundant_experts=4)
            check_rebalancing(case, ParallelContext(shape.position(rank), four._groups))
    print("agreed", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
