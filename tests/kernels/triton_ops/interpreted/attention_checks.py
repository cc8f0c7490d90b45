"""Paged attention in the interpreter. Every case of `paged_case` holds NaN wherever no query may look."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shoal.kernels.ops import AttentionMetadata
from shoal.kernels.page_format import KVPages, PageFormat
from shoal.kernels.triton_ops.attention import attention_launches
from shoal.kernels.triton_ops.launch import SM80

# A step of chunked prefill: three decodes, the tail of a prompt, a whole prompt, one more prompt's middle.
MIXED = [(5, 1), (70, 1), (16, 1), (50, 9), (17, 17), (40, 3)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.fixture
def check(triton_ops, reference, paged_case):
    """Builds a case, runs the kernels and the reference, compares outputs and log-sum-exps."""

    def run(sequences, **shape) -> None:
        case = paged_case(sequences, **shape)
        ops = triton_ops(case.q.dtype)
        out, lse = ops.paged_attention_lse(case.q, case.pages, case.meta, case.scale, case.window)
        expected, expected_lse = reference.paged_attention_lse(
            case.reference_q, case.reference_pages, case.reference_meta, case.scale, case.window
        )
        assert out.dtype == torch.float32
        assert ops.paged_attention(case.q, case.pages, case.meta, case.scale, case.window).dtype == case.q.dtype
        torch.testing.assert_close(out, expected, atol=TOLERANCE[case.q.dtype], rtol=TOLERANCE[case.q.dtype])
        torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)

    return run


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8])
def test_every_group_size_in_a_mixed_step(check, group: int) -> None:
    check(MIXED, heads=(group, 1), head_dim=64)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_head_size_and_dtype(check, head_dim: int, dtype: torch.dtype) -> None:
    check([(20, 1), (70, 1), (75, 20)], heads=(4, 1), head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize("window", [1, 7, 64, 100, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sliding_windows_read_nothing_before_them(check, window: int, dtype: torch.dtype) -> None:
    check([(5, 1), (150, 1), (17, 17), (140, 20)], heads=(2, 1), head_dim=64, window=window, dtype=dtype)


@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 32, 128])
def test_every_block_size(check, block_size: int) -> None:
    check(MIXED, heads=(3, 1), head_dim=64, block_size=block_size)


def test_several_kv_heads(check) -> None:
    check([(20, 1), (40, 9)], heads=(6, 3), head_dim=64)


def test_a_group_larger_than_a_decode_tile(check) -> None:
    check([(30, 1), (40, 9)], heads=(24, 1), head_dim=64)


def test_prompts_of_several_query_blocks(check) -> None:
    """bfloat16 packs 128 rows into a program: at 4 heads a group, 32 tokens."""
    check([(100, 100), (150, 70), (33, 33), (32, 32)], heads=(4, 1), head_dim=64, dtype=torch.bfloat16)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_decodes_are_split_and_merged(check, window: int | None, dtype: torch.dtype) -> None:
    """256 keys make one segment, 257 two; beside them a sequence of one token, which has one of the launch's three."""
    check([(256, 1), (257, 1), (1, 1), (700, 1)], heads=(2, 1), head_dim=64, window=window, dtype=dtype)


def test_a_decode_of_the_most_segments(check) -> None:
    """Past 32 * 256 keys segments grow instead of their number."""
    check([(32 * 256 + 1, 1)], heads=(1, 1), head_dim=64, block_size=128, dtype=torch.bfloat16)


