"""Serving must not stop to compile: what changes from step to step is no part of what a kernel is compiled for."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed (pip install 'shoal[gpu]')")

from shoal.kernels.triton_ops import budgets
from shoal.kernels.triton_ops.aot import specialised_source
from shoal.kernels.triton_ops.launch import INTERPRETED, SM90

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")


@pytest.mark.parametrize("launch", [0, 1], ids=["attention", "merge"])
def test_longer_sequences_run_the_same_split_decode(launch: int) -> None:
    """Lengths, table widths (257 blocks, then 64, a multiple of 16) and numbers of segments (17, 4) differ."""
    variants = {
        specialised_source(
            budgets.attention_case((32, 8), 128, decode=True, max_seq_len=length, index=launch)(SM90)
        ).hash()
        for length in (257 * 16, 1024)
    }
    assert len(variants) == 1


@pytest.mark.parametrize(("decode", "launch"), [(False, 0), (True, 0), (True, 1)], ids=["prefill", "decode", "merge"])
def test_longer_sequences_run_the_same_latent_attention(decode: bool, launch: int) -> None:
    variants = {
        specialised_source(budgets.latent_case(16, decode=decode, max_seq_len=length, index=launch)(SM90)).hash()
        for length in (257 * 16, 1024)
    }
    assert len(variants) == 1


@pytest.mark.parametrize("launch", [0, 1, 2], ids=["maxima", "masses", "draw"])
def test_any_number_of_rows_is_drawn_by_the_same_kernels(launch: int) -> None:
    variants = {
        specialised_source(budgets.sampling_case(launch, rows=rows)(SM90)).hash() for rows in (1, 2, 7, 16, 512)
    }
    assert len(variants) == 1


@pytest.mark.parametrize("normed", [False, True])
def test_any_number_of_tokens_is_rotated_and_stored_by_the_same_kernel(normed: bool) -> None:
    variants = {
        specialised_source(budgets.rotary_store_kv_case(tokens=tokens, normed=normed)(SM90)).hash()
        for tokens in (1, 5, 16, 300)
    }
    assert len(variants) == 1


@pytest.mark.parametrize("numbers", [(1, 2, 5, 16, 2048), (2049, 2064, 8192)], ids=["few", "many"])
def test_any_number_of_rows_visits_experts_by_one_of_two_kernels(numbers: tuple[int, ...]) -> None:
    variants = {specialised_source(budgets.grouped_case(rows, 128, (1536, 2048))(SM90)).hash() for rows in numbers}
    assert len(variants) == 1


def test_any_number_of_rows_is_combined_by_the_same_kernel() -> None:
    variants = {specialised_source(budgets.combine_case(rows=rows)(SM90)).hash() for rows in (1, 5, 16, 300)}
    assert len(variants) == 1


@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
def test_one_block_is_no_special_case(decode: bool) -> None:
    variants = {
        specialised_source(budgets.attention_case((9, 3), 64, decode=decode, max_seq_len=length)(SM90)).hash()
        for length in (16, 48, 256)
    }
    assert len(variants) == 1
