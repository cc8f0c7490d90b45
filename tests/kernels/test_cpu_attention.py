"""Paged attention on the CPU: equal to the reference, and the same bits in any batch and chunk."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# Pages are widened exactly and everything is computed in fp32, so the bound is the same for both page types: outputs
# are averages of N(0, 1) values, and fp32 sums of some hundred terms differ by a few units of 1e-7.
ATOL = 5e-6


def check(ops, reference, batch, chunks, window=None) -> None:
    q, meta = batch.step(chunks)
    scale = q.shape[-1] ** -0.5
    expected, expected_lse = reference.paged_attention_lse(q, batch.pages(reference), meta, scale, window)
    pages = batch.pages(ops)
    out, lse = ops.paged_attention_lse(q, pages, meta, scale, window)
    torch.testing.assert_close(out, expected, atol=ATOL, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=ATOL, rtol=1e-5)
    torch.testing.assert_close(ops.paged_attention(q, pages, meta, scale, window), expected, atol=ATOL, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [32, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_decode_and_chunk_together(cpu_ops, reference, random_batch, head_dim, dtype) -> None:
    batch = random_batch.random((1, 16, 17, 70, 33), (6, 2), head_dim, dtype=dtype)
    check(cpu_ops, reference, batch, {0: (0, 1), 1: (15, 16), 3: (62, 70), 2: (0, 17), 4: (10, 33)})


@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (3, 1), (8, 2), (5, 1), (6, 1), (7, 1), (8, 1), (9, 3), (40, 1)])
def test_every_grouping_of_heads(cpu_ops, reference, random_batch, heads) -> None:
    batch = random_batch.random((40, 21), heads, 32, dtype=torch.bfloat16)
    check(cpu_ops, reference, batch, {1: (20, 21), 0: (3, 40)})


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 64, 100, 300, 1000])
def test_windows(cpu_ops, reference, random_batch, window) -> None:
    batch = random_batch.random((330, 90), heads=(4, 2), head_dim=32)
    check(cpu_ops, reference, batch, {1: (89, 90), 0: (0, 330)}, window)
    check(cpu_ops, reference, batch, {0: (329, 330), 1: (50, 90)}, window)


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_batches(native_ops, reference, random_batch, data) -> None:
    lengths = tuple(data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=5), label="lengths"))
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 8))
    batch = random_batch.random(
        lengths,
        (kv_heads * group, kv_heads),
        data.draw(st.sampled_from([32, 64, 96])),
        data.draw(st.sampled_from([16, 32, 48])),
        data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        data.draw(st.integers(0, 1000)),
    )
    chunks = {i: (data.draw(st.integers(0, n - 1)), n) for i, n in enumerate(lengths)}
    check(native_ops, reference, batch, chunks, data.draw(st.none() | st.integers(1, 200), label="window"))


def test_a_sequence_without_queries_is_skipped(cpu_ops, reference, random_batch) -> None:
    batch = random_batch.random((20, 9))
    check(cpu_ops, reference, batch, {0: (20, 20), 1: (8, 9)})


def test_queries_may_be_a_view_of_the_fused_projection(native_ops, random_batch) -> None:
    batch = random_batch.random((50,), heads=(4, 2))
    q, meta = batch.whole()
    pages = batch.pages(native_ops)
    fused = torch.randn(50, 8, 64)
    fused[:, :4] = q
    expected = native_ops.paged_attention(q, pages, meta, 0.125)
    assert torch.equal(native_ops.paged_attention(fused[:, :4], pages, meta, 0.125), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunks_give_the_same_bits(native_ops, random_batch, dtype, window, chunk) -> None:
    batch = random_batch.random((301,), (6, 2), 64, dtype=dtype)
    pages = batch.pages(native_ops)
    q, meta = batch.whole()
    whole, whole_lse = native_ops.paged_attention_lse(q, pages, meta, 0.125, window)
    for start in range(0, 301, chunk):
        end = min(301, start + chunk)
        q, meta = batch.step({0: (start, end)})
        out, lse = native_ops.paged_attention_lse(q, pages, meta, 0.125, window)
        assert torch.equal(out, whole[start:end])
        assert torch.equal(lse, whole_lse[start:end])


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_neighbours_and_threads_do_not_change_bits(native_ops, random_batch, threads, num_threads) -> None:
    """A long sequence alone is cut into segments for the threads; in a batch it is not. Bits must not show it."""
    batch = random_batch.random((1500, 1, 64, 300, 257, 1100), (6, 2), dtype=torch.bfloat16)
    pages = batch.pages(native_ops)
    threads(1)
    q, meta = batch.step({i: (n - 1, n) for i, n in enumerate(batch.lengths)})
    together = native_ops.paged_attention(q, pages, meta, 0.125)
    threads(num_threads)
    assert torch.equal(native_ops.paged_attention(q, pages, meta, 0.125), together)
    for i, n in enumerate(batch.lengths):
        q, meta = batch.step({i: (n - 1, n)})
        assert torch.equal(native_ops.paged_attention(q, pages, meta, 0.125)[0], together[i])


def test_huge_scores_do_not_overflow(cpu_ops, reference, random_batch) -> None:
    batch = random_batch.random((90,), head_dim=32)
    batch.q[0].mul_(1e4)
    check(cpu_ops, reference, batch, {0: (0, 90)})


def test_a_nan_stays_in_its_row(native_ops, random_batch) -> None:
    """A broken sequence must be seen as NaN (the sampler ends it), and must not touch the others."""
    batch = random_batch.random((40, 40))
    pages = batch.pages(native_ops)
    q, meta = batch.whole()
    healthy = native_ops.paged_attention(q, pages, meta, 0.125)
    q[7] = torch.nan
    out = native_ops.paged_attention(q, pages, meta, 0.125)
    assert out[7].isnan().all()
    q[7], healthy[7], out[7] = 0, 0, 0
    assert torch.equal(out, healthy)
    batch.k[1][5] = torch.nan
    native_ops.store_kv(batch.k[1], batch.v[1], pages, batch.slots(1))
    q, meta = batch.whole()
    out = native_ops.paged_attention(q, pages, meta, 0.125)
    assert torch.equal(out[:40], native_ops.paged_attention(*batch_only(batch, 0, pages), 0.125))
    assert not out[40:45].isnan().any()
    assert out[45:].isnan().all()


def batch_only(batch, i, pages):
    q, meta = batch.step({i: (0, batch.lengths[i])})
    return q, pages, meta


def test_freed_blocks_before_the_window_are_never_read(native_ops, random_batch) -> None:
    batch = random_batch.random((200,))
    pages = batch.pages(native_ops)
    q, meta = batch.step({0: (190, 200)})
    expected = native_ops.paged_attention(q, pages, meta, 0.125, 20)
    freed = batch.block_tables[0, : (191 - 20) // 16].long()
    pages.k[freed] = torch.nan
    pages.v[freed] = torch.nan
    assert torch.equal(native_ops.paged_attention(q, pages, meta, 0.125, 20), expected)
