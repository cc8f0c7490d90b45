"""Norms, rotary, KV store, activations and the plain product in the interpreter, beside the reference."""

from __future__ import annotations

import pytest
import torch

from shoal.kernels.ops import AttentionMetadata, HeadNorms, Ops
from shoal.kernels.page_format import KVPages, PageFormat

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [64, 576, 1000])
def test_rms_norm(triton_ops, reference, hidden: int, dtype: torch.dtype) -> None:
    x = torch.randn(3, hidden).to(dtype)
    weight = torch.randn(hidden)
    out, residual = triton_ops(dtype).rms_norm(x, weight, 1e-5)
    assert residual is x
    close(out, reference.rms_norm(x.float(), weight, 1e-5)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [64, 576])
def test_rms_norm_of_the_sum_with_the_residual(triton_ops, reference, hidden: int, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 5, hidden).to(dtype)
    kept = residual.clone()
    weight = torch.randn(hidden)
    out, total = triton_ops(dtype).rms_norm(x, weight, 1e-6, residual)
    expected, expected_total = reference.rms_norm(x, weight, 1e-6, residual)
    close(total, expected_total)
    close(out, expected)
    assert torch.equal(residual, kept), "the caller's residual is not written"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_head_rms_norm_of_a_view(triton_ops, reference, head_dim: int, dtype: torch.dtype) -> None:
    fused = torch.randn(7, 9, head_dim).to(dtype)
    x = fused[:, 2:7]
    weight = torch.randn(head_dim)
    out = triton_ops(dtype).head_rms_norm(x, weight, 1e-6)
    close(out, reference.head_rms_norm(x.float(), weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((2, 1), 96), ((20, 4), 64)])
def test_rotary_in_place_on_views(triton_ops, reference, heads, head_dim: int, dtype: torch.dtype) -> None:
    total = sum(heads) + heads[1]
    fused = torch.randn(4, total, head_dim).to(dtype)
    positions = torch.tensor([0, 31, 7, 7])
    cos_sin = torch.randn(32, head_dim)
    expected = fused.clone()
    for ops, x in ((triton_ops(dtype), fused), (reference, expected)):
        ops.rotary(x[:, : heads[0]], x[:, heads[0] : sum(heads)], positions, cos_sin)
    close(fused, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(3, 64), (1, 96), (40, 128)])
def test_store_kv_writes_its_slots_and_nothing_else(triton_ops, kv_heads: int, head_dim: int, dtype) -> None:
    pages = PageFormat("canonical", 16, kv_heads, head_dim, dtype).allocate(5, torch.device("cpu"))
    fused = torch.randn(4, 3 * kv_heads, head_dim).to(dtype)
    k, v = fused[:, kv_heads : 2 * kv_heads], fused[:, 2 * kv_heads :]
    slots = torch.tensor([17, -1, 79, 0])
    triton_ops(dtype).store_kv(k, v, pages, slots)
    for pool, source in ((pages.k, k), (pages.v, v)):
        expected = torch.zeros(80, kv_heads, head_dim, dtype=dtype)
        expected[[17, 79, 0]] = source[[0, 2, 3]]
        assert torch.equal(pool.flatten(0, 1), expected)


def test_store_kv_to_narrower_pages_of_a_common_pool(triton_ops) -> None:
    """K and V of a block side by side in one allocation: blocks lie two pages apart."""
    page_format = PageFormat("canonical", 8, 2, 64, torch.float16)
    pool = torch.zeros(6, 2, 8, 2, 64, dtype=torch.float16)
    pages = KVPages(page_format, pool[:, 0], pool[:, 1])
    k, v = torch.randn(2, 3, 2, 64)
    triton_ops(torch.float32).store_kv(k, v, pages, torch.tensor([9, 47, 16]))
    expected = torch.zeros_like(pool)
    for token, (block, offset) in enumerate([(1, 1), (5, 7), (2, 0)]):
        expected[block, 0, offset] = k[token]
        expected[block, 1, offset] = v[token]
    assert torch.equal(pool, expected)


def stored(ops, run, fused, heads, norms=None, pages_dtype=None) -> tuple[torch.Tensor, KVPages]:
    """q and the pages after `run`, the fused operator or the composition of the others, on views of one projection."""
    q_heads, kv_heads = heads
    head_dim = fused.shape[2]
    pages = PageFormat("canonical", 16, kv_heads, head_dim, pages_dtype or fused.dtype).allocate(5, torch.device("cpu"))
    meta = AttentionMetadata(
        query_start=torch.zeros(1, dtype=torch.int32),
        seq_lens=torch.zeros(0, dtype=torch.int32),
        block_tables=torch.zeros(0, 0, dtype=torch.int32),
        slot_mapping=torch.tensor([17, -1, 79, 0])[: len(fused)],
        positions=torch.tensor([0, 31, 7, 7])[: len(fused)],
        max_query_len=1,
        max_seq_len=1,
    )
    cos_sin = torch.randn(32, head_dim, generator=torch.Generator().manual_seed(3))
    q, k, v = torch.split_with_sizes(fused.clone(), [q_heads, kv_heads, kv_heads], dim=1)
    return run(ops, (q, k, v), cos_sin, pages, meta, norms), pages


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((2, 1), 96), ((20, 4), 64), ((4, 1), 256)])
def test_rotary_and_store_are_the_operators_one_after_the_other(triton_ops, heads, head_dim: int, dtype) -> None:
    """To the last bit, and nothing is written for slot -1."""
    ops = triton_ops(dtype)
    fused = torch.randn(4, sum(heads) + heads[1], head_dim).to(dtype)
    (q, pages), (expected_q, expected) = (
        stored(ops, run, fused, heads) for run in (type(ops).rotary_store_kv, Ops.rotary_store_kv)
    )
    assert torch.equal(q, expected_q)
    assert torch.equal(pages.k, expected.k)
    assert torch.equal(pages.v, expected.v)
    assert torch.count_nonzero(pages.k.flatten(0, 1).flatten(1).any(dim=1)) == 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_head_norms_before_rotary_and_store(triton_ops, head_dim: int, dtype: torch.dtype) -> None:
    """The squares of a head are summed in another order than by the operator alone: a last bit may differ."""
    ops, heads = triton_ops(dtype), (4, 2)
    fused = torch.randn(4, 8, head_dim).to(dtype)
    norms = HeadNorms(torch.randn(head_dim), torch.randn(head_dim), 1e-6)
    (q, pages), (expected_q, expected) = (
        stored(ops, run, fused, heads, norms) for run in (type(ops).rotary_store_kv, Ops.rotary_store_kv)
    )
    close(q, expected_q)
    close(pages.k, expected.k)
    assert torch.equal(pages.v, expected.v)


