"""Programs of an NVIDIA GPU: CUDA graphs that share one pool of device memory.

A graph holds kernels with their arguments: nothing of the host runs when it is replayed, so whatever the host did while
it was captured (reading a number from the device, above all) would be missing. A rehearsal finds that out beforehand,
since a capture that the driver aborts leaves torch's allocator in the middle of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from shoal.kernels.capture import Capturer, Program

T = TypeVar("T")

_SYNCHRONIZING = "called a synchronizing CUDA operation"
"""What torch says of an operation that waits for the device, when told to refuse it."""


class CudaProgram(Program[T]):
    """`kept` is what the graph's kernels use and nobody else might keep."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: T, nbytes: int, kept: object) -> None:
        self.result = result
        self._graph, self._nbytes, self._kept = graph, nbytes, kept

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def replay(self) -> T:
        """Queues the graph on the current stream; does not wait for it."""
        self._graph.replay()
        return self.result


class CudaCapturer(Capturer):
    """Whatever else the captured function uses (weights, pages, inputs) must live as long as its program.

    All captures are made on one stream of its own: the pool's memory is bound to it, and the vendor's library keeps a
    workspace for each stream, which the rehearsal makes it allocate outside of the pool.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], T]) -> tuple[T, CudaProgram[T] | None]:
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        # This context, not that of torch.cuda.graph, is sure to bring the caller's stream back.
        with torch.cuda.stream(self._stream):
            self.refusal = self._rehearse(run)
            program = None if self.refusal is not None else self._record(run)
        caller.wait_stream(self._stream)
        return (run(), None) if program is None else (program.replay(), program)

    def _rehearse(self, run: Callable[[], T]) -> str | None:
        """Runs it twice: once so that kernels are compiled and libraries have chosen, once to see whether it waits for
        the device. Returns why it cannot be captured; what `run` raises of its own is raised."""
        run()
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        except RuntimeError as error:
            if _SYNCHRONIZING not in str(error):
                raise
            return f"it waits for the device while it runs ({_first_line(error)})"
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return None

    def _record(self, run: Callable[[], T]) -> CudaProgram[T] | None:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free_before, _ = torch.cuda.mem_get_info(self._device)
        try:
            # Other threads of the process (another engine's, a collective's watchdog) may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = run()
        except RuntimeError as error:  # the driver's refusals, and no memory left for the pool
            self.refusal = f"the driver did not capture it ({_first_line(error)})"
            return None
        free_after, _ = torch.cuda.mem_get_info(self._device)
        return CudaProgram(graph, result, max(0, free_before - free_after), run)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
