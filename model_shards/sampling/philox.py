"""Random numbers that are a function of (seed, sample index, output position) and of nothing else.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011) enciphers a 128-bit
counter under a 64-bit key. There is no state to carry: a sequence that was preempted, moved or batched otherwise draws
the same numbers at the same position.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)
_TOKEN_DRAW = 0
"""Last counter word: what the numbers are for, so that another use of the same (seed, index, position) is free."""

UInt64Array = npt.NDArray[np.uint64]


def philox4x32(counter: UInt64Array, key: UInt64Array) -> UInt64Array:
    """counter [4, n], key [2, n] or [2, 1], 32-bit words in uint64 -> [4, n] 32-bit words, column by column."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (product1 >> _WORD) ^ c1 ^ k0, product1 & _LOW, (product0 >> _WORD) ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return np.stack((c0, c1, c2, c3))


def uniforms(seed: int, sample_index: int, positions: range) -> npt.NDArray[np.float64]:
    """Two independent uniforms in [0, 1) with 53 bits each for every output position: [len(positions), 2]. The seed is
    taken modulo 2**64."""
    position = np.arange(positions.start, positions.stop, dtype=np.uint64)
    index, purpose = (np.full_like(position, value) for value in (sample_index, _TOKEN_DRAW))
    counter = np.stack((position & _LOW, position >> _WORD, index, purpose))
    key = np.array([[seed & 0xFFFFFFFF], [(seed >> 32) & 0xFFFFFFFF]], dtype=np.uint64)
    words = philox4x32(counter, key)
    bits = (words[0::2] << _WORD) | words[1::2]
    return (bits >> np.uint64(11)).astype(np.float64).T * 2.0**-53
