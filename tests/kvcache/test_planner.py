"""The planner's arithmetic, its ledger, and what it refuses."""

from dataclasses import replace

import pytest

from shoal.configs.errors import ConfigError
from shoal.kvcache.planner import MemoryRequest, plan_memory
from shoal.kvcache.spec import KVCacheSpec, decoder_specs

MIB = 1 << 20
SMOLLM2 = MemoryRequest(
    specs=(KVCacheSpec.heads(30, 3, 64, 4),),
    block_size=16,
    max_model_len=2048,
    max_num_seqs=32,
    weights_bytes=513 * MIB,
    activation_bytes=60 * MIB,
    kv_bytes=512 * MIB,
)
BYTES_PER_BLOCK = 16 * 46_080


def test_an_explicit_pool_is_cut_into_whole_blocks() -> None:
    plan = plan_memory(SMOLLM2)
    assert plan.num_blocks == 512 * MIB // BYTES_PER_BLOCK == 728
    assert plan.bytes_per_token == 46_080
    assert plan.num_tokens == 727 * 16
    assert plan.full_sequences == 727 // 128 == 5
    assert plan.kv_bytes == 728 * BYTES_PER_BLOCK


def test_the_pool_takes_what_weights_and_activations_leave_of_the_budget() -> None:
    plan = plan_memory(replace(SMOLLM2, kv_bytes=None, total_bytes=1024 * MIB))
    assert plan.num_blocks == (1024 - 573) * MIB // BYTES_PER_BLOCK
    assert 573 * MIB + plan.kv_bytes <= 1024 * MIB < 573 * MIB + plan.kv_bytes + BYTES_PER_BLOCK


def test_the_ledger_adds_up_and_reads_as_a_table() -> None:
    plan = plan_memory(replace(SMOLLM2, total_bytes=2048 * MIB))
    sizes = {what.strip(): size for what, size, _ in plan.ledger}
    assert sizes["weights"] + sizes["activations"] + sizes["KV cache"] == sizes["sum"]
    assert plan.render().splitlines() == [
        "weights        513 MiB",
        "activations     60 MiB  largest step, upper estimate",
        "KV cache     511.9 MiB  11,632 tokens = 727 blocks of 16 + 1 null block, 46,080 bytes a token",
        "sum          1.059 GiB  5 sequences of 2,048 tokens, or 32 of 363",
        "budget           2 GiB  963.1 MiB unused",
    ]


def test_layer_groups_are_listed_and_add_up_to_the_pool() -> None:
    plan = plan_memory(replace(SMOLLM2, specs=decoder_specs([512] * 15 + [None] * 3, 1, 256, 4)))
    groups = [(size, note) for what, size, note in plan.ledger if what.startswith("  ")]
    assert sum(size for size, _ in groups) == plan.kv_bytes
    assert groups[0][1].startswith("window of 512; all tokens are kept")


def test_exactly_one_sequence_is_enough_and_one_byte_less_is_refused() -> None:
    enough = (128 + 1) * BYTES_PER_BLOCK
    assert plan_memory(replace(SMOLLM2, kv_bytes=enough)).full_sequences == 1
    with pytest.raises(ConfigError) as caught:
        plan_memory(replace(SMOLLM2, kv_bytes=enough - 1))
    assert caught.value.param == "max_model_len"
    assert "max_model_len=2048 tokens takes 128 blocks of 16 tokens x 46080 bytes" in caught.value.message
    assert "Set max_model_len to 2032 or less, or give the KV cache 1 B more." in caught.value.message


def test_what_the_advice_says_works() -> None:
    request = replace(SMOLLM2, kv_bytes=20 * MIB)
    with pytest.raises(ConfigError, match="Set max_model_len to 432 or less"):
        plan_memory(request)
    assert plan_memory(replace(request, max_model_len=432)).full_sequences == 1
    with pytest.raises(ConfigError):
        plan_memory(replace(request, max_model_len=433))


def test_a_pool_of_no_blocks_at_all_is_refused_without_advising_zero_tokens() -> None:
    with pytest.raises(ConfigError, match=r"room for 0 tokens\)\. Give the KV cache"):
        plan_memory(replace(SMOLLM2, kv_bytes=1))


def test_weights_that_fill_the_budget_are_refused_with_the_sum() -> None:
    with pytest.raises(ConfigError, match="Weights 513 MiB \\+ activations 60 MiB = 573 MiB") as caught:
        plan_memory(replace(SMOLLM2, kv_bytes=None, total_bytes=500 * MIB))
    assert caught.value.param == "memory_budget"
    assert "73 MiB too much" in caught.value.message


def test_a_pool_that_breaks_the_budget_is_refused_with_the_largest_that_does_not() -> None:
    request = replace(SMOLLM2, total_bytes=1000 * MIB)
    with pytest.raises(ConfigError, match="Lower the KV cache to 427 MiB") as caught:
        plan_memory(request)
    assert caught.value.param == "kv_cache_memory"
    assert plan_memory(replace(request, kv_bytes=427 * MIB)).num_blocks > 0


def test_ranks_that_share_sequences_hold_a_part_of_each_block() -> None:
    """The same pool on each of four ranks holds four times the tokens; a block is a page on each of them."""
    one, four = plan_memory(SMOLLM2), plan_memory(replace(SMOLLM2, context_parallel_size=4))
    assert (four.num_blocks, four.kv_bytes, four.bytes_per_token) == (one.num_blocks, one.kv_bytes, one.bytes_per_token)
    assert four.block_size == 4 * one.block_size
    assert four.num_tokens == 4 * one.num_tokens
    assert four.full_sequences == 727 // 32 == 22
    assert "46,080 bytes a token on one of 4 ranks, on average 11,520 on each" in four.render()
    assert "46,080 bytes a token" in one.render()


def test_a_context_is_refused_when_all_ranks_together_cannot_hold_it() -> None:
    request = replace(SMOLLM2, context_parallel_size=2, kv_bytes=65 * BYTES_PER_BLOCK)
    assert plan_memory(request).full_sequences == 1
    with pytest.raises(ConfigError, match=r"takes 65 blocks of 16 tokens on each of 2 ranks x 46080 bytes"):
        plan_memory(replace(request, max_model_len=2049))
