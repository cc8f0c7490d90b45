"""Memory in huge pages: what is read once a step, and is larger than any cache, is else bound by address translation.

A 2 MiB page takes one entry of the TLB where 4 KiB pages take 512. Linux gives them to whoever asks for them before the
memory is first written (`transparent_hugepage` is `madvise` on most distributions). Elsewhere pages are what they are.
"""

from __future__ import annotations

import ctypes
import math
import mmap

import torch

HUGE_PAGE = 2 << 20
_CHUNK = 32 * HUGE_PAGE
_ALIGNMENT = 64  # bytes: a cache line, and the widest vector


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, *, huge_pages: bool) -> torch.Tensor:
    """Zeros on the host, aligned to a huge page. The system provides memory when it is first written, a page at a time,
    so whoever writes first to a huge page waits for 2 MiB of zeros."""
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=start).view(shape)


class Arena:
    """Tensors that stay, side by side: matrices of a few MiB would each leave the ends of their memory in small pages.
    Memory that nobody took is never written, so it costs addresses only. It is freed when all its tensors are gone."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Like torch.empty, on the host; the data is aligned to 64 bytes."""
        size = math.prod(shape) * dtype.itemsize
        if self._used + size > len(self._chunk):
            self._chunk, self._used = lazy_zeros((max(_CHUNK, size),), torch.uint8, huge_pages=True), 0
        memory = self._chunk[self._used : self._used + size]
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return memory.view(dtype).view(shape)
