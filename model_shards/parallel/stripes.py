"""How the positions of a sequence are shared out over context-parallel ranks: in stripes (Brandon et al. 2023,
arXiv:2311.09431). Position p is on rank p % size. With 2 ranks and pages of 4 slots:

    position   0   1   2   3   4   5   6   7 | 8   9  10
    rank       0   1   0   1   0   1   0   1 | 0   1   0
    slot       0   0   1   1   2   2   3   3 | 0   0   1     of the block's page, on that rank
               block a                       | block b

A block of the scheduler has size * block_size positions and is one page of block_size slots on every rank. New tokens
go round the ranks. The query at position p sees the first `keys_seen(p)` of a rank's keys, and the next query of the
same stripe sees one more: against any stripe, a stripe of queries is plain causal attention, cached prefix and all. So
rows are computed where their keys are stored, no key ever moves to be stored, and every rank has the same work but for
one key a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LongArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stripes:
    """The stripes of `size` ranks, seen from the rank `index`."""

    size: int
    index: int

    def keys_seen(self, positions: LongArray, stripe: int | None = None) -> LongArray:
        """How many of a stripe's keys (None: this rank's own) are at these positions or before them."""
        own = self.index if stripe is None else stripe
        return (positions + self.size - own) // self.size

    def own_slots(self, positions: LongArray, slots: LongArray) -> LongArray:
        """`slots`: block * (size * block_size) + offset of each position -> its slot on this rank, -1 where another
        rank stores it."""
        return np.where(positions % self.size == self.index, slots // self.size, -1)


@dataclass(frozen=True, slots=True)
class Strands:
    """Rows of a step in the order in which attention takes them. A strand is the rows of one chunk whose positions are
    of one stripe: consecutive queries to every stripe. Strands of one row come first."""

    rows: LongArray
    """[num_rows]: rows of the step."""
    start: LongArray
    """[num_strands + 1]: strand i is rows[start[i] : start[i + 1]]."""
    chunks: LongArray
    """[num_strands]: the chunk that each belongs to."""
    last: LongArray
    """[num_strands]: the position of its last row."""

    @property
    def num_singles(self) -> int:
        return int((np.diff(self.start) == 1).sum())

    @classmethod
    def of_single_rows(cls, positions: LongArray) -> Strands:
        """Of a step whose chunks have one row each."""
        rows = np.arange(len(positions))
        return cls(rows, np.arange(len(rows) + 1), rows, positions)

    @classmethod
    def of(cls, rows: LongArray, chunk_of_row: LongArray, positions: LongArray, size: int) -> Strands:
        """`rows`: which of the step's, ascending; `chunk_of_row`, `positions`: of all of them; `size`: stripes."""
        chunks, places = chunk_of_row[rows], positions[rows]
        strands, strand_of_row, counts = np.unique(
            chunks * size + places % size, return_inverse=True, return_counts=True
        )
        longer = counts > 1
        order = np.lexsort((strand_of_row, longer[strand_of_row]))  # stable: positions ascend within a strand
        strand_order = np.argsort(longer, kind="stable")
        start = np.zeros(len(strands) + 1, dtype=np.int64)
        np.cumsum(counts[strand_order], out=start[1:])
        return cls(rows[order], start, strands[strand_order] // size, places[order][start[1:] - 1])
