"""Pipelines, in ticks: how busy stages are, how even steps, and what micro-batches do to latencies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import ModuleType
from typing import Any

import pytest

from shoal.model_shards.engine.admission import AdmissionLimits
from shoal.model_shards.engine.engine import Engine, EngineSettings
from shoal.model_shards.engine.plan import StepOutput, StepPlan
from shoal.model_shards.engine.request import FinishReason
from shoal.model_shards.executor.base import Executor


class TickFuture(Future[StepOutput]):
    """A step's result, which is there at a tick. Whoever waits for it lets the ticks pass until then."""

    def __init__(self, pipeline: TickPipeline, ends_at: int, output: StepOutput) -> None:
        super().__init__()
        self._pipeline, self._ends_at, self._output = pipeline, ends_at, output

    def result(self, timeout: float | None = None) -> StepOutput:
        self._pipeline.now = max(self._pipeline.now, self._ends_at)
        return self._output

    def done(self) -> bool:
        return self._pipeline.now >= self._ends_at

    def add_done_callback(self, callback: Callable[[Future[StepOutput]], object]) -> None:
        self.result()
        callback(self)


class TickPipeline(Executor):
    """Stages that take one tick a step, whatever is in it, one step after the other. The first one waits for tokens
    that are still on their way through the others. The engine takes no time."""

    def __init__(self, ranks: Any, vocab_size: int, stages: int) -> None:
        self.vocab_size = vocab_size
        self.ranks = ranks
        self.now = 0
        self.plans: list[StepPlan] = []
        self.busy: list[list[int]] = [[] for _ in range(stages)]
        """The ticks in which each stage worked."""
        self._drawn_at: dict[int, int] = {}

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        tick = self.now
        for chunk in plan.chunks:
            if chunk.num_tokens == 1:
                tick = max(tick, self._drawn_at.get(chunk.seq_id, 0))
        for worked in self.busy:
            tick = max(tick, worked[-1] + 1 if worked else 0)
            worked.append(tick)
            tick += 1
        self._drawn_at.update((chunk.seq_id, tick) for chunk in plan.chunks if chunk.samples)
        self.plans.append(plan)
        return TickFuture(self, tick, self.ranks.execute(plan))

    def close(self) -> None:
        pass

    def utilisation(self) -> float:
        """Without the first and the last tenth of the ticks: a pipeline fills and drains."""
        first, last = self.now // 10, self.now - self.now // 10
        return sum(first <= tick < last for worked in self.busy for tick in worked) / len(self.busy) / (last - first)


def run(kit: ModuleType, stages: int, micro_batches: int, requests: list[Any], **options: Any) -> TickPipeline:
    """All requests are there before the first step."""
    scheduler = kit.make_scheduler(micro_batches=micro_batches, max_num_seqs=16, num_blocks=1000, **options)
    pipeline = TickPipeline(kit.ranks_for(scheduler), kit.VOCAB, stages)
    settings = EngineSettings("ticks", AdmissionLimits(100, 10_000), 60.0, steps_in_flight=micro_batches + 1)
    engine, sink, all_there = (
        Engine(pipeline, scheduler, kit.ByteTokenizer(), settings),
        kit.Collector(),
        threading.Event(),
    )
    engine.start()
    engine._inbox.put(all_there.wait)
    for request in requests:
        engine.submit(request, sink)
    all_there.set()
    for request in requests:
        sink.wait(request.request_id)
        assert sink.reason(request.request_id) is FinishReason.LENGTH
        assert sink.tokens(request.request_id) == kit.unbatched(request, 0, request.sampling.max_tokens)
    engine.shutdown()
    scheduler.kv.check_integrity()
    return pipeline


def streams(kit: ModuleType, count: int, max_tokens: int) -> list[Any]:
    return [kit.make_request(f"r{i}", [i], max_tokens=max_tokens, ignore_eos=True) for i in range(count)]


@pytest.mark.parametrize(("stages", "micro_batches"), [(p, m) for p in (2, 3, 4) for m in range(1, p + 2)])
def test_stages_are_busy_for_min_of_1_and_m_over_p(kit: ModuleType, stages: int, micro_batches: int) -> None:
    pipeline = run(kit, stages, micro_batches, streams(kit, 2 * micro_batches, 60))
    assert pipeline.utilisation() == pytest.approx(min(1.0, micro_batches / stages), rel=0.05)
    steady = pipeline.plans[4 * micro_batches : -4 * micro_batches]
    assert all(len(plan.chunks) == 2 for plan in steady)
    # A token every max(p, m) ticks.
    assert pipeline.now == pytest.approx(60 * max(stages, micro_batches), rel=0.1)


@pytest.mark.parametrize(("count", "sizes"), [(7, {2, 1}), (9, {3, 2}), (3, {1})])
def test_micro_batches_differ_by_one_sequence_at_most(kit: ModuleType, count: int, sizes: set[int]) -> None:
    pipeline = run(kit, 4, 4, streams(kit, count, 40))
    steady = pipeline.plans[16:-16]
    assert {len(plan.chunks) for plan in steady} == sizes
    assert pipeline.utilisation() == pytest.approx(min(1.0, count / 4), rel=0.05)


def test_micro_batches_become_even_again_when_one_of_them_ends(kit: ModuleType) -> None:
    """Two of four sequences end, and they are both in one micro-batch."""
    requests = streams(kit, 4, 100)
    for i in (0, 1):
        requests[i] = kit.make_request(f"r{i}", [i], max_tokens=20, ignore_eos=True)
    pipeline = run(kit, 2, 2, requests)
    assert [len(plan.chunks) for plan in pipeline.plans[10:20]] == [2] * 10
    assert [len(plan.chunks) for plan in pipeline.plans[60:-10]] == [1] * (len(pipeline.plans) - 70)
    assert pipeline.utilisation() > 0.95


def test_pieces_of_a_prompt_run_in_all_stages_at_once(kit: ModuleType) -> None:
    """They need no drawn token of each other, so each stage has one of them."""
    prompt = kit.make_request("long", [i % 50 for i in range(320)], max_tokens=1)
    pipeline = run(kit, 4, 4, [prompt])
    pieces = [plan.num_tokens for plan in pipeline.plans]
    assert sum(pieces) == 320
    assert max(pieces) == 64  # the budget
    assert pieces == sorted(pieces, reverse=True)
    assert pieces[-1] <= 8
    assert pipeline.now == len(pieces) + 3


def test_a_request_starts_beside_what_is_in_the_pipeline(kit: ModuleType) -> None:
    """One sequence leaves most stages idle: who comes meanwhile does not wait for its step to end."""
    scheduler = kit.make_scheduler(micro_batches=4)
    ranks = kit.ranks_for(scheduler)
    executor = kit.FakeExecutor(ranks, hold=True)
    settings = EngineSettings("held", AdmissionLimits(100, 10_000), 60.0, steps_in_flight=5)
    engine, sink = Engine(executor, scheduler, kit.ByteTokenizer(), settings), kit.Collector()
    submitted: list[StepPlan] = []
    second_there = threading.Event()
    submit = executor.submit

    def watched(plan: StepPlan) -> Future[StepOutput]:
        submitted.append(plan)
        if len(submitted) == 2:
            second_there.set()
        return submit(plan)

    executor.submit = watched
    engine.start()
    engine.submit(kit.make_request("first", [1, 2], ignore_eos=True), sink)
    while not submitted:
        threading.Event().wait(0.01)
    engine.submit(kit.make_request("second", [3, 4], ignore_eos=True), sink)
    assert second_there.wait(10), "it waited for the first step, which never ends"
    assert [chunk.seq_id for chunk in submitted[1].chunks] == [1]
    executor.release(1000)
    sink.wait("first")
    sink.wait("second")
    engine.shutdown()


def test_a_pipeline_decodes_faster_with_as_many_micro_batches_as_stages(sim: ModuleType) -> None:
    """Under a load of prompts and decodes, with a host that takes time. One more micro-batch keeps stages busier, but
    with smaller steps: weights are read once more for the same tokens."""

    def loaded(micro_batches: int) -> Any:
        simulation = sim.Simulation(
            sim.BF16, stages=4, host_s=0.001, micro_batches=micro_batches, target_s=0.08 / micro_batches,
            max_num_batched_tokens=256,
        )  # fmt: skip
        sim.closed_loop(simulation, 32, 96, 168, 128, "")
        simulation.run()
        assert len(simulation.done) == 96
        return simulation

    one, four, five = loaded(1), loaded(4), loaded(5)
    assert one.utilisation == pytest.approx(0.25, rel=0.01)
    assert four.utilisation > 0.9
    assert four.tokens_per_s() > 2.8 * one.tokens_per_s()
    assert four.tokens_per_s() > five.tokens_per_s()
    gaps = [sim.percentile([gap for client in s.done for gap in client.gaps], 0.5) for s in (one, four)]
    assert gaps[1] < 0.5 * gaps[0]
