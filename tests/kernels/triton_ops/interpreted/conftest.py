"""Fixtures of the modules that `../test_interpreter.py` runs, each in a process of its own."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.kernels.ops import Ops

PAGED = Path(__file__).resolve().parents[3] / "gpu" / "paged.py"


@pytest.fixture(scope="session")
def paged_case() -> Callable[..., Any]:
    """The input builder that the check on a real GPU uses too."""
    spec = importlib.util.spec_from_file_location("paged", PAGED)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["paged"] = module
    spec.loader.exec_module(module)
    return module.paged_case


@pytest.fixture(scope="session")
def triton_ops() -> Callable[[torch.dtype], Ops]:
    from shoal.kernels.registry import select_ops

    def make(dtype: torch.dtype) -> Ops:
        return select_ops(torch.device("cpu"), dtype, backend="triton")

    return make


@pytest.fixture(scope="session")
def reference() -> Ops:
    from shoal.kernels.registry import select_ops

    return select_ops(torch.device("cpu"), torch.float32, backend="reference")
