"""What breaks inside the engine ends as little as possible, and nobody is left waiting."""

from __future__ import annotations

import gc
import weakref
from types import ModuleType
from typing import Any

import pytest

from shoal.configs.errors import EngineDeadError, OverloadedError
from shoal.model_shards.engine.admission import AdmissionGate, AdmissionLimits
from shoal.model_shards.engine.engine import Engine, EngineSettings
from shoal.model_shards.engine.request import FinishReason


def make_engine(kit: ModuleType, tokenizer: Any = None) -> Engine:
    scheduler = kit.make_scheduler()
    executor = kit.FakeExecutor(kit.ranks_for(scheduler))
    settings = EngineSettings("fake", AdmissionLimits(100, 10_000), step_timeout_s=20.0)
    engine = Engine(executor, scheduler, tokenizer or kit.ByteTokenizer(), settings)
    engine.start()
    return engine


def test_every_sink_is_told_when_the_engine_dies_with_a_broken_scheduler(
    kit: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, sink = make_engine(kit), kit.Collector()

    def broken(*_: object) -> None:
        raise AssertionError("the scheduler's state is broken")

    monkeypatch.setattr(engine._scheduler, "commit", broken)
    monkeypatch.setattr(engine._scheduler, "abort", broken)
    engine.submit(kit.make_request("a", [1, 2, 3]), sink)
    sink.wait("a", timeout=5.0)
    assert sink.reason("a") is FinishReason.ABORT
    assert not engine.healthy
    engine.shutdown()


def test_a_token_that_breaks_the_tokenizer_ends_its_own_sequence_only(kit: ModuleType) -> None:
    good, bad = (kit.make_request(name, [seed], seed=seed, ignore_eos=True) for name, seed in (("good", 0), ("bad", 1)))
    fatal = next(token for token in kit.unbatched(bad, 0, 8)[1:] if token not in kit.unbatched(good, 0, 8))

    class Tokenizer(kit.ByteTokenizer):  # type: ignore[name-defined, misc]
        def token_bytes(self, token_id: int) -> bytes:
            if token_id == fatal:
                raise KeyError(token_id)
            return bytes(super().token_bytes(token_id))

    engine, sink = make_engine(kit, Tokenizer()), kit.Collector()
    engine.submit(good, sink)
    engine.submit(bad, sink)
    sink.wait("good")
    sink.wait("bad")
    assert (sink.reason("good"), sink.reason("bad")) == (FinishReason.LENGTH, FinishReason.ERROR)
    assert sink.tokens("good") == kit.unbatched(good, 0, 8)
    assert "KeyError" in sink.of("bad")[-1].error
    assert engine.healthy
    engine.shutdown()
    assert engine.stats().kv_usage == 0


def test_ranks_that_died_while_idle_make_the_engine_unhealthy(kit: ModuleType) -> None:
    engine = make_engine(kit)
    assert engine.healthy
    engine._executor.failure = EngineDeadError("a rank was killed")
    assert not engine.healthy
    engine.shutdown()


@pytest.mark.parametrize(("close", "error"), [("close_for_shutdown", OverloadedError), ("dead", EngineDeadError)])
def test_a_closed_gate_keeps_nothing_of_those_it_refuses(kit: ModuleType, close: str, error: type[Exception]) -> None:
    class Thing:
        pass

    gate = AdmissionGate(AdmissionLimits(1, 1))
    gate.close_for_shutdown() if close == "close_for_shutdown" else gate.close_for_death("dead")
    kept: list[weakref.ref[Thing]] = []

    def refused() -> None:
        thing = Thing()  # stands for the request in the caller's frame
        kept.append(weakref.ref(thing))
        with pytest.raises(error):
            gate.enter(kit.make_request("a", [1]))

    for _ in range(3):
        refused()
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3
