"""Partial attention over disjoint keys: what each backend gives for queries without keys, and the exact merge."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.kernels.ops import AttentionMetadata, Ops
from shoal.kernels.registry import select_ops

CPU = torch.device("cpu")
NOTHING = -torch.inf


@pytest.fixture(params=["reference", "cpu", "torch_cpu"])
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "cpu":
        native: Ops = request.getfixturevalue("native_ops")
        return native
    return select_ops(CPU, torch.float32, backend=request.param)


def in_float64(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp) of one head: q [n, d], k and v [m, d]; m may be 0."""
    scores = q.double() @ k.double().T
    if k.shape[0] == 0:
        return torch.zeros(q.shape, dtype=torch.float64), torch.full(q.shape[:1], NOTHING, dtype=torch.float64)
    return torch.softmax(scores, -1) @ v.double(), torch.logsumexp(scores, -1)


@given(data=st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_parts_merge_into_attention_over_all_keys(ops: Ops, data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=6), label="keys of each part")
    dim = data.draw(st.sampled_from([8, 32, 80]), label="head_dim")
    spread = data.draw(st.sampled_from([0.1, 1.0, 30.0]), label="spread of the scores")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    q = torch.randn(5, dim, generator=generator) * spread * dim**-0.5
    k, v = (torch.randn(sum(parts), dim, generator=generator) for _ in range(2))
    merged = None
    for keys, values in zip(k.split(parts), v.split(parts), strict=True):
        out, lse = (x.float() for x in in_float64(q, keys, values))
        if merged is None:
            merged = (out[:, None].clone(), lse[:, None].clone())
        else:
            ops.merge_attention(*merged, out[:, None], lse[:, None])
    assert merged is not None
    expected, expected_lse = in_float64(q, k, v)
    # A log-sum-exp of 100 is known to 100 * 2 ** -24 only, and so are the shares that it gives.
    atol = 2e-6 + 4e-7 * expected_lse[expected_lse.isfinite()].abs().max().item() if len(k) else 0.0
    torch.testing.assert_close(merged[0][:, 0], expected.float(), atol=atol, rtol=1e-5)
    torch.testing.assert_close(merged[1][:, 0], expected_lse.float(), atol=atol, rtol=2e-6)


def test_parts_without_keys_change_nothing_and_make_no_nan(ops: Ops) -> None:
    out, lse = torch.randn(3, 2, 16), torch.tensor([[0.5, -3.0], [NOTHING, NOTHING], [90.0, NOTHING]])
    out[lse == NOTHING] = 0
    before, before_lse = out.clone(), lse.clone()
    ops.merge_attention(out, lse, torch.zeros(3, 2, 16), torch.full((3, 2), NOTHING))
    assert torch.equal(out, before)
    assert torch.equal(lse, before_lse)
    first, first_lse = torch.zeros(3, 2, 16), torch.full((3, 2), NOTHING)
    ops.merge_attention(first, first_lse, before, before_lse)
    assert torch.equal(first, before)
    assert torch.equal(first_lse, before_lse)


def test_a_nan_is_kept_in_its_row(ops: Ops) -> None:
    """A broken sequence must be seen as such by the sampler, whichever part it is in."""
    out, other = torch.randn(4, 1, 16), torch.randn(4, 1, 16)
    lse, other_lse = torch.zeros(4, 1), torch.zeros(4, 1)
    lse[1], other_lse[2] = torch.nan, torch.nan
    ops.merge_attention(out, lse, other, other_lse)
    assert out[[1, 2]].isnan().all()
    assert not out[[0, 3]].isnan().any()


def test_rows_may_lie_apart(ops: Ops) -> None:
    """As they do when outputs travel with their log-sum-exps behind them."""
    packed, other = torch.randn(7, 3, 33), torch.randn(7, 3, 33)
    out, lse = packed[..., :32].clone(), packed[..., 32].clone()
    ops.merge_attention(out, lse, other[..., :32].clone(), other[..., 32].clone())
    ops.merge_attention(packed[..., :32], packed[..., 32], other[..., :32], other[..., 32])
    assert torch.equal(packed[..., :32], out)
    assert torch.equal(packed[..., 32], lse)


def test_a_row_has_the_same_bits_in_any_batch(native_ops: Ops, threads: object) -> None:
    out, other = torch.randn(301, 5, 80), torch.randn(301, 5, 80)
    lse, other_lse = torch.randn(301, 5) * 10, torch.randn(301, 5) * 10
    alone = [
        (out[i : i + 1].clone(), lse[i : i + 1].clone(), other[i : i + 1], other_lse[i : i + 1]) for i in range(301)
    ]
    threads(3)  # type: ignore[operator]
    native_ops.merge_attention(out, lse, other, other_lse)
    for i, row in enumerate(alone):
        native_ops.merge_attention(*row)
        assert torch.equal(row[0][0], out[i])
        assert torch.equal(row[1][0], lse[i])


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("queries", [1, 2, 5, 90])
@pytest.mark.parametrize("keys", [0, 1, 40])
def test_queries_before_the_first_key_see_nothing(
    ops: Ops, reference: Ops, random_batch: type, queries: int, keys: int, window: int | None
) -> None:
    """Query i of n stands at key m - n + i. Those before the first key give zeros; the others attend as ever."""
    batch = random_batch.random((max(keys, 1), 33), heads=(4, 2), head_dim=32)
    q = torch.randn(queries + 2, 4, 32)
    meta = AttentionMetadata(
        query_start=torch.tensor([0, queries, queries + 2], dtype=torch.int32),
        seq_lens=torch.tensor([keys, 33], dtype=torch.int32),
        block_tables=batch.block_tables,
        slot_mapping=torch.full((queries + 2,), -1),
        positions=torch.zeros(queries + 2, dtype=torch.int64),
        max_query_len=max(queries, 2),
        max_seq_len=33 if keys < 33 else keys,
        num_decodes=0,
    )
    out, lse = ops.paged_attention_lse(q, batch.pages(ops), meta, 0.2, window)
    keyless = max(0, queries - keys)
    assert not out[:keyless].any()
    assert (lse[:keyless] == NOTHING).all()
    if keys:
        seen = min(queries, keys)
        plain = AttentionMetadata(
            query_start=torch.tensor([0, seen, seen + 2], dtype=torch.int32),
            seq_lens=meta.seq_lens,
            block_tables=batch.block_tables,
            slot_mapping=meta.slot_mapping,
            positions=meta.positions,
            max_query_len=max(seen, 2),
            max_seq_len=meta.max_seq_len,
            num_decodes=0,
        )
        expected, expected_lse = reference.paged_attention_lse(
            q[keyless:].contiguous(), batch.pages(reference), plain, 0.2, window
        )
        torch.testing.assert_close(out[keyless:], expected, atol=5e-6, rtol=1e-5)
        torch.testing.assert_close(lse[keyless:], expected_lse, atol=5e-6, rtol=1e-5)