def test_kv_pages_narrower_than_the_queries(check) -> None:
    check(MIXED, heads=(4, 2), head_dim=64, dtype=torch.float32, kv_dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decode_does_not_depend_on_the_batch(triton_ops, paged_case, dtype: torch.dtype) -> None:
    """Bit for bit: alone, beside a longer sequence that makes the launch split more, and beside a prefill."""
    ops = triton_ops(dtype)
    case = paged_case([(300, 1), (700, 1), (40, 30)], heads=(2, 1), head_dim=64, dtype=dtype)
    together = ops.paged_attention(case.q, case.pages, case.meta, case.scale)
    alone = ops.paged_attention(
        case.q[:1],
        case.pages,
        replace(
            case.meta,
            query_start=case.meta.query_start[:2].clone(),
            seq_lens=case.meta.seq_lens[:1].clone(),
            block_tables=case.meta.block_tables[:1].clone(),
            max_query_len=1,
            max_seq_len=300,
            num_decodes=1,
        ),
        case.scale,
    )
    assert torch.equal(together[:1], alone)


def test_the_output_is_the_same_without_the_log_sum_exp(triton_ops, paged_case) -> None:
    ops = triton_ops(torch.float32)
    case = paged_case([(5, 1), (300, 1), (20, 6)], heads=(2, 1), head_dim=64)
    with_lse, _ = ops.paged_attention_lse(case.q, case.pages, case.meta, case.scale)
    assert torch.equal(ops.paged_attention(case.q, case.pages, case.meta, case.scale), with_lse)


def test_queries_may_be_a_view_of_a_fused_projection(triton_ops, paged_case) -> None:
    ops = triton_ops(torch.float32)
    case = paged_case([(5, 1), (20, 6)], heads=(4, 2), head_dim=64)
    fused = torch.full((len(case.q), 8, 64), torch.nan)
    fused[:, :4] = case.q
    dense = ops.paged_attention(case.q, case.pages, case.meta, case.scale)
    assert torch.equal(ops.paged_attention(fused[:, :4], case.pages, case.meta, case.scale), dense)


def test_decodes_are_found_when_nobody_counted_them(triton_ops, paged_case) -> None:
    ops = triton_ops(torch.float32)
    case = paged_case([(20, 1), (300, 1)], heads=(4, 2), head_dim=64)
    counted = ops.paged_attention(case.q, case.pages, case.meta, case.scale)
    uncounted = ops.paged_attention(case.q, case.pages, replace(case.meta, num_decodes=0), case.scale)
    assert torch.equal(counted, uncounted)


def captured(case, sequences: int, longest: int) -> AttentionMetadata:
    """The step's metadata as a captured step has it: padded with sequences of no tokens, whose table rows hold
    anything, and with no bound on the lengths but the longest of the model."""
    meta, padding = case.meta, sequences - len(case.meta.seq_lens)
    width = longest // case.pages.format.block_size
    tables = torch.full((sequences, width), 2**31 - 1, dtype=torch.int32)
    tables[: len(meta.seq_lens), : meta.block_tables.shape[1]] = meta.block_tables
    return replace(
        meta,
        query_start=torch.cat((meta.query_start, meta.query_start[-1].repeat(padding))),
        seq_lens=torch.nn.functional.pad(meta.seq_lens, (0, padding)),
        block_tables=tables,
        max_seq_len=longest,
        num_decodes=sequences if meta.max_query_len == 1 else meta.num_decodes,
    )


@pytest.mark.parametrize("longest", [256, 4096], ids=["one segment", "split"])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    "sequences", [[(5, 1), (200, 1), (70, 1)], [(5, 1), (50, 9), (17, 17)]], ids=["decodes", "mixed"]
)
def test_padded_sequences_change_nothing_and_write_nothing(paged_case, triton_ops, sequences, window, longest) -> None:
    """The grid and the split come from bounds; what is beyond the step's tokens stays as it was, to the last bit."""
    case = paged_case(sequences, heads=(4, 2), head_dim=64, window=window)
    expected, expected_lse = triton_ops(torch.float32).paged_attention_lse(
        case.q, case.pages, case.meta, case.scale, window
    )
    meta = captured(case, 8, longest)
    tokens = len(case.q)
    q = torch.cat((case.q, torch.full((3, 4, 64), torch.nan)))
    out, lse = torch.full_like(q, 7.0), torch.full(q.shape[:2], 7.0)
    for launch in attention_launches(q, case.pages, meta, case.scale, window, out, lse, SM80):
        launch.run()
    assert torch.equal(out[:tokens], expected)
    assert torch.equal(lse[:tokens], expected_lse)
    assert (out[tokens:] == 7.0).all()
    assert (lse[tokens:] == 7.0).all()


