"""Operators that a table need not have: what `Ops` makes of its others, on every table for the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.kernels.draws import FAILED_FLAG, WORDS, pack_draws
from shoal.kernels.ops import AttentionMetadata, HeadNorms, Ops
from shoal.kernels.page_format import KVPages, PageFormat
from shoal.kernels.registry import BACKENDS

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16


@pytest.fixture(params=["cpu", "torch_cpu", "reference"])
def ops(request) -> Ops:
    if request.param == "cpu":
        return request.getfixturevalue("native_ops")
    return BACKENDS[request.param].make(torch.device("cpu"), torch.float32)


def pages_of(ops: Ops) -> KVPages:
    return PageFormat(ops.layout, 16, KV_HEADS, HEAD_DIM, torch.float32).allocate(3, torch.device("cpu"))


def step(slots: list[int], positions: list[int]) -> AttentionMetadata:
    none = torch.zeros(1, dtype=torch.int32)
    return AttentionMetadata(none, none, none, torch.tensor(slots), torch.tensor(positions), 1, 1)


@pytest.mark.parametrize("normed", [False, True])
def test_rotary_store_kv_is_norms_then_rotary_then_store(ops: Ops, normed: bool) -> None:
    fused = torch.randn(3, HEADS + 2 * KV_HEADS, HEAD_DIM)
    norms = HeadNorms(torch.randn(HEAD_DIM), torch.randn(HEAD_DIM), 1e-6) if normed else None
    cos_sin, meta = torch.randn(8, HEAD_DIM), step([17, -1, 40], [7, 0, 3])
    q, k, v = torch.split_with_sizes(fused.clone(), [HEADS, KV_HEADS, KV_HEADS], dim=1)
    if norms is not None:
        q, k = (ops.head_rms_norm(x, w, 1e-6) for x, w in ((q, norms.q_weight), (k, norms.k_weight)))
    ops.rotary(q, k, meta.positions, cos_sin)
    expected = pages_of(ops)
    ops.store_kv(k, v, expected, meta.slot_mapping)

    pages = pages_of(ops)
    views = torch.split_with_sizes(fused.clone(), [HEADS, KV_HEADS, KV_HEADS], dim=1)
    result = ops.rotary_store_kv((views[0], views[1], views[2]), cos_sin, pages, meta, norms)
    assert torch.equal(result, q)
    assert torch.equal(pages.k, expected.k)
    assert torch.equal(pages.v, expected.v)
    assert pages.v.any()


def test_rms_norm_rows_are_rows_of_the_norm(ops: Ops) -> None:
    x, weight, rows = torch.randn(6, 48), torch.randn(48), torch.tensor([5, 0, 0])
    assert torch.equal(ops.rms_norm_rows(x, rows, weight, 1e-5), ops.rms_norm(x[rows], weight, 1e-5)[0])


def test_sample_draws_and_flags() -> None:
    ops = BACKENDS["reference"].make(torch.device("cpu"), torch.float32)
    logits = torch.tensor(
        [[0.0, 3.0, 3.0, -1.0], [0.0, torch.nan, 1.0, 2.0], [-torch.inf, -torch.inf, 0.0, -torch.inf]]
    )
    draws = torch.from_numpy(
        pack_draws([1, -2, 2**64 - 1], [(0, 0)] * 3, [0, 0, 2], np.array([[0, 1, 0], [1, 1, 0], [1, 0.9, 0.5]], float))
    )
    assert draws.shape == (3, WORDS)
    assert ops.sample(logits, draws).tolist() == [[1, 0, 2], [0, FAILED_FLAG, 0]]
