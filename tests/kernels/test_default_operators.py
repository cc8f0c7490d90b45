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


def grouped(ops: Ops, counts: list[int], *, spare: int = 0) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Input, matrices [7, 5] and result of a grouped product with so many rows a group, `spare` rows in none."""
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    x, matrices = torch.randn(sum(counts) + spare, 5), [torch.randn(7, 5) for _ in counts]
    return x, matrices, ops.grouped_linear(x, ops.prepare_grouped(matrix.clone() for matrix in matrices), starts)


@pytest.mark.parametrize("counts", [[3, 0, 1, 9], [0, 0, 2, 0], [0, 0, 0], [20]])
def test_each_group_of_rows_meets_its_own_matrix(ops: Ops, counts: list[int]) -> None:
    x, matrices, out = grouped(ops, counts, spare=2)
    assert (out.shape, out.dtype) == ((sum(counts) + 2, 7), ops.activation_dtype)
    start = 0
    for count, matrix in zip(counts, matrices, strict=True):
        rows = slice(start, start + count)
        torch.testing.assert_close(out[rows], x[rows] @ matrix.T, atol=1e-5, rtol=1e-5)
        if ops.batch_invariant:
            assert torch.equal(out[rows], ops.linear(x[rows], ops.prepare_linear(matrix)))
        start += count


@pytest.mark.parametrize(("rows", "choices", "num_groups"), [(1, 2, 3), (40, 3, 5), (7, 1, 20), (0, 2, 4)])
def test_rows_go_to_their_groups_and_come_back(ops: Ops, rows: int, choices: int, num_groups: int) -> None:
    wide = torch.randn(rows, 30)
    x, groups = wide[:, 3:22], torch.rand(rows, num_groups).argsort(dim=1)[:, :choices]
    out, starts, places = ops.group_rows(x, groups, num_groups)
    pairs = sorted((int(group), row) for row in range(rows) for group in groups[row])
    assert torch.equal(out, x[[row for _, row in pairs]])
    assert (starts.dtype, starts[0], starts[-1]) == (torch.int32, 0, rows * choices)
    assert [group for group in range(num_groups) for _ in range(starts[group], starts[group + 1])] == [
        group for group, _ in pairs
    ]
    assert all(pairs[places[row, c]] == (groups[row, c], row) for row in range(rows) for c in range(choices))

    weights = torch.rand(rows, choices)
    combined = ops.combine_experts(out, places, weights)
    torch.testing.assert_close(combined, x * weights.sum(dim=1, keepdim=True))
    if rows > 1:
        assert torch.equal(ops.combine_experts(out, places[:1], weights[:1]), combined[:1])


def test_no_rows_at_all_are_grouped(ops: Ops) -> None:
    assert grouped(ops, [0, 0])[2].shape == (0, 7)


def test_a_group_is_replaced_in_place(ops: Ops) -> None:
    """What a rebalancing does: the tensors of one slot overwritten with those of another."""
    matrices = [torch.randn(7, 5) for _ in range(3)]
    weight, other = (
        ops.prepare_grouped([matrix.clone() for matrix in chosen]) for chosen in (matrices, matrices[::-1])
    )
    for mine, theirs in zip(weight.slot_tensors(0), other.slot_tensors(0), strict=True):
        mine.copy_(theirs)
    x, starts = torch.randn(4, 5), torch.tensor([0, 3, 3, 4], dtype=torch.int32)
    expected = torch.cat([x[:3] @ matrices[2].T, x[3:] @ matrices[2].T])
    torch.testing.assert_close(ops.grouped_linear(x, weight, starts), expected, atol=1e-5, rtol=1e-5)
    assert weight.nbytes == sum(tensor.nbytes for slot in range(3) for tensor in weight.slot_tensors(slot))
    assert (weight.num_groups, weight.out_features, weight.in_features) == (3, 7, 5)


def test_groups_of_unlike_shapes_are_refused(ops: Ops) -> None:
    with pytest.raises(ValueError, match=r"\[7, 5\] and \[6, 5\]"):
        ops.prepare_grouped([torch.randn(7, 5), torch.randn(6, 5)])
    with pytest.raises(ValueError, match="at least one group"):
        ops.prepare_grouped([])


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
