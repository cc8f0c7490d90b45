"""What ranks say to each other over gloo, and that no wait is for ever."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from shoal.model_shards.parallel.context import ParallelContext

PROGRAM = """
import sys, time, torch
from shoal.configs.errors import EngineDeadError
from shoal.model_shards.parallel.context import MeshPosition, ParallelContext

rank, mesh, rendezvous = int(sys.argv[1]), (int(sys.argv[2]), int(sys.argv[3])), sys.argv[4]
context = ParallelContext.connect(MeshPosition.of_rank(rank, *mesh), rendezvous, torch.device("cpu"), 3.0)
"""

TENSOR_PARALLEL = """
mine = torch.tensor([[1.0, 2.0]]) * (rank + 1)
assert context.all_gather(mine).tolist() == [[1, 2, 2, 4]]
gathered = context.gather(mine)
assert (gathered is None) if rank else (gathered.tolist() == [[1, 2, 2, 4]])
assert context.all_reduce(mine).tolist() == [[3, 6]]
if rank == 0:
    for step in range(5):  # nobody waits for them yet
        context.send_tokens([step, step + 1])
else:
    assert [context.receive_tokens(2) for _ in range(5)] == [[i, i + 1] for i in range(5)]
print("agreed", flush=True)
if rank == 1:
    time.sleep(6)  # hangs, to the eyes of the other
    sys.exit(0)
try:
    context.all_reduce(torch.zeros(1))
except EngineDeadError as error:
    print(error, flush=True)
"""

PIPELINE = """
if rank == 0:
    for step in range(3):
        context.send_hidden(torch.full((2, 4), float(step)))
    assert context.receive_tokens(1) == [7]
else:
    context.send_tokens([7])  # before it has taken anything: no cycle of waits
    for step in range(3):
        assert context.receive_hidden(torch.empty(2, 4)).unique().tolist() == [step]
print("agreed", flush=True)
"""


def run_ranks(program: str, mesh: tuple[int, int], directory: Path) -> list[str]:
    arguments = [*map(str, mesh), f"file://{directory / 'rendezvous'}"]
    ranks = [
        subprocess.Popen([sys.executable, "-c", PROGRAM + program, str(rank), *arguments], stdout=subprocess.PIPE)
        for rank in range(mesh[0] * mesh[1])
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), outputs
    return outputs


def test_tensor_parallel_ranks_agree_and_a_hanging_one_is_named(tmp_path: Path) -> None:
    first, second = run_ranks(TENSOR_PARALLEL, (2, 1), tmp_path)
    assert second == "agreed\n"
    assert "rank 0 (tensor 0/2, stage 0/1): all-reduce failed; another rank is gone or hangs" in first


def test_stages_pass_hidden_states_on_and_tokens_back(tmp_path: Path) -> None:
    assert run_ranks(PIPELINE, (1, 2), tmp_path) == ["agreed\n", "agreed\n"]


def test_a_world_of_one_sends_nothing() -> None:
    context = ParallelContext.single()
    x = torch.ones(2)
    assert context.all_reduce(x) is x
    assert context.all_gather(x) is x
    assert context.gather(x) is x
    context.send_tokens([1, 2])
    context.close()


def test_joining_a_group_that_never_forms_ends_with_the_deadline(tmp_path: Path) -> None:
    arguments = ["0", "2", "1", f"file://{tmp_path / 'rendezvous'}"]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, timeout=120, check=False)
    assert done.returncode == 1
    assert b"joining the other ranks failed" in done.stderr
