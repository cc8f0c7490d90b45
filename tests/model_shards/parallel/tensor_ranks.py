"""What the ranks of test_tensor_parallel.py do: `python tensor_ranks.py RANK DIRECTORY`, four of them.

DIRECTORY/jobs.pickle is a list of Jobs; each rank leaves DIRECTORY/RANK.pickle, name -> Result. The jobs of one mesh
follow each other: a mesh is joined once.
"""

from __future__ import annotations

import importlib.util
import pickle
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from shoal.configs.errors import ConfigError
from shoal.model_shards.engine.plan import StepOutput, StepPlan
from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.parallel.mesh import MeshShape
from shoal.model_shards.runner import loading
from shoal.model_shards.runner.model_runner import ModelRunner
from shoal.model_shards.sampling.params import SamplingParams
from shoal.model_shards.weights.checkpoint import ALL, Checkpoint
from shoal.model_shards.weights.open import open_checkpoint

PROMPTS = [[65, 66, 67], list(range(10, 60)), [200] * 17, [5, 9]]  # 72 rows: they divide by 2 and 4
NUM_TOKENS = 12

if "driver" not in sys.modules:
    spec = importlib.util.spec_from_file_location("driver", Path(__file__).parents[1] / "runner" / "driver.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["driver"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["driver"])
driver = sys.modules["driver"]


@dataclass
class Job:
    name: str
    paths: list[Path]
    """One for each rank, or one for all."""
    tp: int = 1
    pp: int = 1
    changes: dict[str, Any] = field(default_factory=dict)
    """Of the runner's settings."""
    sampling: list[SamplingParams] = field(default_factory=lambda: [SamplingParams(temperature=0.0)])
    """The prompts take them in turn."""


@dataclass
class Result:
    tokens: list[list[int]] = field(default_factory=list)
    """Of each prompt; of no rank but the sampling one."""
    logits: torch.Tensor | None = None
    """Of every row of the prompts' step, where the sampling rank computed them all."""
    alone: torch.Tensor | None = None
    """Of the second prompt, alone in its step; four ranks cannot share its 50 rows out evenly."""
    prefill: Counter[str] = field(default_factory=Counter)
    """Bytes sent in the step of all prompts, by operation."""
    decode: Counter[str] = field(default_factory=Counter)
    """The same in all later steps."""
    bytes_read: Counter[str] = field(default_factory=Counter)
    """Of each tensor of the checkpoint."""
    refused: str = ""
    took_s: float = 0.0


class CountingCheckpoint(Checkpoint):
    def __init__(self, inner: Checkpoint, bytes_read: Counter[str]) -> None:
        self.inner, self.bytes_read = inner, bytes_read
        self.path, self.config = inner.path, inner.config

    def names(self) -> frozenset[str]:
        return self.inner.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.inner.shape(name)

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL, cols: slice = ALL) -> torch.Tensor:
        values = self.inner.read(name, dtype, rows, cols)
        self.bytes_read[name] += values.nbytes
        return values


def run(job: Job, context: ParallelContext) -> Result:
    result = Result()
    path = job.paths[context.position.rank % len(job.paths)]
    changes = {"tensor_parallel_size": job.tp, "pipeline_parallel_size": job.pp, **job.changes}
    began = time.monotonic()
    with mock.patch.object(
        loading, "open_checkpoint", lambda *args: CountingCheckpoint(open_checkpoint(*args), result.bytes_read)
    ):
        try:
            runner = ModelRunner(driver.settings_for(path, **changes), context)
        except ConfigError as error:
            result.refused, result.took_s = error.message, time.monotonic() - began
            return result
    hidden = driver.watch_hidden(runner)
    plays = driver.Driver(runner.settings)
    drawn: dict[int, list[int]] = {seq_id: [] for seq_id in range(len(PROMPTS))}

    def execute(plan: StepPlan) -> None:
        plan.new = [replace(new, sampling=job.sampling[new.seq_id % len(job.sampling)]) for new in plan.new]
        output: StepOutput = runner.execute(plan)
        assert output.errors == {}, output.errors
        for seq_id, token_id in zip(output.seq_ids, output.token_ids, strict=True):
            drawn.setdefault(seq_id, []).append(token_id)

    context.traffic.clear()
    for plan in plays.prefill_plans(dict(enumerate(PROMPTS))):
        execute(plan)
    result.prefill = +context.traffic
    result.logits = logits_of(runner, hidden[-1])
    context.traffic.clear()
    lengths = {seq_id: len(tokens) + 1 for seq_id, tokens in enumerate(PROMPTS)}
    for _ in range(NUM_TOKENS - 1):
        execute(plays.decode_plan(lengths))
    result.decode = +context.traffic
    result.tokens = [drawn[seq_id] for seq_id in range(len(PROMPTS))] if runner.samples else []
    execute(replace(plays.prefill_plans({100: PROMPTS[1]})[0], removed=list(drawn)))
    result.alone = logits_of(runner, hidden[-1])
    while runner._unreceived:  # of the last steps; the next runner has the same way to its peers
        context.receive_tokens(len(runner._unreceived.popleft()))
    context.tell_all("done")  # the sampling rank may drop its sends now
    return result


def logits_of(runner: ModelRunner, hidden: torch.Tensor) -> torch.Tensor | None:
    """On every rank of the last stage at once."""
    if not runner.context.position.is_last_stage:
        return None
    with torch.inference_mode():
        return runner.model.logits(hidden)


def main(rank: int, directory: Path) -> None:
    torch.set_num_threads(1)
    jobs: list[Job] = pickle.loads((directory / "jobs.pickle").read_bytes())
    results: dict[str, Result] = {}
    for mesh in dict.fromkeys((job.tp, job.pp) for job in jobs):
        position = MeshShape(*mesh).position(rank)
        rendezvous = f"file://{directory / 'rendezvous'}-{mesh[0]}-{mesh[1]}"
        context = ParallelContext.connect(position, rendezvous, torch.device("cpu"), 60.0)
        for job in jobs:
            if (job.tp, job.pp) == mesh:
                results[job.name] = run(job, context)
        context.close()
    (directory / f"{rank}.pickle").write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    import tensor_ranks  # under its name: what is pickled is to be found there

    tensor_ranks.main(int(sys.argv[1]), Path(sys.argv[2]))
