"""Prefix hits, allocation, forks and eviction order, case by case."""

import random

import pytest

from shoal.kvcache.manager import BlockLedger, KVCacheManager

BLOCK = 4


def manager_of(num_blocks: int = 17, **options: bool) -> KVCacheManager:
    return KVCacheManager(num_blocks, BLOCK, namespace=b"model", **options)


def run(manager: KVCacheManager, seq_id: int, tokens: list[int], salt: str = "") -> int:
    """Starts a sequence and computes all of it; returns the cached tokens."""
    cached = manager.start(seq_id, tokens, manager.prefix_chain(salt))
    assert manager.allocate(seq_id, len(tokens)) is not None
    manager.commit(seq_id, tokens, len(tokens))
    return cached


def test_a_wholly_cached_prompt_recomputes_its_last_block_into_a_block_of_its_own() -> None:
    manager = manager_of()
    tokens = list(range(8))
    assert run(manager, 1, tokens) == 0
    assert manager.start(2, tokens) == 4
    assert manager.allocate(2, 8) == [3]
    assert manager.block_ids(2) == [1, 3]
    manager.check_integrity()


@pytest.mark.parametrize(("length", "hit"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (20, 12)])
def test_a_hit_is_the_longest_run_of_full_blocks_short_of_the_last_token(length: int, hit: int) -> None:
    manager = manager_of()
    run(manager, 1, list(range(13)))
    manager.free(1)
    assert manager.start(2, list(range(length))) == hit
    assert (manager.stats.queried, manager.stats.hit) == (13 + length, hit)


