"""Chooses a table of operators for a device, once, and can say why.

A backend is a folder that fills the table of `ops.Ops`. The registry maps its name to a lazy factory, so that naming
Triton costs nothing on a machine without a GPU.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shoal.configs.errors import ConfigError
from shoal.kernels.ops import Ops

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Backend:
    """`refuse(device, dtype)` says why this backend cannot serve them, or None; `make` builds the table."""

    name: str
    refuse: Callable[[torch.device, torch.dtype], str | None]
    make: Callable[[torch.device, torch.dtype], Ops]


def _refuse_reference(device: torch.device, dtype: torch.dtype) -> str | None:
    return None if dtype.is_floating_point else f"{dtype} is not a floating-point type"


def _make_reference(device: torch.device, dtype: torch.dtype) -> Ops:
    from shoal.kernels.reference.ops import ReferenceOps

    return ReferenceOps(device, dtype)


def _refuse_cpu(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cpu":
        return f"it runs on the CPU only, not on {device.type}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"weights may be float32 or bfloat16 on a CPU, not {_dtype_name(dtype)}"
    return None


def _make_cpu(device: torch.device, dtype: torch.dtype) -> Ops:
    from shoal.kernels.cpu.build import NativeUnavailableError
    from shoal.kernels.cpu.native import load
    from shoal.kernels.cpu.ops import CpuOps

    try:
        return CpuOps(load())
    except NativeUnavailableError as error:
        logger.warning("CPU operators run in plain torch, several times slower: %s.", error)
        return BACKENDS["torch_cpu"].make(device, dtype)


def _make_torch_cpu(device: torch.device, dtype: torch.dtype) -> Ops:
    from shoal.kernels.cpu.torch_ops import TorchCpuOps

    return TorchCpuOps(dtype)


def _refuse_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    from importlib.util import find_spec

    if find_spec("triton") is None:
        return "the triton package is not installed (pip install 'shoal[gpu]')"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"it runs on a GPU, not on {device.type} (except in Triton's interpreter: TRITON_INTERPRET=1)"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"weights may be float32, bfloat16 or float16, not {_dtype_name(dtype)}"
    return None


def _make_triton(device: torch.device, dtype: torch.dtype) -> Ops:
    from shoal.kernels.triton_ops.table import TritonOps

    return TritonOps(device, dtype)


# In order of preference: the first that does not refuse is chosen.
BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("cpu", _refuse_cpu, _make_cpu),
        Backend("triton", _refuse_triton, _make_triton),
        Backend("torch_cpu", _refuse_cpu, _make_torch_cpu),
        Backend("reference", _refuse_reference, _make_reference),
    )
}


def select_ops(device: torch.device, dtype: torch.dtype, *, backend: str | None = None) -> Ops:
    """The table for weights of `dtype` on `device`: the named backend, or the first that can serve them.

    Raises ConfigError for an unknown name (the known ones are listed) and for a named backend that cannot serve them.
    """
    if backend is not None:
        chosen = BACKENDS.get(backend)
        if chosen is None:
            known = ", ".join(sorted(BACKENDS))
            raise ConfigError(f"Unknown kernel backend {backend!r}; known backends: {known}.", param="backend")
        reason = chosen.refuse(device, dtype)
        if reason is not None:
            raise ConfigError(f"Kernel backend {backend!r} cannot be used: {reason}.", param="backend")
        return chosen.make(device, dtype)
    for candidate in BACKENDS.values():
        if candidate.refuse(device, dtype) is None:
            return candidate.make(device, dtype)
    raise ConfigError(f"No kernel backend serves {_dtype_name(dtype)} on {device}.", param="dtype")


def explain_selection(device: torch.device, dtype: torch.dtype) -> list[tuple[str, str]]:
    """(backend, why it is or is not used) in order of preference, without building any."""
    rows: list[tuple[str, str]] = []
    chosen = False
    for candidate in BACKENDS.values():
        reason = candidate.refuse(device, dtype)
        if reason is not None:
            rows.append((candidate.name, f"no: {reason}"))
        elif chosen:
            rows.append((candidate.name, "could serve; a faster backend was chosen"))
        else:
            rows.append((candidate.name, "chosen: the first in order of speed that can serve"))
            chosen = True
    return rows


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
