"""Latent attention on the CPU: equal to the reference and to attention over expanded heads, and the same bits in any
batch and chunk."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.kernels.page_format import PageFormat

ATOL = 5e-6
"""Outputs are averages of normed latents; fp32 sums of some hundred terms differ by a few units of 1e-7."""


def check(ops, reference, batch, chunks) -> None:
    """Stores everything with either, then runs `chunks` over what `ops` stored, whose layout is the same in both."""
    expected_pages, pages = batch.stored(reference), batch.stored(ops)
    ulp = 2.0**-7 if batch.dtype == torch.bfloat16 else 1e-6  # a number in the middle may be rounded either way
    torch.testing.assert_close(pages.k, expected_pages.k, atol=1e-6, rtol=ulp, equal_nan=True)
    out, q_rope = batch.run(ops, pages, chunks)
    expected_pages.k.copy_(pages.k)
    meta = batch.meta(chunks)
    q = torch.cat([batch.q[i][start:end] for i, (start, end) in chunks.items()])
    expected = reference.paged_mla_attention(q, q_rope, expected_pages, meta, batch.scale)
    torch.testing.assert_close(out, expected, atol=ATOL, rtol=1e-5)
    _, rotated = batch.run(reference, expected_pages, chunks)
    torch.testing.assert_close(q_rope, rotated, atol=1e-6, rtol=1e-6)


# DeepSeek-V3's shape; widths that no vector divides; a latent narrower than a vector; more rows than a tile has.
@pytest.mark.parametrize(
    ("heads", "dims"), [(2, (512, 64)), (4, (32, 16)), (3, (40, 10)), (1, (12, 8)), (128, (16, 8)), (5, (6, 2))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_decode_and_chunk_together(cpu_ops, reference, latent, heads, dims, dtype) -> None:
    batch = latent.LatentBatch.random((1, 16, 17, 70, 33), heads, dims, dtype=dtype)
    check(cpu_ops, reference, batch, {0: (0, 1), 1: (15, 16), 3: (62, 70), 2: (0, 17), 4: (10, 33)})


@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_batches(native_ops, reference, latent, data) -> None:
    lengths = tuple(data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=4), label="lengths"))
    batch = latent.LatentBatch.random(
        lengths,
        data.draw(st.integers(1, 20), label="heads"),
        (data.draw(st.sampled_from([16, 24, 48, 96])), data.draw(st.sampled_from([2, 8, 16]))),
        data.draw(st.sampled_from([16, 32, 48])),
        data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        data.draw(st.integers(0, 1000)),
    )
    chunks = {i: (data.draw(st.integers(0, n - 1)), n) for i, n in enumerate(lengths)}
    check(native_ops, reference, batch, chunks)


@pytest.mark.parametrize("backend", ["native_ops", "reference"])
def test_absorbed_equals_expanded(request, latent, backend) -> None:
    """Attention over one latent a token is attention over the heads' own keys and values, which it never makes."""
    ops = request.getfixturevalue(backend)
    heads, (latent_dim, rope), nope, value = 4, (32, 16), 24, 20
    batch = latent.LatentBatch.random((70,), heads, (latent_dim, rope))
    generator = torch.Generator().manual_seed(1)
    w_key = torch.randn(heads, nope, latent_dim, generator=generator) * latent_dim**-0.5
    w_value = torch.randn(heads, value, latent_dim, generator=generator) * latent_dim**-0.5
    q = torch.randn(70, heads, nope, generator=generator)
    scale = (nope + rope) ** -0.5

    meta, pages = batch.meta({0: (0, 70)}), batch.pages(ops)
    q_rope = batch.q_rope[0].clone()
    ops.rotary_store_latent(q_rope, batch.kv[0].clone(), batch.norm, batch.cos_sin, pages, meta)
    q_latent = ops.head_linear(q, ops.prepare_heads(w_key.transpose(1, 2).contiguous()))
    attended = ops.paged_mla_attention(q_latent, q_rope, pages, meta, scale)
    absorbed = ops.head_linear(attended, ops.prepare_heads(w_value.clone()))

    rows = pages.canonical(batch.block_tables[0, :5].long())[0].flatten(0, 1)[:70, 0]
    keys = torch.einsum("kc,hdc->khd", rows[:, :latent_dim], w_key)
    keys = torch.cat((keys, rows[:, None, latent_dim:].expand(-1, heads, -1)), dim=2)
    values = torch.einsum("kc,hdc->khd", rows[:, :latent_dim], w_value)
    expanded = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (torch.cat((q, q_rope), dim=2), keys, values)), is_causal=True, scale=scale
    ).transpose(0, 1)
    torch.testing.assert_close(absorbed, expanded, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
def test_chunks_give_the_same_bits(native_ops, latent, dtype, chunk) -> None:
    """Every slot beyond the chunk is NaN, as a step finds it."""
    batch = latent.LatentBatch.random((301,), 6, (64, 16), dtype=dtype)
    whole, rotated = batch.run(native_ops, batch.pages(native_ops), {0: (0, 301)})
    pages = batch.pages(native_ops)
    for start in range(0, 301, chunk):
        end = min(301, start + chunk)
        out, q_rope = batch.run(native_ops, pages, {0: (start, end)})
        assert torch.equal(out, whole[start:end])
        assert torch.equal(q_rope, rotated[start:end])


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_neighbours_and_threads_do_not_change_bits(native_ops, latent, threads, num_threads) -> None:
    """A long sequence alone is cut into segments for the threads; in a batch it is not. Bits must not show it."""
    batch = latent.LatentBatch.random((1500, 1, 64, 300, 257, 1100), 6, dtype=torch.bfloat16)
    pages = batch.stored(native_ops)
    threads(1)
    together, _ = batch.run(native_ops, pages, {i: (n - 1, n) for i, n in enumerate(batch.lengths)})
    threads(num_threads)
    for i, n in enumerate(batch.lengths):
        assert torch.equal(batch.run(native_ops, pages, {i: (n - 1, n)})[0][0], together[i])


def test_rows_of_nobody_are_zero_and_store_nothing(cpu_ops, latent) -> None:
    """As in a captured step that is filled up: sequences without tokens, slots of -1."""
    batch = latent.LatentBatch.random((20, 9))
    pages = batch.stored(cpu_ops)
    before = pages.k.clone()
    meta = batch.meta({0: (19, 20), 1: (8, 9)})
    meta.query_start = torch.tensor([0, 0, 0], dtype=torch.int32)
    meta.slot_mapping.fill_(-1)
    cpu_ops.rotary_store_latent(torch.zeros(2, 4, 16), torch.ones(2, 48), batch.norm, batch.cos_sin, pages, meta)
    assert torch.equal(pages.k.nan_to_num(), before.nan_to_num())
    out = cpu_ops.paged_mla_attention(torch.ones(2, 4, 32), torch.ones(2, 4, 16), pages, meta, 0.1)
    assert not out.any()


@pytest.mark.parametrize("backend", ["native_ops", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_head_has_its_own_matrix(request, backend, dtype) -> None:
    ops = request.getfixturevalue(backend)
    x, weight = torch.randn(37, 5, 24), torch.randn(5, 19, 24).to(dtype)
    expected = torch.einsum("nhi,hoi->nho", x, weight.float())
    prepared = ops.prepare_heads(weight.clone())
    torch.testing.assert_close(ops.head_linear(x, prepared), expected, atol=1e-5, rtol=1e-5)
    fused = torch.randn(37, 8, 24)
    fused[:, :5] = x
    torch.testing.assert_close(ops.head_linear(fused[:, :5], prepared), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_head_s_rows_do_not_depend_on_each_other(native_ops, threads, num_threads) -> None:
    x, weight = torch.randn(90, 6, 40), native_ops.prepare_heads(torch.randn(6, 33, 40))
    threads(num_threads)
    whole = native_ops.head_linear(x, weight)
    for rows in (slice(0, 1), slice(3, 10), slice(40, 90)):
        assert torch.equal(native_ops.head_linear(x[rows], weight), whole[rows])


def test_queries_may_be_views_of_the_projection(native_ops, latent) -> None:
    batch = latent.LatentBatch.random((50,))
    pages, chunks = batch.stored(native_ops), {0: (0, 50)}
    expected, rotated = batch.run(native_ops, pages, chunks)
    fused = torch.randn(50, 4 * (24 + 16) + 48)
    q_rope = fused[:, 4 * 24 : 4 * 40].view(50, 4, 16)
    q_rope.copy_(batch.q_rope[0])
    fused[:, 160:] = batch.kv[0]
    native_ops.rotary_store_latent(q_rope, fused[:, 160:], batch.norm, batch.cos_sin, pages, batch.meta(chunks))
    assert torch.equal(q_rope, rotated)
    out = native_ops.paged_mla_attention(batch.q[0], q_rope, pages, batch.meta(chunks), batch.scale)
    assert torch.equal(out, expected)


def test_a_nan_stays_in_its_sequence(native_ops, latent) -> None:
    batch = latent.LatentBatch.random((40, 40))
    chunks = {0: (0, 40), 1: (0, 40)}
    healthy, _ = batch.run(native_ops, batch.pages(native_ops), chunks)
    batch.kv[1][5] = torch.nan
    out, _ = batch.run(native_ops, batch.pages(native_ops), chunks)
    assert torch.equal(out[:40], healthy[:40])
    assert out[45:].isnan().all()


@pytest.mark.parametrize("layout", ["canonical", "cpu_packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_takes_one_vector(layout, dtype) -> None:
    page = PageFormat.latent(layout, 16, 576, dtype)
    pages = page.allocate(5, torch.device("cpu"))
    assert page.bytes_per_block * 5 == pages.k.nbytes + pages.v.nbytes == 5 * 16 * 576 * dtype.itemsize
    pages.k[1] = 3
    pages.copy_blocks(torch.tensor([1]), torch.tensor([3]))
    assert pages.canonical(torch.tensor([3, 0]))[0].float().sum((1, 2, 3)).tolist() == [3 * 16 * 576, 0]
