"""Context-parallel ranks as threads of one process: what they say to each other without processes or sockets."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

from shoal.model_shards.engine.plan import StepOutput, StepPlan
from shoal.model_shards.parallel.context import Axis, ParallelContext
from shoal.model_shards.parallel.mesh import MeshPosition, MeshShape
from shoal.model_shards.parallel.rows import StepRows
from shoal.model_shards.runner.model_runner import ModelRunner

T = TypeVar("T")
_TIMEOUT_S = 120.0


class _Meeting:
    """All ranks come together, each with a value, and leave with everyone's."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=_TIMEOUT_S)
        self.values: list[Any] = [None] * size

    def __call__(self, index: int, value: T) -> list[T]:
        self.values[index] = value
        self.barrier.wait()
        everyone = list(self.values)
        self.barrier.wait()
        return everyone


class ThreadContext(ParallelContext):
    """Of one of `size` ranks that share sequences."""

    def __init__(self, position: MeshPosition, meeting: _Meeting, tokens: list[queue.Queue[list[int]]]) -> None:
        self.position, self.meeting, self.tokens = position, meeting, tokens
        self.traffic, self.rows, self._groups = Counter(), StepRows(0, 0), None

    def _meet(self, axis: Axis, value: T) -> list[T]:
        assert axis == "context"
        return self.meeting(self.position.cp_rank, value)

    def start_shift(self, x: torch.Tensor, axis: Axis = "context") -> Callable[[], torch.Tensor]:
        everyone = self._meet(axis, x.clone())
        self.traffic["shift"] += x.nbytes
        return lambda: everyone[(self.position.cp_rank - 1) % len(everyone)]

    def all_gather(self, x: torch.Tensor, dim: int = -1, axis: Axis = "tensor") -> torch.Tensor:
        if axis == "tensor":
            return x
        return torch.cat(self._meet(axis, x.clone()), dim)

    def all_to_all(self, x: torch.Tensor, sent: list[int], received: list[int], axis: Axis = "expert") -> torch.Tensor:
        assert len(x) == sum(sent)
        parts = [each.split(counts)[self.position.cp_rank] for each, counts in self._meet(axis, (x.clone(), sent))]
        assert [len(part) for part in parts] == received
        return torch.cat(parts)

    def tell_all(self, message: T) -> list[T]:
        return self._meet("context", message)

    def send_tokens(self, token_ids: list[int]) -> None:
        for rank, tokens in enumerate(self.tokens):
            if rank != self.position.rank:
                tokens.put(token_ids)

    def receive_tokens(self, count: int) -> list[int]:
        tokens = self.tokens[self.position.rank].get(timeout=_TIMEOUT_S)
        assert len(tokens) == count
        return tokens


class ThreadRanks:
    """`call(work)` runs work(context) on every rank at once and returns what each gave, in their order."""

    def __init__(self, size: int) -> None:
        shape, self._meeting = MeshShape(cp_size=size), _Meeting(size)
        tokens: list[queue.Queue[list[int]]] = [queue.Queue() for _ in range(size)]
        self.contexts = [ThreadContext(position, self._meeting, tokens) for position in shape.positions()]
        self._threads = ThreadPoolExecutor(size)

    def call(self, work: Callable[[ThreadContext], T]) -> list[T]:
        def guarded(context: ThreadContext) -> T:
            try:
                with torch.inference_mode():
                    return work(context)
            except BaseException:
                self._meeting.barrier.abort()  # or the others would wait for this one
                raise

        futures = [self._threads.submit(guarded, context) for context in self.contexts]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]

    def close(self) -> None:
        self._threads.shutdown()


class ThreadRunners:
    """A `ModelRunner` on each rank."""

    def __init__(self, driver: ModuleType, path: Path, size: int, **changes: Any) -> None:
        self.settings = driver.settings_for(path, context_parallel_size=size, **changes)
        self.ranks = ThreadRanks(size)
        self.runners = self.ranks.call(lambda context: ModelRunner(self.settings, context))

    def execute(self, plan: StepPlan) -> StepOutput:
        outputs = self.ranks.call(lambda context: self.runners[context.position.rank].execute(plan))
        assert all(not output.token_ids for output in outputs[1:])
        return outputs[0]
