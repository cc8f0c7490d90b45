"""The grouped product of the CPU: the bits of `linear` with each group's matrix, by one native call."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from shoal.kernels.cpu.native import Native, load
from shoal.kernels.cpu.ops import CpuOps
from shoal.kernels.ops import GroupMatrix, LinearWeight
from shoal.kernels.quantized import QuantFormat, QuantizedMatrix, quantize_int8

COUNTS = [0, 1, 0, 7, 130, 2, 3, 0, 40, 13, 1, 0]
"""One tile of several sizes, blocks of tiles, and groups without rows at the ends and between."""


def dense(dtype: torch.dtype) -> Callable[[int, int], GroupMatrix]:
    return lambda outputs, depth: torch.randn(outputs, depth).to(dtype)


def int8(outputs: int, depth: int) -> GroupMatrix:
    return [quantize_int8(torch.randn(outputs, depth))]


def int4(outputs: int, depth: int) -> GroupMatrix:
    groups = -(-depth // 32)
    quants = torch.randint(0, 256, (outputs, groups, 16), dtype=torch.uint8)
    return [QuantizedMatrix(QuantFormat.INT4, depth, quants, torch.rand(outputs, groups).half())]


def mixed(outputs: int, depth: int) -> GroupMatrix:
    """Two formats in one matrix, as files have them: no single call multiplies those."""
    return [*int8(outputs - 16, depth), *int4(16, depth)]


def alone(ops: CpuOps, matrix: GroupMatrix) -> LinearWeight:
    return ops.prepare_linear(matrix) if isinstance(matrix, torch.Tensor) else ops.prepare_quantized(matrix)


def starts_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("make", [dense(torch.float32), dense(torch.bfloat16), int8, int4, mixed])
@pytest.mark.parametrize(("outputs", "depth"), [(50, 33), (96, 1700)])
def test_bits_are_those_of_each_groups_own_product(
    native_ops: CpuOps, make: Callable[[int, int], GroupMatrix], outputs: int, depth: int, threads: int
) -> None:
    matrices = [make(outputs, depth) for _ in COUNTS]
    weight = native_ops.prepare_grouped(matrices)
    x, starts = torch.randn(sum(COUNTS) + 4, depth), starts_of(COUNTS)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = native_ops.grouped_linear(x, weight, starts)
    finally:
        torch.set_num_threads(before)
    for matrix, (start, stop) in zip(matrices, pairwise(starts.tolist()), strict=True):
        assert torch.equal(out[start:stop], native_ops.linear(x[start:stop], alone(native_ops, matrix)))
    assert weight.nbytes == sum(alone(native_ops, matrix).nbytes for matrix in matrices)


def test_rows_may_be_views(native_ops: CpuOps) -> None:
    weight = native_ops.prepare_grouped([torch.randn(20, 24), torch.randn(20, 24)])
    wide, starts = torch.randn(9, 60), starts_of([4, 5])
    view = wide[:, 30:54]
    assert torch.equal(
        native_ops.grouped_linear(view, weight, starts), native_ops.grouped_linear(view.contiguous(), weight, starts)
    )


def test_it_is_one_call_of_the_native_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    native = Native(load().library)
    ops, calls = CpuOps(native), []
    plain = native.grouped_linear
    weight = ops.prepare_grouped(torch.randn(20, 24) for _ in COUNTS)
    monkeypatch.setattr(native, "grouped_linear", lambda *args: calls.append(args) or plain(*args))
    monkeypatch.setattr(native, "linear", None)
    ops.grouped_linear(torch.randn(sum(COUNTS), 24), weight, starts_of(COUNTS))
    assert len(calls) == 1


@pytest.mark.parametrize("make", [dense(torch.bfloat16), int8])
def test_a_program_follows_the_sizes_of_the_groups(native_ops: CpuOps, make: Callable[[int, int], GroupMatrix]) -> None:
    """Sizes are read as a program runs, and so are the matrices: those of a slot may be replaced."""
    weight, other = (native_ops.prepare_grouped([make(32, 64) for _ in range(3)]) for _ in range(2))
    x, starts = torch.randn(30, 64), starts_of([10, 0, 20])
    _, program = native_ops.capturer(1 << 20).capture(lambda: native_ops.grouped_linear(x, weight, starts))
    assert program is not None
    for counts in ([0, 30, 0], [1, 2, 27], [30, 0, 0]):
        starts.copy_(starts_of(counts))
        x.normal_()
        for mine, theirs in zip(weight.slot_tensors(counts[0] % 3), other.slot_tensors(1), strict=True):
            mine.copy_(theirs)
        assert torch.equal(program.replay(), native_ops.grouped_linear(x, weight, starts))


def test_checked_starts(native_ops: CpuOps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_KERNEL_CHECKS", "1")
    ops = CpuOps(load())
    weight, x = ops.prepare_grouped([torch.randn(8, 8), torch.randn(8, 8)]), torch.randn(4, 8)
    for starts in ([1, 2, 4], [0, 3, 2], [0, 2, 5]):
        with pytest.raises(IndexError, match="do not ascend from 0 to at most 4 rows"):
            ops.grouped_linear(x, weight, torch.tensor(starts, dtype=torch.int32))
