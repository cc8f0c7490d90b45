"""The only one who moves KV blocks between owners: match, allocate, commit, fork, free.

The blocks of one sequence, at any time:

    | matched: shared, full, never written | own: written in order | room: allocated, not yet written |
    0                                 cached                 num_computed                 len(block_ids) * block_size

It knows ids and token ids only; the pages themselves belong to the runner, which copies a block when `fork` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.kvcache.block_pool import NULL_BLOCK, BlockPool
from shoal.kvcache.prefix import PrefixChain, root_hash


@dataclass(slots=True)
class PrefixCacheStats:
    """Monotonic totals, in tokens, over all `start` calls that asked the cache."""

    queried: int = 0
    hit: int = 0


@dataclass(frozen=True, slots=True)
class BlockLedger:
    """Every usable block is in one of three places: blank + cached + referenced == total."""

    blank: int
    cached: int
    referenced: int
    total: int

    @property
    def usage(self) -> float:
        """Share of the pool owned by sequences, 0 .. 1."""
        return self.referenced / self.total


@dataclass(slots=True)
class _Sequence:
    block_ids: list[int]
    chain: PrefixChain
    num_registered: int = 0
    """Blocks from the front whose hashes are in the index (or were found there)."""
    num_announced: int = 0
    """Blocks from the front that are registered or will be: the rest of them is in the making."""


class KVCacheManager:
    """Sequences are named by ids that the caller chooses and may use again after `free`.

    num_blocks: blocks in the pool, null block 0 included. block_size: tokens a block. namespace: model revision and KV
    format, the root of the hash chain. Using an id that was not started, or starting one twice, is a bug of the
    caller: KeyError and AssertionError.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True, namespace: bytes = b""
    ) -> None:
        assert block_size > 0
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.stats = PrefixCacheStats()
        self._pool = BlockPool(num_blocks)
        self._namespace = namespace
        self._sequences: dict[int, _Sequence] = {}
        self._makers: dict[bytes, int] = {}
        """Hash of a block in the making -> the sequence that announced it."""

    # Sizes ----------------------------------------------------------------------------------------------------------

    @property
    def num_total_blocks(self) -> int:
        """Blocks that sequences can own (the null block is not one)."""
        return self._pool.num_usable

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, those that still cache a prefix included."""
        return self._pool.num_free

    @property
    def num_evictions(self) -> int:
        """Monotonic: cached blocks overwritten because room was needed."""
        return self._pool.num_evictions

    @property
    def ledger(self) -> BlockLedger:
        pool = self._pool
        return BlockLedger(pool.num_free - pool.num_cached, pool.num_cached, pool.num_referenced, pool.num_usable)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` slots take."""
        return -(-num_tokens // self.block_size)

    def blocks_needed(self, seq_id: int, num_tokens: int) -> int:
        """Blocks that `allocate(seq_id, num_tokens)` would take from the pool."""
        return max(0, self.blocks_for(num_tokens) - len(self._sequences[seq_id].block_ids))

    def block_ids(self, seq_id: int) -> list[int]:
        """The block table: position p lies in block_ids[p // block_size]. A copy."""
        return list(self._sequences[seq_id].block_ids)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._sequences

    # The life of a sequence -----------------------------------------------------------------------------------------

    def prefix_chain(self, salt: str = "") -> PrefixChain:
        """A chain for a sequence that is to be started. Whoever waits and tries again keeps it, so that its tokens are
        hashed once. Sequences match only under equal salts."""
        return PrefixChain(root_hash(self._namespace, salt), self.block_size)

    def prefix_in_the_making(self, token_ids: Sequence[int], chain: PrefixChain) -> tuple[int, int] | None:
        """Whether a started sequence is computing the first block of `token_ids` that the cache lacks: its id, and how
        many tokens can be matched once it has computed all that the two have in common. None: nobody is."""
        if not self.enable_prefix_caching:
            return None
        index, most = 0, (len(token_ids) - 1) // self.block_size
        while index < most and self._pool.lookup(chain.hash_at(index, token_ids)) is not None:
            index += 1
        maker = self._makers.get(chain.hash_at(index, token_ids)) if index < most else None
        if maker is None:
            return None
        while index < most and self._makers.get(chain.hash_at(index, token_ids)) == maker:
            index += 1
        return maker, index * self.block_size

    def known_prefix(self, token_ids: Sequence[int], chain: PrefixChain) -> int:
        """Tokens from the front that a new sequence would not compute itself: they are cached, or a started sequence is
        computing them."""
        if not self.enable_prefix_caching:
            return 0
        index, most = 0, (len(token_ids) - 1) // self.block_size
        while index < most:
            block_hash = chain.hash_at(index, token_ids)
            if self._pool.lookup(block_hash) is None and block_hash not in self._makers:
                break
            index += 1
        return index * self.block_size

    def start(
        self, seq_id: int, token_ids: Sequence[int], chain: PrefixChain | None = None, *, use_cache: bool = True
    ) -> int:
        """Opens a sequence with the longest cached prefix of `token_ids`; returns how many tokens that covers.

        Only full blocks match, and never the last token: its logits are needed, so it is computed again (a wholly
        cached prompt recomputes its last block, into a block of its own). With `use_cache` False nothing is looked up
        (prompt logprobs need every position computed), but what is computed is still offered to others. `chain`: of
        `prefix_chain`, this sequence's own from here on; None: a new one without salt.
        """
        assert seq_id not in self._sequences, f"sequence {seq_id} is already started"
        sequence = _Sequence([], chain or self.prefix_chain())
        self._sequences[seq_id] = sequence
        if not (self.enable_prefix_caching and use_cache):
            return 0
        for index in range((len(token_ids) - 1) // self.block_size):
            block_id = self._pool.lookup(sequence.chain.hash_at(index, token_ids))
            if block_id is None:
                break
            self._pool.acquire(block_id)
            sequence.block_ids.append(block_id)
        sequence.num_registered = sequence.num_announced = len(sequence.block_ids)
        num_cached = sequence.num_registered * self.block_size
        self.stats.queried += len(token_ids)
        self.stats.hit += num_cached
        return num_cached

    def announce(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """Says that a sequence just started is going to compute all of `token_ids`, so that others who begin alike can
        wait for it. Holds until the blocks are committed or the sequence is freed."""
        if not self.enable_prefix_caching:
            return
        sequence = self._sequences[seq_id]
        sequence.num_announced = len(token_ids) // self.block_size
        for index in range(sequence.num_registered, sequence.num_announced):
            self._makers.setdefault(sequence.chain.hash_at(index, token_ids), seq_id)

    def allocate(self, seq_id: int, num_tokens: int) -> list[int] | None:
        """Grows the sequence until it has `num_tokens` slots. Returns the new block ids in order (maybe none), or None
        when the pool is short: then nothing has changed."""
        taken = self._pool.take(self.blocks_needed(seq_id, num_tokens))
        if taken:
            self._sequences[seq_id].block_ids.extend(taken)
        return taken

    def commit(self, seq_id: int, token_ids: Sequence[int], num_computed: int) -> None:
        """Says that the keys and values of the first `num_computed` of `token_ids` are in the pages. Blocks that are
        full by now can be matched from here on. `token_ids` is the whole sequence; it may hold more."""
        if not self.enable_prefix_caching:
            return
        sequence = self._sequences[seq_id]
        assert num_computed <= len(token_ids)
        num_full = num_computed // self.block_size
        assert num_full <= len(sequence.block_ids), "more tokens computed than there are slots"
        for index in range(sequence.num_registered, num_full):
            block_hash = sequence.chain.hash_at(index, token_ids)
            self._pool.register(sequence.block_ids[index], block_hash)
            self._retract(seq_id, block_hash)
        sequence.num_registered = max(sequence.num_registered, num_full)

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> list[tuple[int, int]] | None:
        """Opens `child_id` with the first `num_tokens` tokens of the parent, all of them computed.

        Full blocks are shared. A partly filled tail is the one block that both would write to, so the child gets its
        own: the (source, destination) pair to copy is returned, before either sequence runs again. An empty list when
        the cut falls between blocks; None, and no change, when there is no block for the copy.

            parent  | a | b | c. |        child  | a | b | d. |        copy c -> d
        """
        assert child_id not in self._sequences, f"sequence {child_id} is already started"
        parent = self._sequences[parent_id]
        num_full, num_in_tail = divmod(num_tokens, self.block_size)
        assert self.blocks_for(num_tokens) <= len(parent.block_ids), "the parent has no such tokens"
        tail = self._pool.take(1 if num_in_tail else 0)
        if tail is None:
            return None
        shared = parent.block_ids[:num_full]
        for block_id in shared:
            self._pool.acquire(block_id)
        registered = min(parent.num_registered, num_full)
        child = _Sequence(shared + tail, parent.chain.branch(num_full), registered, registered)
        self._sequences[child_id] = child
        return [(parent.block_ids[num_full], tail[0])] if tail else []

    def distrust(self, seq_id: int) -> None:
        """The sequence failed, and what is in its blocks may be why (a NaN): nobody is given them from here on, or
        all who begin alike would fail too, for as long as they keep the blocks from eviction. Those who share some
        now go on."""
        for block_id in self._sequences[seq_id].block_ids:
            self._pool.forget(block_id)

    def free(self, seq_id: int) -> None:
        """Gives all blocks back. Tail first, so that the tail of a prefix is evicted before its head: a head without
        its tail still matches, a tail without its head never does."""
        sequence = self._sequences.pop(seq_id)
        for block_hash in sequence.chain.hashes[sequence.num_registered : sequence.num_announced]:
            self._retract(seq_id, block_hash)
        for block_id in reversed(sequence.block_ids):
            self._pool.release(block_id)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every reference has its owner and the ledger is exact. For idle moments and the
        end of every test: O(blocks)."""
        self._pool.check_integrity()
        owners = [0] * self._pool.num_blocks
        for sequence in self._sequences.values():
            assert len(set(sequence.block_ids)) == len(sequence.block_ids), "a block stands twice in one table"
            for block_id in sequence.block_ids:
                owners[block_id] += 1
        assert owners[NULL_BLOCK] == 0, "the null block was handed out"
        assert all(n == self._pool.references(b) for b, n in enumerate(owners)), "references differ from owners"
        making = {
            (h, i) for i, s in self._sequences.items() for h in s.chain.hashes[s.num_registered : s.num_announced]
        }
        assert self._makers.items() <= making, "a block that nobody is making"
        ledger = self.ledger
        assert ledger.blank + ledger.cached + ledger.referenced == ledger.total, f"the ledger is off: {ledger}"

    def _retract(self, seq_id: int, block_hash: bytes) -> None:
        """This sequence makes this block no longer (of two that do, the first to announce it is known)."""
        if self._makers.get(block_hash) == seq_id:
            del self._makers[block_hash]
