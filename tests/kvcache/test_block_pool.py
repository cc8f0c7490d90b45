"""The pool: order of eviction, reference counts, and what it refuses."""

import pytest

from shoal.kvcache.block_pool import NULL_BLOCK, BlockPool


def digest(name: str) -> bytes:
    return name.encode().ljust(32, b".")


def taken(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.take(count)
    assert blocks is not None
    return blocks


def test_a_new_pool_hands_out_every_block_but_the_null_block() -> None:
    pool = BlockPool(5)
    assert taken(pool, 4) == [1, 2, 3, 4]
    assert pool.num_free == 0
    assert pool.num_referenced == 4
    pool.check_integrity()


def test_taking_more_than_is_free_takes_nothing() -> None:
    pool = BlockPool(4)
    taken(pool, 2)
    assert pool.take(2) is None
    assert pool.free_list() == [3]


def test_blank_blocks_are_reused_before_cached_ones_which_go_oldest_first() -> None:
    pool = BlockPool(6)
    a, b, c, d, e = taken(pool, 5)
    for block, name in ((a, "a"), (c, "c"), (d, "d")):
        pool.register(block, digest(name))
    for block in (c, b, a, e, d):
        pool.release(block)
    assert pool.free_list() == [e, b, c, a, d]
    assert pool.num_cached == 3


def test_an_evicted_block_can_no_longer_be_found() -> None:
    pool = BlockPool(3)
    a, b = taken(pool, 2)
    pool.register(a, digest("a"))
    pool.register(b, digest("b"))
    pool.release(a)
    pool.release(b)
    assert taken(pool, 1) == [a]
    assert pool.lookup(digest("a")) is None
    assert pool.lookup(digest("b")) == b
    assert pool.num_evictions == 1
    pool.check_integrity()


def test_acquiring_a_cached_block_saves_it_from_eviction() -> None:
    pool = BlockPool(3)
    a, b = taken(pool, 2)
    pool.register(a, digest("a"))
    pool.register(b, digest("b"))
    pool.release(a)
    pool.release(b)
    pool.acquire(a)
    assert taken(pool, 1) == [b]
    assert pool.references(a) == 1
    assert pool.num_cached == 0


def test_a_shared_block_is_free_when_its_last_owner_goes() -> None:
    pool = BlockPool(2)
    (a,) = taken(pool, 1)
    pool.register(a, digest("a"))
    pool.acquire(a)
    pool.release(a)
    assert pool.num_free == 0
    pool.release(a)
    assert pool.num_free == 1


def test_of_two_blocks_with_one_prefix_the_first_is_found_and_the_second_stays_private() -> None:
    pool = BlockPool(3)
    a, b = taken(pool, 2)
    pool.register(a, digest("same"))
    pool.register(b, digest("same"))
    assert pool.lookup(digest("same")) == a
    assert pool.hash_of(b) is None
    pool.release(b)
    pool.release(a)
    assert pool.free_list() == [b, a]
    pool.check_integrity()


def test_bugs_of_the_caller_are_caught() -> None:
    pool = BlockPool(3)
    (a,) = taken(pool, 1)
    pool.register(a, digest("a"))
    with pytest.raises(AssertionError, match="another prefix"):
        pool.register(a, digest("b"))
    pool.release(a)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(a)
    with pytest.raises(AssertionError, match="blank"):
        pool.acquire(2)
    with pytest.raises(AssertionError):
        pool.acquire(NULL_BLOCK)
    with pytest.raises(AssertionError):
        pool.release(NULL_BLOCK)
    with pytest.raises(ValueError, match="null block"):
        BlockPool(1)


def test_check_integrity_sees_a_lost_block() -> None:
    pool = BlockPool(3)
    pool._references[2] = 1
    with pytest.raises(AssertionError):
        pool.check_integrity()
