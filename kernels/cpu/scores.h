// Scores of queries with keys in packed pages: the first half of attention's arithmetic.
#pragma once

#include "simd.h"

namespace shoal {
namespace {

constexpr i64 KEYS = 64;                            // of a block: scores of a row before its softmax is updated
constexpr int GRANULE = 16;                         // keys of one page that are read together; divides the block size
constexpr int ROW_BLOCK = REGISTERS == 32 ? 8 : 4;  // rows of a register tile

typedef std::uint64_t vq __attribute__((vector_size(VL * 4)));

// Keys are scored VL at a time. Scores of ROWS queries with U such groups, whose keys of the first channel pair start
// at keys[u] and whose channel pairs are `pairs` keys apart. Every score is one chain of multiply-adds over the
// channels in ascending order, whatever ROWS and U are; U is what keeps enough chains going.

//
// Pages lie scattered, which hardware prefetchers do not see through. So AHEAD, the first pass over a block's keys,
// fetches the block's values and the next block's keys: a line of each for every line of keys.

template <int U, class E>
struct Ahead {
    static constexpr int GROUPS_A_GRANULE = GRANULE / VL, LINES = sizeof(E) / 2;  // lines of a granule's channel pair
    const E* const *values, *const *keys;  // of each granule

    SHOAL_INLINE void fetch(i64 d, i64 pairs) const {
        for (int n = 0; n < (U + GROUPS_A_GRANULE - 1) / GROUPS_A_GRANULE; n++)
            for (int line = 0; line < LINES; line++) {
                __builtin_prefetch(values[n] + d * GRANULE + line * 64 / sizeof(E));
                __builtin_prefetch(keys[n] + d * pairs + line * 64 / sizeof(E));
            }
    }
};

// bfloat16: 32 bits are a key's pair; the two halves are multiplied apart and one lane is one key.
template <int ROWS, int U, bool AHEAD>
SHOAL_INLINE void score(const float* q, i64 dim, const std::uint16_t* const* keys, i64 pairs, float* scores,
                        Ahead<U, std::uint16_t> ahead) {
    vf acc[ROWS][U] = {};
    // Enough rows share one widening of all groups; few rows widen one group at a time, to have registers for more.
    constexpr int AT_ONCE = ROWS >= ROW_BLOCK ? U : 1;
    for (i64 d = 0; d < dim; d += 2) {
        if (AHEAD) ahead.fetch(d, pairs);
        for (int first = 0; first < U; first += AT_ONCE) {
            vf even[AT_ONCE], odd[AT_ONCE];
            for (int u = 0; u < AT_ONCE; u++) {
                vu pair = load(reinterpret_cast<const std::uint32_t*>(keys[first + u]) + d / 2 * pairs);
                even[u] = low_half(pair), odd[u] = high_half(pair);
            }
            for (int r = 0; r < ROWS; r++) {
                for (int u = 0; u < AT_ONCE; u++) acc[r][first + u] += even[u] * q[r * dim + d];
                for (int u = 0; u < AT_ONCE; u++) acc[r][first + u] += odd[u] * q[r * dim + d + 1];
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int u = 0; u < U; u++) store(scores + r * KEYS + u * VL, acc[r][u]);
}

// The sums of neighbouring lanes of a and b.
SHOAL_INLINE vf pairwise_sum(vf a, vf b) {
    vf even, odd;
    for (int i = 0; i < VL / 2; i++) {
        even[i] = a[2 * i], even[VL / 2 + i] = b[2 * i];
        odd[i] = a[2 * i + 1], odd[VL / 2 + i] = b[2 * i + 1];
    }
    return even + odd;
}

// fp32: two lanes are a key's pair; they are added at the end.
template <int ROWS, int U, bool AHEAD>
SHOAL_INLINE void score(const float* q, i64 dim, const float* const* keys, i64 pairs, float* scores,
                        Ahead<U, float> ahead) {
    vf acc[ROWS][U][2] = {};
    for (i64 d = 0; d < dim; d += 2) {
        if (AHEAD) ahead.fetch(d, pairs);
        for (int u = 0; u < U; u++) {
            const float* at = keys[u] + d * pairs;
            vf first = load(at), second = load(at + VL);
            for (int r = 0; r < ROWS; r++) {
                std::uint64_t both;
                std::memcpy(&both, q + r * dim + d, 8);
                vf pair = (vf)(vq{} + both);
                acc[r][u][0] += first * pair, acc[r][u][1] += second * pair;
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int u = 0; u < U; u++) store(scores + r * KEYS + u * VL, pairwise_sum(acc[r][u][0], acc[r][u][1]));
}

// How many of `limit` (a power of two) independent accumulators of `size` vectors the registers hold beside the rest.
constexpr int fitting(int size, int limit) {
    int n = 1;
    while (n * 2 <= limit && n * 2 * size <= (REGISTERS == 32 ? 24 : 12)) n *= 2;
    return n;
}

}  // namespace
}  // namespace shoal
