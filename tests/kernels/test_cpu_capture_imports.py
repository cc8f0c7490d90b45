"""What a capture must not do in the middle of a step with running streams: import a compiler."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
import torch
from shoal.kernels.registry import select_ops
ops = select_ops(torch.device("cpu"), torch.bfloat16)
capturer = ops.capturer(1 << 20)
if capturer is None:
    sys.exit("no capturer")
x = torch.ones(3, 8)
result, program = capturer.capture(lambda: ops.silu_and_mul(x) * 2)
assert program is not None, capturer.refusal
print("torch._dynamo" in sys.modules)
"""


def test_a_capture_does_not_import_torch_dynamo(native_ops: object) -> None:
    """It takes more than a second, and 800 modules. (`native_ops`: skipped where the operators cannot be built.)"""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr
