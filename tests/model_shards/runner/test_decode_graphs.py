"""Decode steps by programs made at start-up give what the same steps give operator by operator. The capturer stands in
for CUDA graphs: it runs again what it captured."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from shoal.model_shards.engine.plan import StepOutput, StepPlan
from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.parallel.mesh import MeshPosition, MeshShape
from shoal.model_shards.runner.decode_graphs import DecodeGraphs
from shoal.model_shards.runner.device_inputs import DeviceInputs
from shoal.model_shards.runner.footprint import graph_sizes
from shoal.model_shards.runner.model_runner import ModelRunner
from shoal.model_shards.sampling.params import SamplingParams
from shoal.model_shards.sampling.sampler import Sampler, SampleResult

TinyCheckpoint = Callable[..., Path]
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, logprobs=3)


def without_programs(runner: ModelRunner) -> ModelRunner:
    runner.captured.run = lambda *_: None  # type: ignore[method-assign]
    return runner


def plans_of(driver: ModuleType, path: Path, sampling: SamplingParams = GREEDY) -> list[StepPlan]:
    """Prompts in chunks beside decodes, then decodes of 5, 4 and so on down to 1 sequence, over block borders."""
    plays = driver.Driver(driver.settings_for(path))
    prompts = {1: list(range(10, 60)), 2: [65, 66, 67], 3: [200] * 17, 4: [5], 5: list(range(40))}
    plans = plays.prefill_plans(prompts, 7, sampling)
    lengths = {seq_id: len(tokens) + 1 for seq_id, tokens in prompts.items()}
    plans += [plays.decode_plan(lengths) for _ in range(20)]
    for ending in (3, 1, 4, 5):
        del lengths[ending]
        plans.append(plays.decode_plan(lengths))
        plans[-1].removed.append(ending)
        plans += [plays.decode_plan(lengths) for _ in range(3)]
    return plans


def outputs(runner: ModelRunner, plans: list[StepPlan]) -> list[StepOutput]:
    return [runner.execute(plan) for plan in plans]


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma3", "qwen3_moe"])
def test_filled_up_steps_give_the_same(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType, family: str, sampling: SamplingParams
) -> None:
    path = tiny_checkpoint(family)
    plans = plans_of(driver, path, sampling)
    runner, eager = driver.with_graphs(driver.make_runner(path)), without_programs(driver.make_runner(path))
    assert outputs(runner, plans) == outputs(eager, plans)
    assert runner.captured.replays >= 35
    for mine, expected in zip(runner.pages, eager.pages, strict=True):
        torch.testing.assert_close(mine.k, expected.k, atol=0, rtol=0)
        torch.testing.assert_close(mine.v, expected.v, atol=0, rtol=0)


def test_start_up_and_filling_up_store_nothing(tiny_checkpoint: TinyCheckpoint, driver: ModuleType) -> None:
    """Of the pages, only the slots of live tokens are ever written; above all not the null block."""
    runner = driver.with_graphs(driver.make_runner(tiny_checkpoint("llama"), backend="reference", max_num_seqs=8))
    assert not any(pages.k.any() or pages.v.any() for pages in runner.pages)
    plays = driver.Driver(runner.settings)
    plan = plays.plan([plays.chunk(i, 0, 1, True) for i in range(3)], new=[plays.new(i, [7]) for i in range(3)])
    runner.execute(plan)
    assert runner.captured.replays == 1
    written = [block for chunk in plan.chunks for block in chunk.new_block_ids]
    for pages in runner.pages:
        blocks, slots = torch.nonzero(pages.k.flatten(2).any(-1), as_tuple=True)
        assert sorted(blocks.tolist()) == sorted(written)
        assert set(slots.tolist()) == {0}


def test_steps_that_are_no_decodes_run_by_themselves(tiny_checkpoint: TinyCheckpoint, driver: ModuleType) -> None:
    runner = driver.with_graphs(driver.make_runner(tiny_checkpoint("llama"), max_num_seqs=4))
    assert len(runner.captured) == len(graph_sizes(4))
    driver.generate(runner.execute, runner.settings, [[1, 2], [3, 4, 5]], 1)
    assert runner.captured.replays == 0


def test_a_refusal_leaves_no_program_and_says_why(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_checkpoint("llama")
    capturer = driver.Repeater(refuses=2)
    runner = driver.with_graphs(driver.make_runner(path), capturer)
    assert capturer.captures == 3
    assert len(runner.captured) == 0
    assert "of a reason" in caplog.text
    plans = plans_of(driver, path)
    assert outputs(runner, plans) == outputs(driver.make_runner(path), plans)
    assert runner.captured.replays == 0


def test_token_ids_beyond_the_vocabulary_are_refused(tiny_checkpoint: TinyCheckpoint, driver: ModuleType) -> None:
    runner = driver.with_graphs(driver.make_runner(tiny_checkpoint("llama")))
    plays = driver.Driver(runner.settings)
    with pytest.raises(IndexError, match="token id"):
        runner.execute(plays.plan([plays.chunk(1, 0, 1, True)], new=[plays.new(1, [1 << 30])]))


# --- several ranks ------------------------------------------------------------------------------------------------


class TwoRanks(ParallelContext):
    """Of two tensor-parallel ranks, as far as capturing asks: the other one captured `others` of the sizes."""

    def __init__(self, others: int, *, queues: bool = True, expert_parallel: bool = False) -> None:
        super().__init__(MeshPosition())
        self.position = MeshShape(tp_size=2, expert_parallel=expert_parallel).position(0)
        self._others, self._queues = others, queues

    @property
    def queues_sums(self) -> bool:
        return self._queues

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape == (1,):
            x += self._others > 0
            self._others -= 1
        return x


@pytest.mark.parametrize(("others", "programs"), [(100, 3), (2, 0)])
def test_ranks_of_a_stage_have_all_programs_or_none(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType, others: int, programs: int
) -> None:
    runner = driver.make_runner(tiny_checkpoint("llama"), max_num_seqs=4)
    runner.model.ops.capturer = lambda _: driver.Repeater()
    inputs = DeviceInputs(runner.settings, runner.config.vocab_size, runner.device)
    graphs = DecodeGraphs(runner.model, runner.pages, inputs, TwoRanks(others), [1, 2, 4])
    graphs.prepare()
    assert len(graphs) == programs


@pytest.mark.parametrize("context", [TwoRanks(9, queues=False), TwoRanks(9, expert_parallel=True)])
def test_what_waits_in_the_host_is_not_captured(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType, context: ParallelContext
) -> None:
    """Sums over gloo; and rows that travel to experts, whose numbers the host must know."""
    runner = driver.make_runner(tiny_checkpoint("llama"), max_num_seqs=4)
    capturer = driver.Repeater()
    runner.model.ops.capturer = lambda _: capturer
    inputs = DeviceInputs(runner.settings, runner.config.vocab_size, runner.device)
    DecodeGraphs(runner.model, runner.pages, inputs, context, [1, 2, 4]).prepare()
    assert capturer.captures == 0


class Pipe(ParallelContext):
    """One of two stages in one thread: what is sent lies in a queue until the other stage runs."""

    def __init__(self, stage: int, hidden: deque[torch.Tensor], tokens: deque[list[int]]) -> None:
        super().__init__(MeshPosition())
        self.position = MeshShape(pp_size=2).position(stage)
        self._hidden, self._tokens = hidden, tokens

    def tell_all(self, message: Any) -> list[Any]:
        return [message] * 2

    def send_hidden(self, hidden: torch.Tensor) -> None:
        self._hidden.append(hidden)

    def receive_hidden(self, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(self._hidden.popleft())

    def send_tokens(self, token_ids: list[int]) -> None:
        self._tokens.append(token_ids)

    def receive_tokens(self, count: int) -> list[int]:
        tokens = self._tokens.popleft()
        assert len(tokens) == count
        return tokens


def test_pipeline_stages_hand_on_what_programs_computed(tiny_checkpoint: TinyCheckpoint, driver: ModuleType) -> None:
    path = tiny_checkpoint("llama")
    settings = driver.settings_for(path, pipeline_parallel_size=2)
    hidden: deque[torch.Tensor] = deque()
    tokens: deque[list[int]] = deque()
    stages = [driver.with_graphs(ModelRunner(settings, Pipe(stage, hidden, tokens))) for stage in (0, 1)]
    plans = plans_of(driver, path)
    given = [[stage.execute(plan) for stage in stages][1] for plan in plans]
    assert given == outputs(driver.make_runner(path), plans)
    assert [stage.captured.replays > 30 for stage in stages] == [True, True]
    assert not hidden


# --- nothing of the device is read --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_model_part_of_a_step_reads_nothing_from_the_device(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """On the meta device tensors have no values: `.item()`, `.tolist()`, `.cpu()` and the like raise there. The Triton
    table runs as it would on a GPU, but for the launches themselves."""
    table = pytest.importorskip("shoal.kernels.triton_ops.table")
    launch = pytest.importorskip("shoal.kernels.triton_ops.launch")
    monkeypatch.setattr(table, "INTERPRETED", True)  # lets it be made for a device that is no GPU
    launches: list[Any] = []
    monkeypatch.setattr(launch.Launch, "run", lambda launched: launches.append(launched))
    monkeypatch.setattr(table.TritonOps, "capturer", lambda *_: driver.Repeater())

    def sample(self: Sampler, logits: torch.Tensor, states: list[Any]) -> SampleResult:
        assert logits.shape == (len(states), 320)
        assert logits.device.type == "meta"
        return SampleResult([5] * len(states), [None] * len(states))

    monkeypatch.setattr(Sampler, "sample", sample)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # only the registry still asks
    path = tiny_checkpoint(family)
    runner = driver.make_runner(path, device="meta", backend="triton", dtype=torch.bfloat16, max_num_seqs=8)
    assert len(runner.captured) == len(graph_sizes(8))
    launches.clear()
    for plan in plans_of(driver, path):
        assert runner.execute(plan).token_ids == [5] * sum(chunk.samples for chunk in plan.chunks)
    assert runner.captured.replays >= 35
    assert len(launches) > 35 * runner.config.num_layers
