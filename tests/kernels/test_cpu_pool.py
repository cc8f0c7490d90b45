"""The helpers of the native unit: any number of them, several callers at once, and after a fork."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import torch


def test_callers_in_several_threads_do_not_mix(native_ops, threads) -> None:
    threads(2)
    weight = native_ops.prepare_linear(torch.randn(640, 300))
    inputs = [torch.randn(1 + i % 9, 300) for i in range(40)]
    expected = [native_ops.linear(x, weight) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            results = list(pool.map(lambda x: native_ops.linear(x, weight), inputs))
            assert all(map(torch.equal, results, expected))


def test_the_number_of_threads_may_change_between_calls(native_ops, threads) -> None:
    weight, x = native_ops.prepare_linear(torch.randn(2000, 200)), torch.randn(30, 200)
    expected = native_ops.linear(x, weight)
    for number in (1, 4, 2, 9, 1, 3) * 20:
        threads(number)
        assert torch.equal(native_ops.linear(x, weight), expected)


def test_a_forked_child_has_helpers_of_its_own(native_ops) -> None:
    code = """
import os, torch
from shoal.kernels.registry import select_ops
torch.set_num_threads(2)
ops = select_ops(torch.device("cpu"), torch.float32, backend="cpu")
weight, x = ops.prepare_linear(torch.randn(2000, 200)), torch.randn(30, 200)
expected = ops.linear(x, weight)
if (child := os.fork()) == 0:
    os._exit(0 if all(torch.equal(ops.linear(x, weight), expected) for _ in range(100)) else 1)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(ops.linear(x, weight), expected)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
