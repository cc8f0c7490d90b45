"""The capturer for CUDA graphs against a stand-in for torch's graph, stream and memory calls: what happens in which
order, and what becomes of a function that cannot be captured. That graphs compute is for `tests/gpu/check.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.kernels.triton_ops.graphs import CudaCapturer

DEVICE = torch.device("cuda", 0)


class FakeCuda:
    """Notes every call. Work runs in its stream's name; a graph runs again what was run under it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.stream_name, self.capturing, self.sync_mode = "caller", False, "default"
        self.free = 1000
        self.recorded: list[Callable[[], None]] = []

    def work(self, what: str, *, waits: bool = False, needs: int = 0) -> None:
        if waits and self.sync_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation\nmore of it")
        if waits and self.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        if self.capturing:
            if needs > self.free:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
            self.free -= needs
            self.recorded.append(lambda: self.log.append(f"graph: {what}"))
        else:
            self.log.append(f"{self.stream_name}: {what}")

    def make_stream(self, device: Any) -> SimpleNamespace:
        return SimpleNamespace(name="side", wait_stream=lambda other: self.log.append(f"side waits for {other.name}"))

    def current_stream(self, device: Any = None) -> SimpleNamespace:
        name = self.stream_name
        return SimpleNamespace(name=name, wait_stream=lambda other: self.log.append(f"{name} waits for {other.name}"))

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.stream_name = self.stream_name, stream.name
        try:
            yield
        finally:
            self.stream_name = before

    @contextmanager
    def graph(self, graph: Any, *, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        """Like torch's, it does not bring the stream back when the end of a capture raises."""
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        self.stream_name, self.capturing, self.recorded = stream.name, True, []
        try:
            yield
        finally:
            self.capturing = False
        graph.recorded = self.recorded
        self.free -= 10

    def make_graph(self) -> Any:
        graph = SimpleNamespace(recorded=[])
        graph.replay = lambda: [again() for again in graph.recorded]
        return graph


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name, replacement in {
        "Stream": fake.make_stream,
        "current_stream": fake.current_stream,
        "stream": fake.stream,
        "graph": fake.graph,
        "CUDAGraph": fake.make_graph,
        "graph_pool_handle": lambda: "pool",
        "get_sync_debug_mode": lambda: fake.sync_mode,
        "set_sync_debug_mode": lambda mode: setattr(fake, "sync_mode", mode),
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device: (fake.free, 1000),
    }.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    return fake


def test_a_program_does_again_what_was_captured(cuda: FakeCuda) -> None:
    capturer = CudaCapturer(DEVICE)
    cuda.log.append("caller: before")

    def step() -> str:
        cuda.work("a", needs=100)
        cuda.work("b")
        return "result"

    result, program = capturer.capture(step)
    assert result == "result"
    assert program is not None
    rehearsals = ["side: a", "side: b"] * 2
    replay = ["graph: a", "graph: b"]
    assert cuda.log == ["caller: before", "side waits for caller", *rehearsals, "caller waits for side", *replay]
    assert program.nbytes == 110, "the pool's growth and the graph"
    assert program.replay() == "result"
    assert cuda.log[-2:] == replay
    assert capturer.refusal is None
    assert cuda.sync_mode == "default"


def test_what_waits_for_the_device_is_refused_before_it_is_captured(cuda: FakeCuda) -> None:
    capturer = CudaCapturer(DEVICE)
    result, program = capturer.capture(lambda: cuda.work("reads a number", waits=True) or "result")
    assert (result, program) == ("result", None)
    assert capturer.refusal == "it waits for the device while it runs (called a synchronizing CUDA operation)"
    assert cuda.log[-1] == "caller: reads a number", "the step itself ran, in the caller's stream"
    assert cuda.sync_mode == "default"
    _, program = capturer.capture(lambda: cuda.work("a"))
    assert program is not None
    assert capturer.refusal is None


def test_no_memory_for_the_pool_is_a_refusal(cuda: FakeCuda) -> None:
    capturer = CudaCapturer(DEVICE)
    _, program = capturer.capture(lambda: cuda.work("large", needs=5000))
    assert program is None
    assert capturer.refusal == "the driver did not capture it (CUDA out of memory. Tried to allocate)"
    assert cuda.log[-1] == "caller: large"


def test_errors_of_the_step_itself_are_raised(cuda: FakeCuda) -> None:
    def broken() -> None:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        CudaCapturer(DEVICE).capture(broken)
    assert cuda.stream_name == "caller"
    assert cuda.sync_mode == "default"