def test_rotary_and_store_to_narrower_pages(triton_ops) -> None:
    ops, fused = triton_ops(torch.float32), torch.randn(4, 6, 64)
    (_, pages), (_, expected) = (
        stored(ops, run, fused, (2, 2), pages_dtype=torch.float16)
        for run in (type(ops).rotary_store_kv, Ops.rotary_store_kv)
    )
    assert torch.equal(pages.k, expected.k)
    assert torch.equal(pages.v, expected.v)


def test_rotary_and_store_of_a_token_do_not_depend_on_the_batch(triton_ops) -> None:
    ops, heads = triton_ops(torch.bfloat16), (4, 2)
    fused = torch.randn(4, 8, 64).bfloat16()
    norms = HeadNorms(torch.randn(64), torch.randn(64), 1e-6)
    run = type(ops).rotary_store_kv
    together, pages = stored(ops, run, fused, heads, norms)
    alone, own_pages = stored(ops, run, fused[:1], heads, norms)
    assert torch.equal(together[:1], alone)
    assert torch.equal(pages.k.flatten(0, 1)[17], own_pages.k.flatten(0, 1)[17])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_gathered_rows(triton_ops, dtype: torch.dtype) -> None:
    """The bits of the norm of all rows: it is the same sum."""
    ops = triton_ops(dtype)
    x, weight = torch.randn(7, 2 * 576).to(dtype)[:, :576], torch.randn(576)
    rows = torch.tensor([6, 0, 0, 3])
    assert torch.equal(ops.rms_norm_rows(x, rows, weight, 1e-5), ops.rms_norm(x, weight, 1e-5)[0][rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu_and_mul", "gelu_tanh_and_mul"])
@pytest.mark.parametrize("size", [64, 1536, 3000])
def test_gated_activations(triton_ops, reference, activation: str, size: int, dtype: torch.dtype) -> None:
    x = (3 * torch.randn(3, 2 * size)).to(dtype)
    out = getattr(triton_ops(dtype), activation)(x)
    close(out, getattr(reference, activation)(x.float()))


@pytest.mark.parametrize("activation", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_gated_activations_saturate(triton_ops, activation: str) -> None:
    gate = torch.tensor([[-3e4, -200.0, -20.0, 0.0, 20.0, 200.0, 3e4, 1.0]])
    out = getattr(triton_ops(torch.float32), activation)(torch.cat((gate, torch.ones_like(gate)), dim=1))
    assert out[0, :2].tolist() == [0.0, 0.0]
    assert out[0, 3:7].tolist() == [0.0, 20.0, 200.0, 3e4]


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_and_embedding_rows(triton_ops, dtype: torch.dtype) -> None:
    ops = triton_ops(dtype)
    weight, bias = torch.randn(5, 8), torch.randn(5)
    prepared = ops.prepare_linear(weight, bias)
    assert (prepared.out_features, prepared.in_features) == (5, 8)
    assert prepared.nbytes == (40 + 5) * dtype.itemsize
    x = torch.randn(2, 3, 8).to(dtype)
    close(ops.linear(x, prepared), x.float() @ weight.to(dtype).float().T + bias.to(dtype).float())
    assert torch.equal(prepared.rows(torch.tensor([4, 0])), weight.to(dtype)[[4, 0]])


def test_no_tokens_is_no_work(triton_ops) -> None:
    ops = triton_ops(torch.float32)
    pages = PageFormat("canonical", 16, 2, 64, torch.float32).allocate(2, torch.device("cpu"))
    none = torch.empty(0, 2, 64)
    ops.store_kv(none, none, pages, torch.empty(0, dtype=torch.int64))
    ops.rotary(none, none, torch.empty(0, dtype=torch.int64), torch.randn(4, 64))
    assert ops.silu_and_mul(torch.empty(0, 32)).shape == (0, 16)
    assert ops.rms_norm(torch.empty(0, 64), torch.ones(64), 1e-5)[0].shape == (0, 64)


def test_the_table_says_what_runs(triton_ops) -> None:
    ops = triton_ops(torch.bfloat16)
    assert (ops.name, ops.layout, ops.activation_dtype) == ("triton", "canonical", torch.bfloat16)
    assert set(ops.explain()) >= {"paged_attention", "linear", "store_kv"}
    assert not ops.batch_invariant
