"""10^5 random operations against a dense model that keeps what every sequence must find in its slots."""

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from shoal.kvcache.manager import KVCacheManager

BLOCK = 4
NUM_BLOCKS = 40
MAX_SEQUENCES = 14
NUM_OPERATIONS = 100_000


@dataclass
class Reference:
    """A sequence and, per computed token, what its slot must hold: a value that depends on the salt, on the token and
    on every token before it, as keys and values do."""

    salt: str
    tokens: list[int]
    contents: list[int]


class Driver:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.manager = KVCacheManager(NUM_BLOCKS, BLOCK, namespace=b"model")
        self.pages = [0] * (NUM_BLOCKS * BLOCK)
        self.sequences: dict[int, Reference] = {}
        self.next_id = 0
        self.counts: Counter[str] = Counter()

    def step(self) -> None:
        operations = [self.start, *[self.advance] * 12, self.fork, self.fork, self.follow, self.free, self.free]
        self.random.choice(operations)()

    def start(self) -> None:
        if len(self.sequences) >= MAX_SEQUENCES:
            return
        tokens = [self.random.randrange(2) for _ in range(self.random.randrange(1, 25))]
        reference = Reference(self.random.choice("ab"), tokens, [])
        seq_id = self.new_id()
        free = self.manager.num_free_blocks
        use_cache = self.random.random() < 0.9
        cached = self.manager.start(seq_id, tokens, self.manager.prefix_chain(reference.salt), use_cache=use_cache)
        assert cached % BLOCK == 0
        assert cached < len(tokens)
        assert use_cache or cached == 0
        reference.contents = self.values(reference, 0, cached)
        self.sequences[seq_id] = reference
        if self.random.random() < 0.5:
            self.manager.announce(seq_id, tokens)
        self.counts["hits"] += cached > 0
        self.counts["revived"] += self.manager.num_free_blocks < free
        self.check_contents(seq_id)

    def advance(self) -> None:
        """A chunk of prefill, or one decoded token."""
        seq_id = self.pick()
        if seq_id is None:
            return
        reference = self.sequences[seq_id]
        done = len(reference.contents)
        if done == len(reference.tokens):
            if done > 60:
                return
            reference.tokens.append(self.random.randrange(2))
        end = self.random.randint(done + 1, len(reference.tokens))
        table = self.manager.block_ids(seq_id)
        needed, free = self.manager.blocks_needed(seq_id, end), self.manager.num_free_blocks
        added = self.manager.allocate(seq_id, end)
        if added is None:
            self.counts["short"] += 1
            assert needed > free
            assert self.manager.num_free_blocks == free
            assert self.manager.block_ids(seq_id) == table
            return
        assert len(added) == needed
        assert 0 not in added
        assert self.manager.block_ids(seq_id) == table + added
        self.write(seq_id, done, end)
        self.manager.commit(seq_id, reference.tokens, end)
        self.check_contents(seq_id)

    def write(self, seq_id: int, start: int, end: int) -> None:
        reference, table, pool = self.sequences[seq_id], self.manager.block_ids(seq_id), self.manager._pool
        values = self.values(reference, start, end)
        for position, value in zip(range(start, end), values, strict=True):
            block = table[position // BLOCK]
            assert pool.references(block) == 1, "a shared block is written"
            assert pool.hash_of(block) is None, "a block that others can find is written"
            self.pages[block * BLOCK + position % BLOCK] = value
        reference.contents += values

    def fork(self) -> None:
        parent_id = self.pick()
        if parent_id is None or len(self.sequences) >= MAX_SEQUENCES or not self.sequences[parent_id].contents:
            return
        parent, child_id = self.sequences[parent_id], self.new_id()
        cut = self.random.randint(1, len(parent.contents))
        free = self.manager.num_free_blocks
        copies = self.manager.fork(parent_id, child_id, cut)
        if copies is None:
            self.counts["fork refused"] += 1
            assert free == 0
            assert cut % BLOCK > 0
            assert child_id not in self.manager
            return
        assert len(copies) == (cut % BLOCK > 0)
        assert self.manager.num_free_blocks == free - len(copies)
        for source, target in copies:
            self.pages[target * BLOCK : (target + 1) * BLOCK] = self.pages[source * BLOCK : (source + 1) * BLOCK]
        self.sequences[child_id] = Reference(parent.salt, parent.tokens[:cut], parent.contents[:cut])
        self.counts["forks"] += 1
        self.check_contents(child_id)

    def follow(self) -> None:
        """Who is said to be making a prefix has it among its tokens, under the same salt, and has not computed it."""
        seq_id = self.pick()
        stem = [] if seq_id is None else self.sequences[seq_id].tokens[: self.random.randrange(25)]
        tokens = [*stem, *(self.random.randrange(2) for _ in range(self.random.randrange(1, 9)))]
        salt = self.random.choice("ab")
        found = self.manager.prefix_in_the_making(tokens, self.manager.prefix_chain(salt))
        if found is not None:
            maker, shared = self.sequences[found[0]], found[1]
            assert maker.salt == salt
            assert shared % BLOCK == 0
            assert maker.tokens[:shared] == tokens[:shared]
            assert len(maker.contents) < shared < len(tokens)
            self.counts["followed"] += 1

    def free(self) -> None:
        seq_id = self.pick()
        if seq_id is not None:
            self.manager.free(seq_id)
            del self.sequences[seq_id]

    def check_contents(self, seq_id: int) -> None:
        reference, table = self.sequences[seq_id], self.manager.block_ids(seq_id)
        found = [value for block in table for value in self.pages[block * BLOCK : (block + 1) * BLOCK]]
        assert found[: len(reference.contents)] == reference.contents

    def check_all(self) -> None:
        self.manager.check_integrity()
        for seq_id in self.sequences:
            self.check_contents(seq_id)
        ledger = self.manager.ledger
        assert ledger.blank + ledger.cached + ledger.referenced == ledger.total == NUM_BLOCKS - 1
        owned = {block for seq_id in self.sequences for block in self.manager.block_ids(seq_id)}
        assert ledger.referenced == len(owned)

    def values(self, reference: Reference, start: int, end: int) -> list[int]:
        value = reference.contents[start - 1] if start else hash((reference.salt, "root"))
        result = []
        for token in reference.tokens[start:end]:
            value = hash((value, token))
            result.append(value)
        return result

    def pick(self) -> int | None:
        return self.random.choice(list(self.sequences)) if self.sequences else None

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id


@pytest.mark.parametrize("seed", [0, 1])
def test_random_operations_keep_contents_references_and_ledger_exact(seed: int) -> None:
    driver = Driver(seed)
    for operation in range(NUM_OPERATIONS):
        driver.step()
        if operation % 50 == 0:
            driver.check_all()
    interesting = ("hits", "revived", "short", "forks", "fork refused", "followed")
    assert all(driver.counts[what] > 100 for what in interesting), driver.counts
    assert driver.manager.num_evictions > 100
    for seq_id in list(driver.sequences):
        driver.manager.free(seq_id)
        del driver.sequences[seq_id]
    driver.check_all()
    assert driver.manager.num_free_blocks == NUM_BLOCKS - 1
