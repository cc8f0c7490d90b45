"""One rank in this process: order, failure, end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from shoal.configs.errors import EngineDeadError, ModelLoadError
from shoal.model_shards.engine.plan import ScheduledChunk, StepOutput, StepPlan
from shoal.model_shards.executor import local
from shoal.model_shards.executor.local import LocalExecutor
from shoal.model_shards.runner.model_runner import ModelRunner


@pytest.fixture
def executor(tiny_checkpoint: Callable[..., Path], driver: ModuleType) -> Iterator[LocalExecutor]:
    executor = LocalExecutor(driver.settings_for(tiny_checkpoint("llama")))
    yield executor
    executor.close()


def test_plans_may_be_made_before_the_tokens_before_them_are_known(executor: LocalExecutor, driver: ModuleType) -> None:
    settings = driver.settings_for(Path("unused"))
    plays = driver.Driver(settings)
    plans = plays.prefill_plans({1: [65, 66, 67]})
    lengths = {1: 4}
    plans += [plays.decode_plan(lengths) for _ in range(9)]
    ahead = [future.result(60).token_ids for future in [executor.submit(plan) for plan in plans]]

    def execute(plan: StepPlan) -> object:
        return executor.submit(plan).result(60)

    executor.submit(StepPlan(99, removed=[1])).result(60)
    plans = driver.generate(execute, settings, [[65, 66, 67]], 10)
    assert [tokens[0] for tokens in ahead] == plans[0]
    assert executor.vocab_size == 320


def test_a_failed_step_fails_all_that_follow(executor: LocalExecutor) -> None:
    unknown = executor.submit(StepPlan(0, chunks=[ScheduledChunk(5, 0, 1, [], True)]))
    with pytest.raises(KeyError):
        unknown.result(60)
    with pytest.raises(EngineDeadError, match="An earlier step failed"):
        executor.submit(StepPlan(1)).result(60)


def test_a_closed_executor_fails_what_comes_later_and_leaves_no_thread(
    tiny_checkpoint: Callable[..., Path], driver: ModuleType
) -> None:
    before = threading.active_count()
    executor = LocalExecutor(driver.settings_for(tiny_checkpoint("llama")))
    executor.close()
    executor.close()
    with pytest.raises(EngineDeadError, match="closed"):
        executor.submit(StepPlan(0)).result(1)
    assert threading.active_count() == before


def test_a_checkpoint_that_cannot_be_loaded_raises_at_once(driver: ModuleType, tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(ModelLoadError):
        LocalExecutor(driver.settings_for(tmp_path))
    assert threading.active_count() == before


class Hang:
    """Steps hang from `begun` until `go_on`."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def execute(self, plan: StepPlan) -> StepOutput:
        self.begun.set()
        assert self.go_on.wait(60)
        return StepOutput(plan.step_id)


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    hang = Hang()
    monkeypatch.setattr(ModelRunner, "execute", lambda _, plan: hang.execute(plan))
    yield hang
    hang.go_on.set()


def test_closing_does_not_wait_for_ever_for_a_step_that_hangs(
    tiny_checkpoint: Callable[..., Path],
    driver: ModuleType,
    hang: Hang,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(local, "CLOSE_TIMEOUT_S", 0.2)
    executor = LocalExecutor(driver.settings_for(tiny_checkpoint("llama")))
    under_way, waiting = executor.submit(StepPlan(0)), executor.submit(StepPlan(1))
    assert hang.begun.wait(60)
    executor.close()
    assert "has not ended within 0.2 s" in caplog.text
    for future in (under_way, waiting):
        with pytest.raises(EngineDeadError, match="closed before the step ended"):
            future.result(0)
    hang.go_on.set()
    executor._thread.join(60)
    assert not executor._thread.is_alive(), "it ends as soon as it can"
    assert under_way.exception(0) is not None, "what it gave at last is nobody's"


def test_the_step_under_way_may_end_while_the_executor_closes(
    tiny_checkpoint: Callable[..., Path], driver: ModuleType, hang: Hang
) -> None:
    executor = LocalExecutor(driver.settings_for(tiny_checkpoint("llama")))
    under_way, waiting = executor.submit(StepPlan(0)), executor.submit(StepPlan(1))
    assert hang.begun.wait(60)
    threading.Timer(0.1, hang.go_on.set).start()
    executor.close()
    assert under_way.result(0).step_id == 0
    with pytest.raises(EngineDeadError, match="closed"):
        waiting.result(0)
