"""One kernel launch as data, so that what runs on a GPU and what is compiled ahead of time cannot drift apart.

The builders beside the kernels return a `Launch`; the table runs it, `aot.py` compiles it for a GPU that is not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

KernelArg = torch.Tensor | int | float

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 when triton was first imported)."""

UPCAST_DOT = tl.constexpr(INTERPRETED)
"""The interpreter keeps bfloat16 as raw 16-bit words and `tl.dot` would multiply those: upcast its operands there."""


@dataclass(frozen=True, slots=True)
class GpuTarget:
    """What launch parameters depend on: compute capability (90 for 9.0) and shared memory of one thread block."""

    capability: int
    shared_bytes: int

    @staticmethod
    def of(device: torch.device) -> GpuTarget:
        """The target of a CUDA device; in the interpreter, which has no device, that of sm_80."""
        if device.type != "cuda":
            return SM80
        major, minor = torch.cuda.get_device_capability(device)
        index = torch.cuda.current_device() if device.index is None else device.index
        shared = triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]
        return GpuTarget(major * 10 + minor, shared)


SM80 = GpuTarget(80, 163 * 1024)
SM90 = GpuTarget(90, 227 * 1024)
SM100 = GpuTarget(100, 227 * 1024)


@dataclass(frozen=True, slots=True)
class Launch:
    """`kernel` over `grid` with run-time `args` and compile-time `constants`, both by parameter name."""

    kernel: Any
    grid: tuple[int, int, int]
    args: Mapping[str, KernelArg | None]
    """None is a compile-time None: the kernel has no such tensor."""
    constants: Mapping[str, int | bool]
    num_warps: int = 4
    num_stages: int = 2

    def run(self) -> None:
        if 0 in self.grid:
            return
        self.kernel[self.grid](
            **self.args, **self.constants, num_warps=self.num_warps, num_stages=self.num_stages, enable_fp_fusion=True
        )


def require_dense(x: torch.Tensor, first_axis: int) -> None:
    """The axes from `first_axis` on must be one contiguous run (the stride of an axis of size 1 says nothing)."""
    expected = 1
    for size, stride in reversed(list(zip(x.shape[first_axis:], x.stride()[first_axis:], strict=True))):
        assert size == 1 or stride == expected, f"not dense from axis {first_axis}: {tuple(x.shape)}, {x.stride()}"
        expected *= size


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
