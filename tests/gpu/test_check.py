"""The check for real GPUs, as far as it can be tested without one."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("gpu_engine_report", Path(__file__).parent / "engine_report.py")
assert _spec is not None
assert _spec.loader is not None
engine_report = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(engine_report)

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed (pip install 'shoal[gpu]')"
)


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600)


def test_without_a_gpu_it_says_so_and_exits_with_2(repository: Path) -> None:
    result = run(repository, "tests/gpu/check.py")
    assert result.returncode == 2
    assert "sees no CUDA device" in result.stderr
    assert "--dry-run" in result.stderr
    assert "Traceback" not in result.stderr


def copied_sources(root: Path, target: Path) -> Path:
    """A bare copy, whose files must be the ones that are imported."""
    for folder in ("configs", "kernels", "kvcache", "model_shards", "tests/gpu", "tests/model_shards/runner"):
        shutil.copytree(root / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__"))
    marker = target / "kernels" / "triton_ops" / "table.py"
    marker.write_text(marker.read_text() + "\nprint('the copy was imported')\n")
    return target


@needs_triton
def test_a_dry_run_goes_through_every_part(repository: Path, tmp_path: Path) -> None:
    root = copied_sources(repository, tmp_path)
    result = run(root, "tests/gpu/check.py", "--dry-run", "--seed", "7")
    assert result.returncode == 0, result.stderr[-4000:]
    assert "the copy was imported" in result.stdout
    written = json.loads((root / "gpu-check.json").read_text())
    assert written["seed"] == 7
    parts = written["parts"]
    compared = {check["name"].split(",")[0] for check in parts["kernels"]["checks"]}
    assert compared >= {"paged attention", "rms_norm", "head_rms_norm", "rotary", "silu_and_mul", "linear", "store_kv"}
    engine = [check["name"] for check in parts["engine"]["checks"]]
    assert any("bfloat16: rms error of logits against transformers" in name for name in engine)
    assert sum("captured against eager steps" in name for name in engine) == 2
    assert {step["captured_ms"] for step in parts["steps"]["steps"]} == {None}, "a dry run measures nothing"
    assert {timing["ms"] for timing in parts["timing"]["timings"]} == {None}
    timed = {timing["name"].split(",")[0] for timing in parts["timing"]["timings"]}
    assert timed >= {"decode", "prefill", "rotary", "store_kv"}
    assert "| decode step of 8B, 1 x" in result.stdout


@needs_triton
def test_a_part_that_fails_is_reported_and_the_others_run(repository: Path, tmp_path: Path) -> None:
    root = copied_sources(repository, tmp_path)
    (root / "tests/gpu/correctness.py").write_text("raise RuntimeError('broken on purpose')\n")
    result = run(root, "tests/gpu/check.py", "--dry-run", "--part", "kernels", "timing")
    assert result.returncode == 1
    assert "FAILED: kernels: exit status 1" in result.stderr
    parts = json.loads((root / "gpu-check.json").read_text())["parts"]
    assert parts["kernels"]["failure"] == "exit status 1"
    assert parts["timing"]["timings"]


def test_what_is_wrong_and_what_was_missed_is_said() -> None:
    check = {"name": "rms_norm", "error": 1.0, "allowed": 0.1, "passed": False}
    step = {
        "batch": 1,
        "context": 1024,
        "bytes_read": 15 * 10**9,
        "roofline_ms": 3.5,
        "captured_ms": 5.0,
        "eager_ms": 20.0,
        "device_ms": 4.5,
        "transformers_ms": None,
        "fraction": 0.7,
    }
    kernel = {"name": "decode, x", "unit": "GB/s", "ms": 1.0, "rate": 3000.0, "fraction": 0.8, "torch_ms": 2.0}
    result = {
        "parts": {
            "kernels": {"seconds": 1, "checks": [check]},
            "steps": {"seconds": 2, "steps": [step], "failure": "not done after 150 s"},
            "timing": {"seconds": 3, "timings": [kernel]},
            "engine": {"seconds": 4},
        }
    }
    assert engine_report.problems(result) == [
        "WRONG: rms_norm: error 1, allowed 0.1",
        "FAILED: steps: not done after 150 s",
        "FAILED: engine: nothing was checked",
    ]
    table = engine_report.render_report(result)
    assert "| 5 | 70% (roofline 3.5 ms) | 80%, MISSED | eager 20, program alone 4.5, transformers - |" in table
    assert "| decode, x | 1 | 80% (3000 GB/s) | 75%, met | torch 2 |" in table


def test_the_engine_runs_with_torch_and_numpy_alone(repository: Path) -> None:
    """On a GPU machine with neither the project's other dependencies nor transformers."""
    script = """
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ("pydantic", "safetensors", "tokenizers", "msgpack", "transformers", "ray", "zmq"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
sys.path.insert(0, "tests/gpu")
import check
check.map_import_root()
import torch, engine
from engine_model import RandomCheckpoint, tiny
checkpoint = RandomCheckpoint(tiny("llama", smallest=True), 3, torch.device("cpu"))
others = engine._others(checkpoint, torch.device("cpu"))
print(others.name, others.truth([1, 2, 3]).shape, type(engine._written(checkpoint, None)).__name__)
"""
    result = run(repository, "-c", script)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "the reference operators torch.Size([3, 256]) RandomCheckpoint" in result.stdout
