"""Memory of weights and KV pages on the host."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from shoal.kernels.huge_pages import HUGE_PAGE, Arena, lazy_zeros

MB = 1 << 20


def resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("needs /proc")
    return int(statm.read_text().split()[1]) * 4096


@pytest.mark.parametrize("huge_pages", [False, True])
def test_zeros_take_memory_only_when_they_are_written(huge_pages: bool) -> None:
    before = resident_bytes()
    zeros = lazy_zeros((256, MB), torch.uint8, huge_pages=huge_pages)
    assert resident_bytes() - before < 16 * MB
    zeros[:32] = 1
    assert 32 * MB <= resident_bytes() - before < 64 * MB
    assert not zeros[32:40].any()


def test_zeros_start_at_a_huge_page_and_go_with_their_tensor() -> None:
    zeros = lazy_zeros((64, MB // 2), torch.bfloat16, huge_pages=True)
    assert zeros.data_ptr() % HUGE_PAGE == 0
    part = zeros[1:2]
    part.fill_(3)
    filled = resident_bytes()
    del zeros
    assert part.sum() == 3 * (MB // 2)  # a view keeps all of it
    part = torch.empty(0)
    gc.collect()
    assert resident_bytes() <= filled


@pytest.mark.parametrize("shape", [(0,), (0, 4), (1,), (3, 5, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_any_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for made in (lazy_zeros(shape, dtype, huge_pages=False), Arena().empty(shape, dtype)):
        assert (made.shape, made.dtype) == (shape, dtype)
        assert made.is_contiguous()


def test_tensors_of_an_arena_do_not_overlap() -> None:
    arena = Arena()
    sizes = [1, 63, 64, 65, 5 * MB, 40 * MB, 100 * MB, 3]
    tensors = [arena.empty((size,), torch.uint8) for size in sizes]
    for number, tensor in enumerate(tensors):
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(number)
    for number, tensor in enumerate(tensors):
        assert bool((tensor == number).all())
