// Few rows against a block of keys: keys and values are widened where they lie, anew for every tile of registers, and
// meanwhile what comes next is fetched from memory.
#pragma once

#include "widened.h"

namespace shoal {
namespace {

namespace direct {

// Rows of a tile of registers. Taking pairs of fp32 apart needs some for itself.
template <class E>
constexpr int ROWS_AT_ONCE = sizeof(E) == 2 ? ROW_BLOCK : ROW_BLOCK * 2 / 3;
constexpr int MOST_TIMES = 5;  // with more of them, widening a block once costs less

constexpr int GROUPS = GRANULE / VL;  // vectors of keys of a granule

// How many of `limit` (a power of two) independent pieces of `size` accumulators compilers keep in registers beside the
// rest: with one more, gcc 12 spills.
constexpr int fitting(int size, int limit) {
    int n = 1;
    while (n * 2 <= limit && n * 2 * size <= (REGISTERS == 32 ? 14 : 11)) n *= 2;
    return n;
}

// Hides from the compiler that the memory was read before: reading it again is cheaper than a spilled accumulator.
template <class T>
SHOAL_INLINE const T* anew(const T* p) {
    asm("" : "+r"(p));
    return p;
}

// One granule's products with a pair of channels of all rows, whose queries lie `dim` apart.
template <int ROWS>
SHOAL_INLINE void add_pair(const std::uint16_t* keys, const float* q, i64 dim, vf (*acc)[GROUPS]) {
    vf even[GROUPS];
    for (int u = 0; u < GROUPS; u++) even[u] = low_half(load(reinterpret_cast<const std::uint32_t*>(keys) + u * VL));
    for (int r = 0; r < ROWS; r++)
        for (int u = 0; u < GROUPS; u++) acc[r][u] += even[u] * q[r * dim];
    keys = anew(keys);
    vf odd[GROUPS];
    for (int u = 0; u < GROUPS; u++) odd[u] = high_half(load(reinterpret_cast<const std::uint32_t*>(keys) + u * VL));
    for (int r = 0; r < ROWS; r++)
        for (int u = 0; u < GROUPS; u++) acc[r][u] += odd[u] * q[r * dim + 1];
}
template <int ROWS>
SHOAL_INLINE void add_pair(const float* keys, const float* q, i64 dim, vf (*acc)[GROUPS]) {
    for (int u = 0; u < GROUPS; u++) {
        vf even, odd;
        key_pair(keys + u * PANEL, even, odd);
        q = anew(q);
        for (int r = 0; r < ROWS; r++) acc[r][u] += even * q[r * dim];
        q = anew(q);
        for (int r = 0; r < ROWS; r++) acc[r][u] += odd * q[r * dim + 1];
    }
}

template <int ROWS, int AT_ONCE, class E>
SHOAL_KERNEL void score_granules(const float* q, i64 dim, const Block<E>& block, i64 granule, float* scores) {
    const i64 step = block.block_size * 2;
    const E *keys[AT_ONCE], *ahead[AT_ONCE];
    for (int g = 0; g < AT_ONCE; g++) keys[g] = block.keys[granule + g], ahead[g] = block.keys_ahead[granule + g];
    vf acc[AT_ONCE][ROWS][GROUPS] = {};
    for (i64 d = 0; d < dim; d += 2)
        for (int g = 0; g < AT_ONCE; g++) {
            for (i64 line = 0; line < i64(sizeof(E)) / 2; line++) __builtin_prefetch(ahead[g] + line * GRANULE);
            add_pair<ROWS>(keys[g], anew(q + d), dim, acc[g]);
            keys[g] += step, ahead[g] += step;
        }
    for (int g = 0; g < AT_ONCE; g++)
        for (int r = 0; r < ROWS; r++)
            for (int u = 0; u < GROUPS; u++) store(scores + r * KEYS + (granule + g) * GRANULE + u * VL, acc[g][r][u]);
}

// Like `score` of panels.
template <int ROWS, class E>
SHOAL_INLINE void score(const float* queries, i64 dim, const Block<E>& block, float* scores) {
    constexpr int AT_ONCE = fitting(ROWS * GROUPS * int(sizeof(E) / 2), GRANULES);
    i64 granule = block.begin / GRANULE, end = (block.end + GRANULE - 1) / GRANULE;
    for (; granule + AT_ONCE <= end; granule += AT_ONCE)
        score_granules<ROWS, AT_ONCE>(queries, dim, block, granule, scores);
    for (; granule < end; granule++) score_granules<ROWS, 1>(queries, dim, block, granule, scores);
}

// One value's products with the probabilities of all rows; row r's accumulators are acc[r * step].
template <int ROWS, class E>
SHOAL_INLINE void add_value(const E* v, const float* p, vf (*acc)[2], int step) {
    if constexpr (ROWS <= 3) {  // the registers hold the probabilities of all pieces, and one half at a time
        vf x[ROWS];
        for (int r = 0; r < ROWS; r++) x[r] = splat(p[r * KEYS]);
        vf first = first_channels(v);
        for (int r = 0; r < ROWS; r++) acc[r * step][0] += first * x[r];
        vf second = second_channels(anew(v));
        for (int r = 0; r < ROWS; r++) acc[r * step][1] += second * x[r];
    } else {
        vf first = first_channels(v), second = second_channels(v);
        for (int r = 0; r < ROWS; r++) {
            vf x = splat(p[r * KEYS]);
            acc[r * step][0] += first * x, acc[r * step][1] += second * x;
        }
    }
}

// acc = acc * shrink + probabilities * values of AT_ONCE pieces of PANEL channels from `channel` on.
template <int ROWS, int AT_ONCE, class E>
SHOAL_KERNEL void accumulate_channels(const float* probabilities, const Block<E>& block, i64 dim, i64 width,
                                      i64 channel, const float* shrink, float* acc) {
    vf a[ROWS][AT_ONCE][2];
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < AT_ONCE; c++)
            for (int h = 0; h < 2; h++) a[r][c][h] = load(acc + r * width + channel + (2 * c + h) * VL) * shrink[r];
    for (i64 key = block.begin; key < block.end;) {
        const i64 granule = key / GRANULE, at = key % GRANULE * dim + channel;
        const E *v = block.values[granule] + at, *ahead = block.values_ahead[granule] + at;
        const float *p = probabilities + key, *stop = probabilities + std::min(block.end, (granule + 1) * GRANULE);
        key = stop - probabilities;
        for (; p < stop; p++, v += dim, ahead += dim) {
            for (int c = 0; c < AT_ONCE; c++) {
                if (c * PANEL * sizeof(E) % 64 == 0) __builtin_prefetch(ahead + c * PANEL);
                add_value<ROWS>(v + c * PANEL, p, &a[0][c], AT_ONCE);
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < AT_ONCE; c++)
            for (int h = 0; h < 2; h++) store(acc + r * width + channel + (2 * c + h) * VL, a[r][c][h]);
}

// Like `accumulate` of panels.
template <int ROWS, class E>
SHOAL_INLINE void accumulate(const float* probabilities, const Block<E>& block, i64 dim, i64 width,
                             const float* shrink, float* acc) {
    constexpr int AT_ONCE = ROWS <= 3 ? fitting(2 * ROWS - 1, 4) : 1;
    i64 channel = 0;
    for (; channel + AT_ONCE * PANEL <= dim; channel += AT_ONCE * PANEL)
        accumulate_channels<ROWS, AT_ONCE>(probabilities, block, dim, width, channel, shrink, acc);
    for (; channel + PANEL <= dim; channel += PANEL)
        accumulate_channels<ROWS, 1>(probabilities, block, dim, width, channel, shrink, acc);
    for (; channel < dim; channel++)  // what is left of a head_dim that PANEL does not divide
        for (int r = 0; r < ROWS; r++) {
            float a = acc[r * width + channel] * shrink[r];
            for (i64 key = block.begin; key < block.end; key++)
                a += probabilities[r * KEYS + key] *
                     to_float(block.values[key / GRANULE][key % GRANULE * dim + channel]);
            acc[r * width + channel] = a;
        }
}

}  // namespace direct
}  // namespace
}  // namespace shoal
