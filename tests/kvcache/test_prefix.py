"""The identity of prefixes: the same everywhere, different wherever contents could differ."""

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.kvcache.prefix import PrefixChain, block_hash, root_hash

GOLDEN = "dfc03bfc39b4e4ffa3d83fef7bcc1049b5012cc041f8e5a69ed9996d29cdbbd9"


def chain_of(token_ids: list[int], *, block_size: int = 4, namespace: bytes = b"model", salt: str = "") -> list[bytes]:
    chain = PrefixChain(root_hash(namespace, salt), block_size)
    if len(token_ids) >= block_size:
        chain.hash_at(len(token_ids) // block_size - 1, token_ids)
    return chain.hashes


def test_the_digest_is_the_same_in_every_process_and_every_release() -> None:
    """A changed value here silently empties every cache outside the process that is keyed by it."""
    code = (
        "from shoal.kvcache.prefix import *;print(block_hash(root_hash(b'model@1', 'tenant'), [1, 2, 70000, 3]).hex())"
    )
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert printed.stdout.strip() == GOLDEN, printed.stderr


def test_a_block_is_identified_by_everything_before_it() -> None:
    first = chain_of([1, 2, 3, 4, 5, 6, 7, 8])
    second = chain_of([9, 2, 3, 4, 5, 6, 7, 8])
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert chain_of([1, 2, 3, 4, 5, 6, 7, 0])[0] == first[0]


def test_salts_and_namespaces_separate() -> None:
    tokens = [1, 2, 3, 4]
    digests = {
        chain_of(tokens, namespace=namespace, salt=salt)[0]
        for namespace, salt in [(b"m", ""), (b"m", "a"), (b"m", "b"), (b"ma", ""), (b"", "ma"), (b"n", "a")]
    }
    assert len(digests) == 6


def test_extra_keys_are_framed() -> None:
    root = root_hash(b"", "")
    keys: list[tuple[bytes, ...]] = [(), (b"",), (b"ab",), (b"a", b"b"), (b"", b"ab")]
    assert len({block_hash(root, [1], extra) for extra in keys}) == len(keys)


def test_only_full_blocks_have_a_digest() -> None:
    assert len(chain_of([1] * 11)) == 2
    with pytest.raises(AssertionError, match="not full"):
        PrefixChain(root_hash(b"", ""), 4).hash_at(0, [1, 2, 3])


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 8), st.data())
def test_extending_step_by_step_or_branching_equals_hashing_at_once(
    tokens: list[int], block_size: int, data: st.DataObject
) -> None:
    whole = chain_of(tokens, block_size=block_size)
    step_by_step = PrefixChain(root_hash(b"model", ""), block_size)
    for length in range(len(tokens) + 1):
        if length and length % block_size == 0:
            step_by_step.hash_at(length // block_size - 1, tokens[:length])
    assert step_by_step.hashes == whole
    if whole:
        cut = data.draw(st.integers(0, len(whole)))
        branch = step_by_step.branch(cut)
        branch.hash_at(len(whole) - 1, tokens)
        assert branch.hashes == whole