@pytest.mark.parametrize("longest", [16, 4096], ids=["one segment", "split"])
def test_a_query_without_keys_gives_zeros(paged_case, triton_ops, longest: int) -> None:
    """A padded sequence of one token, as some engines capture them."""
    case = paged_case([(5, 1), (9, 1)], heads=(2, 1), head_dim=64)
    meta = replace(case.meta, seq_lens=torch.tensor([5, 0], dtype=torch.int32), max_seq_len=longest)
    out, lse = triton_ops(torch.float32).paged_attention_lse(case.q, case.pages, meta, case.scale)
    assert out[0].any()
    assert not out[1].any()
    assert (lse[1] == -torch.inf).all()


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("queries", "keys"), [(2, 0), (2, 1), (90, 1), (90, 40), (40, 39)])
def test_queries_before_the_first_key_give_zeros(paged_case, triton_ops, reference, queries, keys, window) -> None:
    """Query i of n stands at key m - n + i: the other queries attend as if they were alone."""
    case = paged_case([(max(keys, 1), 1), (33, 1)], heads=(4, 2), head_dim=64)
    q = torch.randn(queries + 1, 4, 64)
    starts, lengths = ([0, n, n + 1] for n in (queries, min(queries, keys))), torch.tensor([keys, 33])
    meta, plain = (
        replace(
            case.meta,
            query_start=torch.tensor(start, dtype=torch.int32),
            seq_lens=lengths.int(),
            max_query_len=queries,
            num_decodes=0,
        )
        for start in starts
    )
    out, lse = triton_ops(torch.float32).paged_attention_lse(q, case.pages, meta, case.scale, window)
    keyless = max(0, queries - keys)
    assert not out[:keyless].any()
    assert (lse[:keyless] == -torch.inf).all()
    expected, expected_lse = reference.paged_attention_lse(
        q[keyless:],
        case.reference_pages,
        replace(plain, block_tables=case.reference_meta.block_tables),
        case.scale,
        window,
    )
    torch.testing.assert_close(out[keyless:], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse[keyless:], expected_lse, atol=1e-5, rtol=1e-5)


def test_pools_beyond_two_billion_elements_are_addressed(triton_ops, reference) -> None:
    """The pages are never touched but for one block, so they cost no memory."""
    block = 2**31 // (16 * 64) + 5
    page_format = PageFormat("canonical", 16, 1, 64, torch.float16)
    far = torch.empty(page_format.k_shape(block + 1), dtype=torch.float16)
    far[block] = torch.randn(16, 1, 64)
    near = far[block:].clone()
    q = torch.randn(1, 2, 64, dtype=torch.float16)
    ops = triton_ops(torch.float16)

    def attend(pages: torch.Tensor, index: int) -> torch.Tensor:
        tables = torch.tensor([[index]], dtype=torch.int32)
        one = torch.tensor([0], dtype=torch.int64)
        lengths = torch.tensor([16], dtype=torch.int32)
        meta = AttentionMetadata(torch.tensor([0, 1], dtype=torch.int32), lengths, tables, one, one, 1, 16, 1)
        return ops.paged_attention(q, KVPages(page_format, pages, pages), meta, 0.125)

    assert torch.equal(attend(far, block), attend(near, 0))


def test_pages_of_another_layout_are_refused(triton_ops, paged_case) -> None:
    case = paged_case([(20, 1)], heads=(4, 2), head_dim=64)
    packed = KVPages(replace(case.pages.format, layout="cpu_packed"), case.pages.k, case.pages.v)
    with pytest.raises(AssertionError, match="canonical"):
        triton_ops(torch.float32).paged_attention(case.q, packed, case.meta, case.scale)
