"""Every kernel compiles ahead of time for sm_80, sm_90 and sm_100 within its budget, with the instructions it is for.

Compiled in a process of its own, because this one may have imported triton as an interpreter. Triton caches what it
compiled: only the first run takes more than seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed (pip install 'shoal[gpu]')"
)

COMMAND = [sys.executable, "-m", "shoal.kernels.triton_ops.budgets", "--json"]


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(COMMAND, env=inherited | environment, capture_output=True, text=True, timeout=550)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    result = run()
    assert result.stdout, result.stderr[-4000:]
    parsed: list[dict[str, Any]] = json.loads(result.stdout)
    return parsed


def test_no_kernel_is_over_its_budget(rows: list[dict[str, Any]]) -> None:
    over = {f"{row['case']} on {row['target']}": row["violations"] for row in rows if row["violations"]}
    assert over == {}


def test_no_kernel_spills(rows: list[dict[str, Any]]) -> None:
    assert [row for row in rows if row["resources"]["stack_bytes"]] == []


@pytest.mark.parametrize(("target", "kib"), [("sm_80", 163), ("sm_90", 227), ("sm_100", 227)])
def test_shared_memory_fits_a_thread_block(rows: list[dict[str, Any]], target: str, kib: int) -> None:
    assert max(row["resources"]["shared_bytes"] for row in rows if row["target"] == target) <= kib * 1024


@pytest.mark.parametrize(("target", "instruction"), [("sm_80", "mma.sync"), ("sm_90", "wgmma"), ("sm_100", "tcgen05")])
def test_prefill_uses_the_target_s_tensor_cores(rows: list[dict[str, Any]], target: str, instruction: str) -> None:
    prefills = [row for row in rows if row["case"].startswith("prefill") and "fp32" not in row["case"]]
    found = {row["resources"]["matrix_instruction"] for row in prefills if row["target"] == target}
    assert found == {instruction}


def test_attention_copies_keys_and_values_asynchronously(rows: list[dict[str, Any]]) -> None:
    attention = [row for row in rows if "attention" in row["case"]]
    assert all(row["resources"]["async_copies"] for row in attention)


def test_the_interpreter_is_refused() -> None:
    result = run(TRITON_INTERPRET="1")
    assert result.returncode == 2
    assert "unset TRITON_INTERPRET" in result.stderr
