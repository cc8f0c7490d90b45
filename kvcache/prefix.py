"""The identity of a prefix: a chain of SHA-256 digests, one a full block of tokens.

    root    = H("shoal/kv/root/1",  namespace, salt)
    block_i = H("shoal/kv/block/1", block_{i-1} or root, tokens of block i, extra keys)

Every field is length-prefixed, so no two different inputs have the same bytes. The namespace holds what makes the
numbers in a block differ for equal tokens (model revision, KV format, position scheme); the salt separates tenants.
A digest depends on nothing of the process, so it means the same on every node. SHA-256 and not something faster:
who finds a collision reads another tenant's cache.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

_ROOT_TAG = b"shoal/kv/root/1"
_BLOCK_TAG = b"shoal/kv/block/1"


def root_hash(namespace: bytes, salt: str) -> bytes:
    """The parent of every first block under this namespace and salt (32 bytes)."""
    return _digest(_ROOT_TAG, namespace, salt.encode("utf-8", "surrogatepass"))


def block_hash(parent: bytes, token_ids: Sequence[int], extra_keys: Sequence[bytes] = ()) -> bytes:
    """The digest of a full block after `parent`. `extra_keys`: tagged identities of what else shaped the contents
    (adapter weights, image embeddings). Raises struct.error for token ids that do not fit in 32 bits."""
    return _digest(_BLOCK_TAG, parent, struct.pack(f"<{len(token_ids)}i", *token_ids), *extra_keys)


def _digest(*parts: bytes) -> bytes:
    framed = b"".join(struct.pack("<q", len(part)) + part for part in parts)
    return hashlib.sha256(framed).digest()


class PrefixChain:
    """The digests of one sequence, extended as its blocks fill up. Each block is hashed once."""

    __slots__ = ("_block_size", "_extra_keys", "_root", "hashes")

    def __init__(self, root: bytes, block_size: int, extra_keys: Sequence[bytes] = ()) -> None:
        self._root = root
        self._block_size = block_size
        self._extra_keys = tuple(extra_keys)
        self.hashes: list[bytes] = []

    def hash_at(self, index: int, token_ids: Sequence[int]) -> bytes:
        """The digest of block `index` (all of whose tokens, and all before it, are in `token_ids`)."""
        size = self._block_size
        assert len(token_ids) >= (index + 1) * size, f"block {index} is not full"
        while len(self.hashes) <= index:
            start = len(self.hashes) * size
            parent = self.hashes[-1] if self.hashes else self._root
            self.hashes.append(block_hash(parent, token_ids[start : start + size], self._extra_keys))
        return self.hashes[index]

    def branch(self, num_blocks: int) -> PrefixChain:
        """A chain of its own that shares the first `num_blocks` blocks."""
        child = PrefixChain(self._root, self._block_size, self._extra_keys)
        child.hashes = self.hashes[:num_blocks]
        return child
