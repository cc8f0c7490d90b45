"""The check for real GPUs, as far as it can be tested without one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed (pip install 'shoal[gpu]')"
)


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)


def test_without_a_gpu_it_says_so_and_exits_with_2(repository: Path) -> None:
    result = run(repository, "tests/gpu/check.py")
    assert result.returncode == 2
    assert "sees no CUDA device" in result.stderr
    assert "--dry-run" in result.stderr
    assert "Traceback" not in result.stderr


@needs_triton
def test_a_dry_run_goes_through_every_comparison_and_timing(repository: Path, tmp_path: Path) -> None:
    """From a bare copy of the sources, whose files must be the ones that are imported."""
    for folder in ("kernels", "configs", "tests/gpu"):
        shutil.copytree(repository / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    marker = tmp_path / "kernels" / "triton_ops" / "table.py"
    marker.write_text(marker.read_text() + "\nprint('the copy was imported')\n")
    result = run(tmp_path, "tests/gpu/check.py", "--dry-run", "--seed", "7")
    assert result.returncode == 0, result.stderr[-4000:]
    assert "the copy was imported" in result.stdout
    written = json.loads((tmp_path / "gpu-check.json").read_text())
    assert written["seed"] == 7
    compared = {check["name"].split(",")[0] for check in written["checks"]}
    assert compared >= {"paged attention", "rms_norm", "head_rms_norm", "rotary", "silu_and_mul", "linear", "store_kv"}
    assert {timing["ms"] for timing in written["timings"]} == {None}, "a dry run measures nothing"
    assert {timing["name"].split(",")[0] for timing in written["timings"]} >= {
        "decode",
        "prefill",
        "rotary",
        "store_kv",
    }
