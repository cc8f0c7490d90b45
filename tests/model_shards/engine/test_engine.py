"""The engine's loop and its output side, on ranks that compute nothing."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from shoal.configs.errors import ContextLengthError, EngineDeadError, InvalidRequestError, OverloadedError
from shoal.model_shards.engine.admission import AdmissionLimits
from shoal.model_shards.engine.engine import Engine, EngineSettings
from shoal.model_shards.engine.metrics import FinishedSequence, MetricsSink, StepStats
from shoal.model_shards.engine.request import FinishReason, RequestDelta

Make = Callable[..., Engine]


@pytest.fixture
def make(kit: ModuleType) -> Iterator[Make]:
    """make(hold=False, limits=..., **scheduler options) -> a started engine on fake ranks; shut down at the end."""
    engines: list[Engine] = []

    def build(
        *,
        hold: bool = False,
        limits: AdmissionLimits | None = None,
        metrics: MetricsSink | None = None,
        step_timeout_s: float = 20.0,
        depth: int = 2,
        start: bool = True,
        **options: Any,
    ) -> Engine:
        scheduler = kit.make_scheduler(**options)
        settings = EngineSettings("fake", limits or AdmissionLimits(1000, 100_000), step_timeout_s, depth)
        executor = kit.FakeExecutor(kit.ranks_for(scheduler), hold=hold)
        engines.append(Engine(executor, scheduler, kit.ByteTokenizer(), settings, metrics=metrics))
        if start:
            engines[-1].start()
        return engines[-1]

    yield build
    for engine in engines:
        engine._executor.release(1000)  # type: ignore[attr-defined]
        engine.shutdown()
        engine._scheduler.kv.check_integrity()
        assert engine.stats().kv_usage == 0


def wait_until(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


def test_a_request_gets_its_tokens_text_and_usage(kit: ModuleType, make: Make) -> None:
    engine, sink = make(), kit.Collector()
    request = kit.make_request("a", [1, 2, 3], max_tokens=20, ignore_eos=True, logprobs=0)
    engine.submit(request, sink)
    sink.wait("a")
    expected = kit.unbatched(request, 0, 20)
    assert sink.tokens("a") == expected
    assert sink.text("a") == bytes(expected).decode(errors="replace")
    assert sink.reason("a") is FinishReason.LENGTH
    assert sink.of("a")[-1].num_output_tokens == 20
    assert all([e.token_id for e in d.logprobs] == d.token_ids for d in sink.deltas)


def test_deltas_are_delivered_once_a_step_per_sink(kit: ModuleType, make: Make) -> None:
    engine, sink = make(), kit.Collector()
    for index in range(6):
        engine.submit(kit.make_request(str(index), [index], max_tokens=10, ignore_eos=True), sink)
    for index in range(6):
        sink.wait(str(index))
    assert len(sink.deltas) == 60
    assert sink.calls <= engine.stats().steps_total


def test_the_next_step_is_submitted_while_one_computes(kit: ModuleType, make: Make) -> None:
    engine, sink = make(hold=True), kit.Collector()
    engine.submit(kit.make_request("a", [1], max_tokens=5, ignore_eos=True), sink)
    wait_until(lambda: engine.stats().steps_total == 2)
    assert sink.deltas == []
    engine._executor.release(5)  # type: ignore[attr-defined]
    sink.wait("a")


def test_prompt_logprobs_come_with_the_first_delta(kit: ModuleType, make: Make) -> None:
    engine, sink = make(prefill_chunk_size=3), kit.Collector()
    for name, tokens in (("scored", 0), ("echoed", 2)):
        engine.submit(kit.make_request(name, range(8), max_tokens=tokens, prompt_logprobs=0, ignore_eos=True), sink)
        sink.wait(name)
        first = sink.of(name)[0].prompt_logprobs
        assert [entry and entry.token_id for entry in first] == [None, *range(1, 8)]
        assert all(delta.prompt_logprobs is None for delta in sink.of(name)[1:])
        assert len(sink.tokens(name)) == tokens
    engine.submit(kit.make_request("short", [5], max_tokens=1, prompt_logprobs=0), sink)
    sink.wait("short")
    assert sink.of("short")[0].prompt_logprobs == [None]


def test_a_stop_string_ends_the_sequence_and_usage_counts_the_token_that_completed_it(
    kit: ModuleType, make: Make
) -> None:
    engine, sink = make(), kit.Collector()
    request = kit.make_request("free", [9], max_tokens=40, ignore_eos=True)
    text = bytes(kit.unbatched(request, 0, 40)).decode()
    stop = text[11:14]
    end = text.index(stop) + 3
    engine.submit(kit.make_request("a", [9], max_tokens=40, ignore_eos=True, stop=(stop,)), sink)
    sink.wait("a")
    last = sink.of("a")[-1]
    assert sink.text("a") == text[: end - 3]
    assert (last.finish_reason, last.stop_reason, last.num_output_tokens) == (FinishReason.STOP, stop, end)
    assert len(sink.tokens("a")) == end
    wait_until(lambda: engine.stats().num_running == 0)


def test_a_stop_string_completed_by_the_last_allowed_token_is_a_stop(kit: ModuleType, make: Make) -> None:
    engine, sink = make(), kit.Collector()
    text = bytes(kit.unbatched(kit.make_request("x", [9], ignore_eos=True), 0, 8)).decode()
    engine.submit(kit.make_request("a", [9], max_tokens=8, ignore_eos=True, stop=(text[6:8],)), sink)
    sink.wait("a")
    assert sink.reason("a") is FinishReason.STOP


def test_n_samples_each_end_once(kit: ModuleType, make: Make) -> None:
    engine, sink = make(), kit.Collector()
    request = kit.make_request("a", range(10), n=5, max_tokens=6)
    engine.submit(request, sink)
    sink.wait("a", n=5)
    for index in range(5):
        assert sink.tokens("a", index) == kit.unbatched(request, index, 6)
        assert sink.reason("a", index) is not None


def test_bad_requests_are_refused_at_once_and_nothing_is_queued(kit: ModuleType, make: Make) -> None:
    engine, sink = make(max_model_len=64), kit.Collector()
    for error, param, request in (
        (InvalidRequestError, "prompt", kit.make_request("a", [kit.VOCAB])),
        (InvalidRequestError, "prompt", kit.make_request("a", [])),
        (InvalidRequestError, "temperature", kit.make_request("a", [1], temperature=-1.0)),
        (InvalidRequestError, "logit_bias", kit.make_request("a", [1], logit_bias={99999999: 5.0})),
        (InvalidRequestError, "max_tokens", kit.make_request("a", [1], max_tokens=0)),
        (ContextLengthError, "prompt", kit.make_request("a", [1] * 65, max_tokens=1)),
    ):
        with pytest.raises(error) as caught:
            engine.submit(request, sink)
        assert caught.value.param == param
    assert engine.stats().num_live_requests == 0
    engine.submit(kit.make_request("a", [1], max_tokens=5), sink)
    sink.wait("a")


def test_a_live_request_id_cannot_be_used_twice(kit: ModuleType, make: Make) -> None:
    engine, sink = make(hold=True), kit.Collector()
    engine.submit(kit.make_request("a", [1], max_tokens=1), sink)
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.submit(kit.make_request("a", [1]), sink)
    engine._executor.release()  # type: ignore[attr-defined]
    sink.wait("a")
    wait_until(lambda: engine.stats().num_live_requests == 0)
    engine._executor.release(20)  # type: ignore[attr-defined]
    engine.submit(kit.make_request("a", [2], max_tokens=1), sink)
    wait_until(lambda: len(sink.deltas) == 2)


def test_the_waiting_queue_is_bounded_by_requests_and_by_prompt_tokens(kit: ModuleType, make: Make) -> None:
    engine, sink = make(hold=True, max_num_seqs=1, limits=AdmissionLimits(3, 40)), kit.Collector()
    engine.submit(kit.make_request("running", [1]), sink)
    wait_until(lambda: engine.stats().num_running == 1 and engine.stats().waiting_prompt_tokens == 0)
    engine.submit(kit.make_request("long", [1] * 38), sink)
    with pytest.raises(OverloadedError, match="38 prompt tokens") as caught:
        engine.submit(kit.make_request("b", [1] * 3), sink)
    assert caught.value.retry_after_s >= 1
    engine.submit(kit.make_request("c", [1]), sink)
    with pytest.raises(OverloadedError):
        engine.submit(kit.make_request("d", [1], n=2), sink)
    engine.abort("long")
    engine._executor.release()  # type: ignore[attr-defined]
    sink.wait("long")
    engine.submit(kit.make_request("b", [1] * 3), sink)
    assert engine.stats().waiting_prompt_tokens == 4


@pytest.mark.parametrize("stage", ["waiting", "prefill", "decode", "held"])
def test_abort_at_every_stage_returns_the_blocks_within_a_step(kit: ModuleType, make: Make, stage: str) -> None:
    engine, sink = make(hold=True, prefill_chunk_size=4, max_num_seqs=2), kit.Collector()
    ranks = engine._executor
    n = 4 if stage == "held" else 1
    if stage == "waiting":
        for name in ("x", "y"):
            engine.submit(kit.make_request(name, [1], max_tokens=30, ignore_eos=True), sink)
    engine.submit(kit.make_request("a", range(12), n=n, max_tokens=30, ignore_eos=True), sink)
    wait_until(lambda: engine.stats().steps_total == 2)
    if stage in ("decode", "held"):
        ranks.release(5)  # type: ignore[attr-defined]
        wait_until(lambda: engine.stats().steps_total == 7)
    engine.abort("a")
    engine.abort("a")
    engine.abort("nobody")
    ranks.release()  # type: ignore[attr-defined]
    sink.wait("a", n=n)
    assert all(sink.reason("a", index) is FinishReason.ABORT for index in range(n))
    if stage != "waiting":
        assert engine.stats().kv_usage == 0
    ranks.release(100)  # type: ignore[attr-defined]
    if stage == "waiting":
        sink.wait("y")
    assert not [delta for delta in sink.of("a")[:-1] if delta.finish_reason]


def test_500_requests_with_100_random_aborts_leave_the_pool_free(kit: ModuleType, make: Make) -> None:
    rng = random.Random(5)
    engine, sink = make(num_blocks=60, max_model_len=100), kit.Collector()
    aborted = set(rng.sample(range(500), 100))
    requests = []
    for index in range(500):
        prompt = [rng.randrange(4) for _ in range(rng.randrange(1, 20))]
        request = kit.make_request(str(index), prompt, max_tokens=rng.randrange(1, 12), n=rng.choice([1, 1, 2]))
        requests.append(request)
        engine.submit(request, sink)
        if index in aborted:
            threading.Timer(rng.random() * 0.05, engine.abort, (str(index),)).start()
    for index, request in enumerate(requests):
        for sample in range(request.sampling.n):
            sink.wait(str(index), n=request.sampling.n, timeout=60)
            alone = kit.unbatched(request, sample, request.sampling.max_tokens)
            got = sink.tokens(str(index), sample)
            assert (
                got == alone if sink.reason(str(index), sample) is not FinishReason.ABORT else got == alone[: len(got)]
            )
    wait_until(lambda: engine.stats().num_live_requests == 0)
    stats = engine.stats()
    assert stats.kv_blocks_free == stats.kv_blocks
    assert sum(stats.finished_total.values()) == sum(request.sampling.n for request in requests)


def test_a_failed_sequence_ends_alone(kit: ModuleType, make: Make) -> None:
    engine, sink = make(start=False), kit.Collector()
    engine._executor.ranks.fail[0] = 3  # type: ignore[attr-defined]
    engine.start()
    engine.submit(kit.make_request("bad", [1], max_tokens=9, ignore_eos=True), sink)
    engine.submit(kit.make_request("good", [2], max_tokens=9, ignore_eos=True), sink)
    sink.wait("bad")
    sink.wait("good")
    assert (sink.reason("bad"), len(sink.tokens("bad"))) == (FinishReason.ERROR, 3)
    assert sink.of("bad")[-1].error == "it was told to fail"
    assert (sink.reason("good"), len(sink.tokens("good"))) == (FinishReason.LENGTH, 9)
    assert engine.healthy


def test_a_failed_step_ends_all_requests_with_the_reason_and_the_engine(kit: ModuleType, make: Make) -> None:
    engine, sink = make(start=False, max_num_seqs=2), kit.Collector()
    engine._executor.break_at = 3  # type: ignore[attr-defined]
    engine.start()
    for index in range(4):
        engine.submit(kit.make_request(str(index), [index], max_tokens=30, ignore_eos=True), sink)
    for index in range(4):
        sink.wait(str(index))
        assert sink.reason(str(index)) is FinishReason.ABORT
        assert "the ranks fell over" in sink.of(str(index))[-1].error
    assert not engine.healthy
    with pytest.raises(EngineDeadError, match="the ranks fell over"):
        engine.submit(kit.make_request("late", [1]), sink)


def test_a_step_that_hangs_makes_the_engine_unhealthy_and_then_dead(kit: ModuleType, make: Make) -> None:
    engine, sink = make(hold=True, step_timeout_s=0.2), kit.Collector()
    assert engine.healthy
    engine.submit(kit.make_request("a", [1]), sink)
    sink.wait("a")
    assert "hangs" in sink.of("a")[-1].error
    assert not engine.healthy


def test_shutdown_drains_then_ends_the_rest_with_an_error(kit: ModuleType, make: Make) -> None:
    engine, sink = make(), kit.Collector()
    engine.submit(kit.make_request("quick", [1], max_tokens=3), sink)
    engine.shutdown(drain_s=10)
    assert sink.reason("quick") in (FinishReason.STOP, FinishReason.LENGTH)
    with pytest.raises(EngineDeadError):
        engine.submit(kit.make_request("late", [1]), sink)

    engine = make(hold=True)
    engine.submit(kit.make_request("endless", [1], max_tokens=100, ignore_eos=True), sink)
    wait_until(lambda: engine.stats().steps_total == 2)
    stopper = threading.Thread(target=engine.shutdown, args=(0.1,))
    stopper.start()
    wait_until(lambda: engine._gate._closed is not None)
    with pytest.raises(OverloadedError, match="shutting down"):
        engine.submit(kit.make_request("late", [1]), sink)
    wait_until(lambda: engine._inbox.qsize() > 0)
    engine._executor.release()  # type: ignore[attr-defined]
    stopper.join()
    assert sink.reason("endless") is FinishReason.ABORT
    assert "shutting down" in sink.of("endless")[-1].error


def test_idle_means_asleep(kit: ModuleType, make: Make) -> None:
    engine, sink = make(), kit.Collector()
    engine.submit(kit.make_request("a", [1], max_tokens=2), sink)
    sink.wait("a")
    wait_until(lambda: engine.stats().num_live_requests == 0)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1
    assert engine.healthy


def test_a_broken_sink_loses_only_its_own_requests(kit: ModuleType, make: Make) -> None:
    class Broken:
        def deliver(self, deltas: list[RequestDelta]) -> None:
            raise OSError("gone")

    engine, sink = make(), kit.Collector()
    engine.submit(kit.make_request("lost", [1], max_tokens=400, ignore_eos=True), Broken())
    engine.submit(kit.make_request("kept", [2], max_tokens=20, ignore_eos=True), sink)
    sink.wait("kept")
    wait_until(lambda: engine.stats().num_live_requests == 0)
    assert engine.stats().finished_total == {FinishReason.ABORT: 1, FinishReason.LENGTH: 1}


def test_metrics_are_reported_and_can_never_hurt(kit: ModuleType, make: Make) -> None:
    class Recorder(MetricsSink):
        def __init__(self) -> None:
            self.started: list[float] = []
            self.ttft: list[float] = []
            self.gaps: list[float] = []
            self.finished: list[FinishedSequence] = []
            self.steps: list[StepStats] = []

        def request_started(self, queue_s: float) -> None:
            self.started.append(queue_s)

        def first_token(self, ttft_s: float) -> None:
            self.ttft.append(ttft_s)

        def inter_token(self, gaps_s: list[float]) -> None:
            self.gaps += gaps_s
            raise RuntimeError("a broken dashboard")

        def sequence_finished(self, sequence: FinishedSequence) -> None:
            self.finished.append(sequence)

        def step(self, stats: StepStats) -> None:
            self.steps.append(stats)

    recorder = Recorder()
    engine, sink = make(metrics=recorder), kit.Collector()
    engine.submit(kit.make_request("a", range(9), n=2, max_tokens=5, ignore_eos=True), sink)
    sink.wait("a", n=2)
    wait_until(lambda: len(recorder.finished) == 2)
    assert (len(recorder.started), len(recorder.ttft), len(recorder.gaps)) == (1, 2, 8)
    assert [(f.reason, f.num_prompt_tokens, f.num_output_tokens) for f in recorder.finished] == [
        (FinishReason.LENGTH, 9, 5)
    ] * 2
    assert all(0 <= f.decode_s <= f.e2e_s for f in recorder.finished)
    assert (recorder.steps[0].num_tokens, recorder.steps[0].num_prompt_tokens) == (9, 9)
    assert sum(stats.num_prompt_tokens for stats in recorder.steps) == 9
    assert all(stats.expected_s is None for stats in recorder.steps)
    assert all(0 <= stats.kv_usage <= 1 for stats in recorder.steps)


def test_where_steps_are_bounded_in_time_their_durations_are_learnt(kit: ModuleType, make: Make) -> None:
    class Recorder(MetricsSink):
        def __init__(self) -> None:
            self.steps: list[StepStats] = []

        def step(self, stats: StepStats) -> None:
            self.steps.append(stats)

    recorder = Recorder()
    engine, sink = make(metrics=recorder, target_s=0.05), kit.Collector()
    engine.submit(kit.make_request("a", range(9), max_tokens=60, ignore_eos=True), sink)
    sink.wait("a")
    wait_until(lambda: engine.stats().num_running == 0)
    expected = [stats.expected_s for stats in recorder.steps]
    assert all(expected)
    assert expected[0] > 0.01 > sorted(expected)[len(expected) // 2]  # fake ranks take no time
