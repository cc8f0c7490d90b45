"""What ranks say to each other over gloo, and that no wait is for ever."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import astuple
from pathlib import Path

import torch

from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.parallel.mesh import MeshShape

PROGRAM = """
import os, sys, time, torch
from shoal.configs.errors import EngineDeadError
from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.parallel.mesh import MeshShape
from shoal.model_shards.parallel.mesh import MeshShape

rank, sizes, rendezvous = int(sys.argv[1]), [int(size) for size in sys.argv[2].split(",")], sys.argv[3]
mesh = MeshShape(*sizes[:4], bool(sizes[4]))
context = ParallelContext.connect(mesh.position(rank), rendezvous, torch.device("cpu"), 6.0)
"""

TENSOR_PARALLEL = """
mine = torch.tensor([[1.0, 2.0]]) * (rank + 1)
assert context.all_gather(mine).tolist() == [[1, 2, 2, 4]]
gathered = context.gather(mine)
assert (gathered is None) if rank else (gathered.tolist() == [[1, 2, 2, 4]])
assert context.all_reduce(mine).tolist() == [[3, 6]]
rows = torch.arange(10.0).view(5, 2)
context.begin_step(5, scatter_from=4)
share = context.sum_rows(rows * (rank + 1))
assert share.shape == (3, 2)  # the last of the second rank is padding
assert context.whole_rows(share).equal(3 * rows)
assert context.whole_rows(rows) is rows
for index in ([4, 0], [], [0, 1, 2, 3, 4]):  # few rows, none, and so many that all are gathered
    assert context.pick_rows(share, torch.tensor(index, dtype=torch.int64)).equal(3 * rows[index])
context.begin_step(3, scatter_from=4)
assert context.sum_rows(rows[:3] * (rank + 1)).equal(3 * rows[:3])
assert context.tell_all(["rank" * (rank + 1), rank]) == [["rank", 0], ["rankrank", 1]]
if rank == 0:
    for step in range(5):  # nobody waits for them yet
        context.send_tokens([step, step + 1])
else:
    assert [context.receive_tokens(2) for _ in range(5)] == [[i, i + 1] for i in range(5)]
print("agreed", flush=True)
if rank == 1:
    time.sleep(10)  # hangs, to the eyes of the other
    os._exit(0)
try:
    context.all_reduce(torch.zeros(1))
except EngineDeadError as error:
    print(error, flush=True)
os._exit(0)  # as ranks do: torch's own end may abort, or wait for the peer that is gone
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

ALL_AXES = """
ones = torch.ones(4, 3)
one_hot = lambda index, size: [int(i == index) for i in range(size)]
assert context.all_gather(torch.tensor([rank])).tolist() == ([0, 1] if rank < 2 else [2, 3])
assert context.all_gather(torch.tensor([rank]), axis="context").tolist() == [rank % 2, rank % 2 + 2]
assert context.all_gather(torch.tensor([rank]), axis="expert").tolist() == [0, 1, 2, 3]
assert context.reduce_scatter(torch.arange(4.0)[:, None] * (rank + 1), axis="expert").tolist() == [[10.0 * rank]]
assert context.shift(torch.tensor([rank])).tolist() == [(rank + 2) % 4]
assert context.shift(torch.tensor([rank]), axis="expert").tolist() == [(rank - 1) % 4]
# Rank r sends r rows to each rank: nothing comes from rank 0, which gets something from the others.
rows = context.all_to_all(torch.full((4 * rank, 2), float(rank)), [rank] * 4, [0, 1, 2, 3])
assert rows[:, 0].tolist() == [1, 2, 2, 3, 3, 3]
assert context.traffic["all_to_all"] == 3 * rank * 8
print("agreed", flush=True)
"""

DATA_PARALLEL = """
part = context.position.dp_rank
if context.position.samples:
    context.send_tokens([part])
else:
    assert context.receive_tokens(1) == [part]
    context.send_hidden(torch.full((1,), float(part)))
if context.position.is_last_stage:
    assert context.receive_hidden(torch.empty(1)).item() == part
print("agreed", flush=True)
"""


def sizes(mesh: MeshShape) -> str:
    return ",".join(str(int(value)) for value in astuple(mesh))


def run_ranks(program: str, mesh: MeshShape, directory: Path) -> list[str]:
    arguments = [sizes(mesh), f"file://{directory / 'rendezvous'}"]
    ranks = [
        subprocess.Popen([sys.executable, "-c", PROGRAM + program, str(rank), *arguments], stdout=subprocess.PIPE)
        for rank in range(mesh.world_size)
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
    first, second = run_ranks(TENSOR_PARALLEL, MeshShape(tp_size=2), tmp_path)
    assert second == "agreed\n"
    assert "rank 0 (tensor 0/2, stage 0/1): all-reduce failed; another rank is gone or hangs" in first


def test_stages_pass_hidden_states_on_and_tokens_back(tmp_path: Path) -> None:
    assert run_ranks(PIPELINE, MeshShape(pp_size=2), tmp_path) == ["agreed\n", "agreed\n"]


def test_each_axis_of_a_mesh_has_a_group_of_its_own(tmp_path: Path) -> None:
    assert run_ranks(ALL_AXES, MeshShape(2, 1, 1, 2, True), tmp_path) == ["agreed\n"] * 4


def test_each_data_parallel_part_has_tokens_of_its_own(tmp_path: Path) -> None:
    assert run_ranks(DATA_PARALLEL, MeshShape(1, 2, 2, 1, False), tmp_path) == ["agreed\n"] * 4


def test_a_world_of_one_sends_nothing() -> None:
    context = ParallelContext.single()
    x = torch.ones(2)
    assert context.all_reduce(x) is x
    assert context.all_gather(x) is x
    assert context.gather(x) is x
    context.send_tokens([1, 2])
    context.close()


def test_joining_a_group_that_never_forms_ends_with_the_deadline(tmp_path: Path) -> None:
    arguments = ["0", sizes(MeshShape(tp_size=2)), f"file://{tmp_path / 'rendezvous'}"]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, timeout=120, check=False)
    assert done.returncode == 1
    assert b"joining the other ranks failed" in done.stderr
