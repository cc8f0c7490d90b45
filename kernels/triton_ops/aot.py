"""Compiles a `Launch` for a GPU that is not there and reads what it needs: registers, stack, shared memory.

The signature is derived from the launch's arguments the way Triton's JIT derives it at the first call (pointers aligned
to 16 bytes, integers divisible by 16 and ones are specialised), so the code is the code that would run. Needs only the
triton wheel, which brings its own assembler. Triton caches results (TRITON_CACHE_DIR): a second run is quick.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shoal.kernels.triton_ops.launch import INTERPRETED, GpuTarget, KernelArg, Launch

TYPE_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}
INT32_MAX = 2**31 - 1
ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True, slots=True)
class Resources:
    """What one compiled kernel takes of a GPU."""

    registers: int
    """Of a thread; 255 is the hardware's limit."""
    stack_bytes: int
    """Of a thread, in local memory. Not 0: registers were spilled."""
    shared_bytes: int
    """Of a thread block."""
    matrix_instruction: str
    """The tensor-core instruction in the code: "tcgen05", "wgmma", "mma.sync" or "-"."""
    async_copies: bool
    """Whether global memory is copied to shared memory asynchronously (cp.async), as software pipelining needs."""


def compile_launch(launch: Launch, target: GpuTarget) -> Resources:
    """Compiles for `target` and reads the result. Raises what Triton raises when the code is not valid there."""
    if INTERPRETED:
        raise RuntimeError("nothing can be compiled under TRITON_INTERPRET=1: unset it before triton is imported")
    source = specialised_source(launch)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", target.capability, 32), options=options)
    ptx: str = compiled.asm["ptx"]
    registers, stack = _register_usage(compiled.asm["cubin"])
    found = [name for name in ("tcgen05.mma", "wgmma.mma_async", "mma.sync") if name in ptx]
    instruction = found[0].removesuffix(".mma").removesuffix(".mma_async") if found else "-"
    return Resources(registers, stack, compiled.metadata.shared, instruction, "cp.async" in ptx)


def specialised_source(launch: Launch) -> ASTSource:
    """The launch's kernel with the types, constants and alignments that Triton's JIT would give it."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = dict(launch.constants)
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        name = parameter.name
        value = None if parameter.is_constexpr else launch.args[name]
        if parameter.is_constexpr or value is None:
            signature[name] = "constexpr"
            constants.setdefault(name, None)
        elif isinstance(value, int) and value == 1 and not parameter.do_not_specialize:
            signature[name] = "constexpr"
            constants[name] = 1
        else:
            signature[name] = _type_name(value)
            if _aligned(value) and not parameter.do_not_specialize:
                attributes[(index,)] = ALIGNED
    return ASTSource(launch.kernel, signature, constants, attributes)


def _type_name(value: KernelArg) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPE_NAMES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if value <= INT32_MAX else "i64"


def _aligned(value: KernelArg) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


def _register_usage(cubin: bytes) -> tuple[int, int]:
    """(registers, stack bytes) of a thread, as the assembler wrote them into the binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if match is None:
        raise RuntimeError(f"cuobjdump printed no resource usage:\n{text}")
    return int(match[1]), int(match[2])
