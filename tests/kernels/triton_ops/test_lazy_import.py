"""Nothing but the Triton table itself needs triton."""

from __future__ import annotations

import subprocess
import sys

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # importing it raises, as where it is not installed
import torch
from shoal.kernels.registry import select_ops
print(select_ops(torch.device("cpu"), torch.float32, backend="reference").name)
try:
    import shoal.kernels.triton_ops.table
except ModuleNotFoundError as error:
    print(error.name)
"""


def test_kernels_work_where_triton_is_not_installed() -> None:
    result = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, timeout=120)
    assert result.stdout.split() == ["reference", "triton"], result.stderr