def test_hits_equal_the_brute_force_longest_common_prefix_in_full_blocks() -> None:
    draw = random.Random(7)
    manager = manager_of(20_000)
    seen: list[list[int]] = []
    for seq_id in range(1000):
        stem = draw.choice(seen)[: draw.randrange(40)] if seen and draw.random() < 0.8 else []
        tokens = stem + [draw.randrange(3) for _ in range(draw.randrange(1, 24))]
        common = max((_common(tokens, other) for other in seen), default=0)
        expected = min(common, len(tokens) - 1) // BLOCK * BLOCK
        assert run(manager, seq_id, tokens) == expected
        seen.append(tokens)
    manager.check_integrity()


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix, of b's full blocks only."""
    limit = min(len(a), len(b) // BLOCK * BLOCK)
    return next((i for i in range(limit) if a[i] != b[i]), limit)


def test_salts_never_share() -> None:
    manager = manager_of()
    tokens = list(range(9))
    assert run(manager, 1, tokens, "tenant-a") == 0
    assert run(manager, 2, tokens, "tenant-b") == 0
    assert run(manager, 3, tokens, "tenant-a") == 8
    assert not set(manager.block_ids(1)) & set(manager.block_ids(2))


def test_a_block_can_be_matched_only_once_it_is_computed() -> None:
    manager = manager_of()
    tokens = list(range(9))
    manager.start(1, tokens)
    manager.allocate(1, 9)
    assert manager.start(2, tokens) == 0
    manager.commit(1, tokens, 5)
    assert manager.start(3, tokens) == 4


def test_not_using_the_cache_neither_hits_nor_keeps_others_from_hitting() -> None:
    manager = manager_of()
    tokens = list(range(9))
    run(manager, 1, tokens)
    assert manager.start(2, tokens, use_cache=False) == 0
    assert manager.allocate(2, 9) == [4, 5, 6]
    manager.commit(2, tokens, 9)
    manager.free(1)
    manager.free(2)
    assert manager.start(3, tokens) == 8
    assert manager.block_ids(3) == [1, 2]


def test_without_prefix_caching_everything_is_blank_when_idle() -> None:
    manager = manager_of(enable_prefix_caching=False)
    assert run(manager, 1, list(range(9))) == 0
    assert run(manager, 2, list(range(9))) == 0
    manager.free(1)
    manager.free(2)
    assert manager.ledger == BlockLedger(blank=16, cached=0, referenced=0, total=16)


def test_allocation_is_all_or_nothing() -> None:
    manager = manager_of(5)
    manager.start(1, [0])
    manager.start(2, [1])
    assert manager.allocate(1, 9) == [1, 2, 3]
    assert manager.blocks_needed(2, 8) == 2
    assert manager.allocate(2, 8) is None
    assert manager.block_ids(2) == []
    assert manager.num_free_blocks == 1
    assert manager.allocate(2, 4) == [4]
    assert manager.allocate(2, 3) == []
    assert manager.ledger.usage == 1.0
    manager.check_integrity()


def test_tails_are_evicted_before_heads_and_old_sequences_before_new_ones() -> None:
    manager = manager_of(7)
    old, new = list(range(12)), list(range(100, 112))
    run(manager, 1, old)
    run(manager, 2, new)
    manager.free(1)
    manager.free(2)
    manager.start(3, [7])
    manager.allocate(3, 8)
    assert manager.block_ids(3) == [3, 2]
    assert manager.num_evictions == 2
    assert manager.start(4, [*old, 0]) == 4
    assert manager.start(5, [*new, 0]) == 12


def test_a_hit_makes_a_prefix_young_again() -> None:
    manager = manager_of(5)
    run(manager, 1, list(range(5)))
    run(manager, 2, list(range(50, 55)))
    manager.free(1)
    manager.free(2)
    assert manager.start(3, list(range(5))) == 4
    manager.free(3)
    manager.start(4, [9])
    manager.allocate(4, 12)
    assert manager.start(5, list(range(5))) == 4


def test_a_fork_shares_full_blocks_and_copies_the_tail() -> None:
    manager = manager_of()
    tokens = list(range(10))
    run(manager, 1, tokens)
    assert manager.fork(1, 2, 10) == [(3, 4)]
    assert manager.block_ids(2) == [1, 2, 4]
    assert manager.ledger.referenced == 4
    assert manager.fork(1, 3, 8) == []
    assert manager.block_ids(3) == [1, 2]
    manager.free(1)
    assert manager.allocate(2, 12) == []
    assert manager.allocate(2, 13) is not None
    manager.check_integrity()


@pytest.mark.parametrize(("prompt", "output", "n"), [(161, 338, 2), (161, 338, 6), (160, 7, 4), (3, 1, 5)])
def test_forks_take_the_blocks_that_the_formula_says(prompt: int, output: int, n: int) -> None:
    """floor(P/B) + n * (ceil((P+O)/B) - floor(P/B))"""
    manager = manager_of(2000)
    run(manager, 0, list(range(prompt)))
    for child in range(1, n):
        assert manager.fork(0, child, prompt) is not None
    for seq_id in range(n):
        assert manager.allocate(seq_id, prompt + output) is not None
    full = prompt // BLOCK
    assert manager.ledger.referenced == full + n * (-(-(prompt + output) // BLOCK) - full)


def test_a_fork_without_room_for_the_copy_changes_nothing() -> None:
    manager = manager_of(4)
    run(manager, 1, list(range(10)))
    before = manager.ledger
    assert manager.fork(1, 2, 10) is None
    assert manager.ledger == before
    assert 2 not in manager
    assert manager.fork(1, 2, 8) == []
    manager.check_integrity()


def test_what_a_fork_writes_is_hashed_under_its_own_tokens() -> None:
    manager = manager_of()
    stem = list(range(6))
    run(manager, 1, stem)
    manager.fork(1, 2, 6)
    manager.commit(1, [*stem, 70, 71], 8)
    manager.commit(2, [*stem, 80, 81], 8)
    assert manager.start(3, [*stem, 70, 71, 0]) == 8
    assert manager.start(4, [*stem, 80, 81, 0]) == 8
    assert manager.block_ids(3) == manager.block_ids(1)
    assert manager.block_ids(4) == manager.block_ids(2)


def test_bugs_of_the_caller_are_caught() -> None:
    manager = manager_of()
    run(manager, 1, [1, 2, 3])
    with pytest.raises(AssertionError, match="already started"):
        manager.start(1, [1])
    with pytest.raises(AssertionError, match="no such tokens"):
        manager.fork(1, 2, 5)
    with pytest.raises(AssertionError, match="slots"):
        manager.commit(1, list(range(8)), 8)
    manager.free(1)
    with pytest.raises(KeyError):
        manager.free(1)


def test_blocks_of_a_sequence_that_failed_are_matched_by_nobody() -> None:
    manager = manager_of()
    tokens = list(range(13))
    assert [run(manager, 1, tokens), run(manager, 2, tokens)] == [0, 12]
    manager.distrust(2)
    manager.free(2)
    manager.check_integrity()
    assert run(manager, 3, tokens) == 0  # though sequence 1 still runs on the blocks
    assert run(manager, 4, tokens) == 12
    for seq_id in (1, 3, 4):
        manager.free(seq_id)
    manager.check_integrity()
    assert (manager.num_free_blocks, manager.ledger.cached) == (manager.num_total_blocks, 3)


def test_what_is_announced_is_in_the_making_until_it_is_committed_or_freed() -> None:
    manager = manager_of()
    tokens = list(range(14))
    chain = manager.prefix_chain()
    assert manager.prefix_in_the_making(tokens, chain) is None
    manager.start(1, tokens)
    manager.allocate(1, 14)
    manager.announce(1, tokens)
    assert manager.prefix_in_the_making([*tokens, 0], chain) == (1, 12)
    assert manager.prefix_in_the_making(tokens[:8], manager.prefix_chain()) == (1, 4)  # never the last token
    assert manager.prefix_in_the_making([*tokens[:9], 50, 51], manager.prefix_chain()) == (1, 8)
    assert manager.prefix_in_the_making([50, *tokens], manager.prefix_chain()) is None
    assert manager.prefix_in_the_making(tokens, manager.prefix_chain("salt")) is None
    manager.commit(1, tokens, 8)
    assert manager.prefix_in_the_making([*tokens, 0], chain) == (1, 12)
    assert manager.prefix_in_the_making([*tokens[:9], 50, 51], manager.prefix_chain()) is None
    manager.check_integrity()
    manager.free(1)
    assert manager.prefix_in_the_making([*tokens, 0], chain) is None
    assert manager.start(2, tokens, chain) == 8
    manager.check_integrity()


def test_of_two_makers_the_first_is_named_and_the_other_when_it_has_gone_is_not() -> None:
    manager = manager_of()
    tokens = list(range(9))
    for seq_id in (1, 2):
        manager.start(seq_id, tokens)
        manager.allocate(seq_id, 9)
        manager.announce(seq_id, tokens)
    assert manager.prefix_in_the_making(tokens, manager.prefix_chain()) == (1, 8)
    manager.free(2)
    assert manager.prefix_in_the_making(tokens, manager.prefix_chain()) == (1, 8)
    manager.commit(1, tokens, 9)
    assert manager.prefix_in_the_making(tokens, manager.prefix_chain()) is None
    manager.check_integrity()


def test_a_known_prefix_is_cached_or_in_the_making() -> None:
    manager = manager_of()
    tokens = list(range(16))
    run(manager, 1, tokens[:8])
    manager.free(1)
    assert manager.known_prefix([*tokens, 0], manager.prefix_chain()) == 8
    manager.start(2, tokens)
    manager.announce(2, tokens)
    assert manager.known_prefix([*tokens, 0], manager.prefix_chain()) == 16
    assert manager.known_prefix(tokens, manager.prefix_chain()) == 12  # never the last token
    assert manager.known_prefix([*tokens[:9], 50, 51], manager.prefix_chain()) == 8
    assert manager.known_prefix([*tokens, 0], manager.prefix_chain("salt")) == 0
    assert manager_of(enable_prefix_caching=False).known_prefix(tokens, manager.prefix_chain()) == 0
