"""The pool of physical KV blocks: who owns each, which is evicted next, and which block holds which prefix.

A block is in exactly one of three states:

    referenced   one or more owners (sequences); never evicted
    cached       no owner, but its contents are a known prefix: in the free list and in the hash index
    blank        no owner, nothing worth keeping: in the free list only

The free list is a doubly linked list threaded through two integer arrays, and its order *is* the eviction policy:
`take` pops the head; blank blocks are pushed at the head, cached ones at the tail, so that nothing worth keeping is
overwritten while a blank block is left, and cached blocks go least recently released first. Every operation on one
block is O(1).
"""

from __future__ import annotations

NULL_BLOCK = 0
"""Never handed out: padding of block tables points at it, so a padded entry cannot alias live data. Its links are the
two ends of the free list, which spares every insertion and removal its special cases."""


class BlockPool:
    """`num_blocks` counts the null block, so `num_blocks - 1` can be handed out. Ids are 1 .. num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and at least one more, got num_blocks={num_blocks}")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._previous = [num_blocks - 1, *range(num_blocks - 1)]
        self._num_free = num_blocks - 1
        self._num_cached = 0
        self.num_evictions = 0
        """Monotonic: cached blocks that were overwritten because room was needed."""

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that `take` can hand out now: blank and cached ones."""
        return self._num_free

    @property
    def num_cached(self) -> int:
        """Free blocks whose prefix can still be matched."""
        return self._num_cached

    @property
    def num_referenced(self) -> int:
        return self.num_usable - self._num_free

    def references(self, block_id: int) -> int:
        return self._references[block_id]

    def hash_of(self, block_id: int) -> bytes | None:
        return self._hashes[block_id]

    def lookup(self, block_hash: bytes) -> int | None:
        """The block that holds this prefix, referenced or cached. It is not acquired by this."""
        return self._index.get(block_hash)

    def take(self, count: int) -> list[int] | None:
        """Hands out `count` blocks with one reference each, or none at all. Evicts from the head of the free list."""
        if count > self._num_free:
            return None
        taken = []
        for _ in range(count):
            block_id = self._next[NULL_BLOCK]
            self._unlink(block_id)
            if self._hashes[block_id] is not None:
                self._forget(block_id)
                self._num_cached -= 1
                self.num_evictions += 1
            self._references[block_id] = 1
            taken.append(block_id)
        return taken

    def acquire(self, block_id: int) -> None:
        """One more owner of a block that is referenced or cached."""
        assert block_id != NULL_BLOCK
        if self._references[block_id] == 0:
            assert self._hashes[block_id] is not None, f"block {block_id} is blank: nothing in it to share"
            self._unlink(block_id)
            self._num_cached -= 1
        self._references[block_id] += 1

    def release(self, block_id: int) -> None:
        """One owner less; the last one returns the block to the free list."""
        assert block_id != NULL_BLOCK
        assert self._references[block_id] > 0, f"block {block_id} freed twice"
        self._references[block_id] -= 1
        if self._references[block_id] > 0:
            return
        if self._hashes[block_id] is None:
            self._link_between(block_id, NULL_BLOCK, self._next[NULL_BLOCK])
        else:
            self._link_between(block_id, self._previous[NULL_BLOCK], NULL_BLOCK)
            self._num_cached += 1

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Makes the contents of a referenced, full block findable.

        Two sequences can compute the same prefix at the same time; the first block registered is the one found, and
        the other stays private (block tables are never rewritten to merge them), hence blank once released.
        """
        assert self._references[block_id] > 0, f"block {block_id} has no owner"
        known = self._hashes[block_id]
        assert known is None or known == block_hash, f"block {block_id} already holds another prefix"
        if known is None and block_hash not in self._index:
            self._hashes[block_id] = block_hash
            self._index[block_hash] = block_id

    def forget(self, block_id: int) -> None:
        """Its contents are not to be trusted: nobody finds this referenced block any more, and it ends blank."""
        assert self._references[block_id] > 0, f"block {block_id} has no owner"
        if self._hashes[block_id] is not None:
            self._forget(block_id)

    def free_list(self) -> list[int]:
        """Block ids in the order in which `take` would hand them out."""
        order = []
        block_id = self._next[NULL_BLOCK]
        while block_id != NULL_BLOCK:
            order.append(block_id)
            block_id = self._next[block_id]
            assert len(order) < self.num_blocks, "the free list has a cycle"
        return order

    def check_integrity(self) -> None:
        """Raises AssertionError if the list, the counts and the index disagree. O(num_blocks)."""
        order = self.free_list()
        assert len(order) == self._num_free, "the free count is wrong"
        assert all(self._previous[self._next[b]] == b for b in [NULL_BLOCK, *order]), "a broken link"
        assert all(self._references[b] == 0 for b in order), "a referenced block is in the free list"
        assert self._references[NULL_BLOCK] == 0, "the null block has an owner"
        assert self._hashes[NULL_BLOCK] is None, "the null block holds a prefix"
        referenced = sum(count > 0 for count in self._references)
        cached = sum(self._hashes[b] is not None for b in order)
        assert cached == self._num_cached, "the cached count is wrong"
        assert len(order) + referenced == self.num_usable, "blocks are lost"
        assert all(self._hashes[b] == h for h, b in self._index.items()), "the index points at another prefix"
        assert len(self._index) == sum(h is not None for h in self._hashes), "a hash that cannot be found"

    def _forget(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        assert block_hash is not None
        del self._index[block_hash]
        self._hashes[block_id] = None

    def _unlink(self, block_id: int) -> None:
        before, after = self._previous[block_id], self._next[block_id]
        self._next[before] = after
        self._previous[after] = before
        self._num_free -= 1

    def _link_between(self, block_id: int, before: int, after: int) -> None:
        self._next[before] = self._previous[after] = block_id
        self._previous[block_id], self._next[block_id] = before, after
        self._num_free += 1
