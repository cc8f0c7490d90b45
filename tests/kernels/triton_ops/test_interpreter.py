"""Numerics of the Triton kernels without a GPU, in Triton's interpreter.

The interpreter is chosen when triton is first imported, and one process cannot have both: the modules of `interpreted/`
(not named test_*, so that nothing else collects them) run in processes of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

MODULES = sorted((Path(__file__).parent / "interpreted").glob("*_checks.py"))


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (pip install 'shoal[gpu]')")
@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_kernels_agree_with_the_reference_in_the_interpreter(module: Path, repository: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(module)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, f"{result.stdout[-8000:]}\n{result.stderr[-2000:]}"
