"""Programs of the CPU: the native calls of a step, recorded with their arguments and replayed by one native call.

While a function is captured, every call of the native unit is noted and made, and torch is watched: views are free,
new tensors come from the capturer's pool, the few computations that models leave to torch have native twins with the
same bits, and anything else refuses the capture. So a program does exactly what was seen, or there is none.

A new native function can be in programs once its .cpp file says SHOAL_REPLAYABLE(name).
"""

from __future__ import annotations

import ctypes
import math
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.kernels.capture import Capturer, Program
from shoal.kernels.cpu.native import Native

T = TypeVar("T")

ALIGNMENT = 64
aten = torch.ops.aten

_capturing = threading.Lock()
"""The native unit is the process's; one capture at a time wraps its functions."""


class CpuProgram(Program[T]):
    """`kept`: what the recorded addresses point into, beyond the pool."""

    def __init__(self, native: Native, recording: _Recording, result: T, kept: object) -> None:
        self.result = result
        self._words = np.array(recording.words, dtype=np.uint64)
        self._run, self._address, self.num_steps = native.run_program, self._words.ctypes.data, recording.num_steps
        self._kept = (kept, recording.kept)

    @property
    def nbytes(self) -> int:
        return self._words.nbytes

    def replay(self) -> T:
        self._run(self._address, self.num_steps)
        return self.result


class CpuCapturer(Capturer):
    """Whatever else the captured function uses (weights, pages, inputs) must live as long as the function itself.
    Threads are those of the time of the capture; results do not depend on their number."""

    def __init__(self, native: Native, pool_bytes: int) -> None:
        self._native = native
        # Pages that no program reaches are never touched, and so take no memory.
        self._memory: npt.NDArray[np.uint8] = np.empty(pool_bytes + ALIGNMENT, dtype=np.uint8)

    def capture(self, run: Callable[[], T]) -> tuple[T, CpuProgram[T] | None]:
        pool, recording = _Pool(self._memory), _Recording()
        with _capturing, recording.of(self._native), _Watch(self._native, pool, recording):
            result = run()
        held = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves(result) if torch.is_tensor(tensor)}
        if not pool.addresses() <= held:
            recording.refuse("a tensor outlives the step without being its result")
        self.refusal = recording.refusal
        if self.refusal is not None:
            return result, None
        return result, CpuProgram(self._native, recording, result, (run, self._memory))


class _Recording:
    """Native calls as words: | address | number of words | words |, one after the other."""

    def __init__(self) -> None:
        self.words: list[int] = []
        self.num_steps = 0
        self.kept: list[object] = []
        self.refusal: str | None = None
        self._thread = threading.get_ident()

    def refuse(self, reason: str) -> None:
        self.refusal = self.refusal or reason

    @contextmanager
    def of(self, native: Native) -> Iterator[None]:
        """Notes this thread's calls of the native unit; those of other threads pass by."""
        plain = {name: getattr(native, name) for name in native.signatures}
        for name, function in plain.items():
            setattr(native, name, self._noted(native, name, function))
        try:
            yield
        finally:
            for name, function in plain.items():
                setattr(native, name, function)

    def _noted(self, native: Native, name: str, function: Callable[..., None]) -> Callable[..., None]:
        def noted(*arguments: Any) -> None:
            if threading.get_ident() == self._thread:
                self._note(native, name, arguments)
            function(*arguments)

        return noted

    def _note(self, native: Native, name: str, arguments: tuple[Any, ...]) -> None:
        address = native.replayable.get(name)
        if address is None:
            return self.refuse(f"the native function {name} cannot be replayed")
        types = native.signatures[name]
        words = [self._word(kind, value) for kind, value in zip(types, arguments, strict=True)]
        self.words += [address, len(words), *words]
        self.num_steps += 1

    def _word(self, kind: type, value: Any) -> int:
        if kind is ctypes.c_float:
            return int.from_bytes(struct.pack("=f", value), "little")
        if isinstance(value, ctypes.Array):  # made for this call: it has to stay
            self.kept.append(value)
            value = ctypes.addressof(value)
        return int(value or 0) & 0xFFFFFFFFFFFFFFFF


class _Pool:
    """Tensors within one piece of memory. One that dies while the step is captured makes room for the next: a replay
    overwrites it at the same point. First fit; a step holds ten or so at once."""

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        start = -memory.ctypes.data % ALIGNMENT
        self._memory = memory[start : len(memory) - ALIGNMENT + start]
        self._live: dict[int, tuple[int, weakref.ref[npt.NDArray[np.uint8]]]] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """None: it does not fit."""
        count = math.prod(shape)
        size = max(1, -(-count * dtype.itemsize // ALIGNMENT)) * ALIGNMENT
        offset = 0
        for begin in sorted(self._live):
            if offset + size <= begin:
                break
            offset = begin + self._live[begin][0]
        if offset + size > len(self._memory):
            return None
        # The tensor's storage holds this array, and the array is freed with it, whatever views were made of it.
        array = self._memory[offset : offset + count * dtype.itemsize]
        live = self._live
        live[offset] = (size, weakref.ref(array, lambda _: live.pop(offset)))
        return torch.from_numpy(array).view(dtype).view(shape)

    def addresses(self) -> set[int]:
        return {self._memory.ctypes.data + offset for offset in self._live}


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of torch, also those inside the operators."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: else torch imports torch._dynamo to keep it out, more than a second in the middle of somebody's step."""
        return False

    def __init__(self, native: Native, pool: _Pool, recording: _Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._native, self._pool, self._recording = native, pool, recording
        self._twins: dict[Any, Callable[..., torch.Tensor | None]] = {
            aten.empty.memory_format: self._empty,
            aten.add.Tensor: self._add,
            aten.mul.Tensor: self._scale,
            aten.embedding.default: self._embedding,
            aten.to.dtype: self._widen,
            aten._to_copy.default: self._widen,
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        twin = self._twins.get(func)
        result = None if twin is None else twin(*args, **kwargs)
        if result is not None:
            return result
        result = func(*args, **kwargs)
        if func._schema.is_mutable or not _is_view(result, args) or func is aten.lift_fresh.default:
            self._recording.refuse(f"torch's {func} cannot be replayed")
        return result

    # Each twin gives torch's result, or None where it is not made for the arguments.

    def _empty(
        self,
        size: Any,
        *,
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: bool | None = None,
        memory_format: Any = None,
    ) -> torch.Tensor | None:
        plain = layout in (None, torch.strided) and memory_format in (None, torch.contiguous_format)
        if not plain or pin_memory or device not in (None, torch.device("cpu")):
            return None
        return self._pool.empty(tuple(size), dtype or torch.get_default_dtype())

    def _add(self, a: Any, b: Any, **options: Any) -> torch.Tensor | None:
        if options or not (_is_plain(a) and _is_plain(b) and a.shape == b.shape):
            return None
        out = self._pool.empty(tuple(a.shape), torch.float32)
        if out is not None:
            self._native.add(a.data_ptr(), b.data_ptr(), out.data_ptr(), out.numel())
        return out

    def _scale(self, x: Any, factor: Any) -> torch.Tensor | None:
        if not (_is_plain(x) and isinstance(factor, int | float)):
            return None
        out = self._pool.empty(tuple(x.shape), torch.float32)
        if out is not None:
            self._native.scale(x.data_ptr(), factor, out.data_ptr(), out.numel())
        return out

    def _embedding(self, table: Any, index: Any, padding_idx: int = -1, *options: Any) -> torch.Tensor | None:
        if not (_is_plain(table, table.dtype) and table.itemsize in (2, 4) and _is_plain(index, torch.int64)):
            return None
        width = table.shape[1]
        out = self._pool.empty((*index.shape, width), table.dtype)
        if out is not None:
            self._native.take_rows(
                table.data_ptr(), table.itemsize, width, index.data_ptr(), index.numel(), out.data_ptr()
            )
        return out

    def _widen(self, x: Any, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor | None:
        options = {name: value for name, value in options.items() if value}
        if options or dtype != torch.float32 or not _is_plain(x, torch.bfloat16):
            return None
        out = self._pool.empty(tuple(x.shape), torch.float32)
        if out is not None:
            self._native.widen(x.data_ptr(), out.data_ptr(), out.numel())
        return out


def _is_plain(x: Any, dtype: torch.dtype = torch.float32) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype == dtype and x.is_contiguous() and x.device.type == "cpu"


def _is_view(result: object, arguments: tuple[Any, ...]) -> bool:
    """Whether all tensors of the result lie in the memory of those that went in."""
    given = {x.untyped_storage().data_ptr() for x in tree_leaves(arguments) if torch.is_tensor(x)}
    made = [x for x in tree_leaves(result) if torch.is_tensor(x)]
    return len(made) > 0 and all(x.untyped_storage().data_ptr() in given for x in made)
