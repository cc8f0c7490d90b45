// What the two ways of computing a tile share (direct.h, widened.h): the block of keys, how rows are cut, the softmax.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "simd.h"

namespace shoal {
namespace {

constexpr i64 KEYS = 64;     // of a block: scores of a row before its softmax is updated
constexpr i64 GRANULE = 16;  // keys of one page that lie together; divides the block size
constexpr i64 GRANULES = KEYS / GRANULE;
constexpr int PANEL = 2 * VL;                        // keys of a score tile, channels of a value tile
constexpr int ROW_BLOCK = REGISTERS == 32 ? 12 : 6;  // rows of a register tile: two accumulators each

// A loop that the registers are counted for is a function of its own: inlined into its callers, compilers keep the
// callers' variables in the registers and its accumulators on the stack.
#define SHOAL_KERNEL __attribute__((noinline)) static

// KEYS positions of one sequence and key-value head. Pages lie scattered, which hardware prefetchers do not see
// through, so who reads a granule fetches the one that comes GRANULES later (`ahead`, maybe of the next tile).
template <class E>
struct Block {
    const E *keys[GRANULES], *values[GRANULES];  // of the granules that hold [begin, end)
    const E *keys_ahead[GRANULES], *values_ahead[GRANULES];
    i64 base, begin, end, block_size;  // base: position of the first key; [begin, end): those read, counted from there
};

// Calls fn with n as a constant, 1 <= n <= MOST.
template <int MOST, int N = 1, class Fn>
SHOAL_INLINE void with_constant(i64 n, const Fn& fn) {
    if (n == N) return fn(std::integral_constant<int, N>{});
    if constexpr (N < MOST) with_constant<MOST, N + 1>(n, fn);
}

// Calls fn(row, n) for blocks of n <= most rows, as even as possible: 7 rows are 4 + 3, not 6 + 1.
template <class Fn>
SHOAL_INLINE void by_rows(i64 rows, i64 most, const Fn& fn) {
    i64 blocks = (rows + most - 1) / most, row = 0;
    for (i64 i = 0; i < blocks; i++) {
        i64 n = rows / blocks + (i < rows % blocks);
        fn(row, n);
        row += n;
    }
}

// Lane i and lane i ^ N exchanged.
template <int N, std::size_t... I>
SHOAL_INLINE vf exchanged(vf v, std::index_sequence<I...>) {
    return vf{v[I ^ N]...};
}

template <int N = VL / 2>
SHOAL_INLINE vf largest_everywhere(vf v) {
    v = maximum(exchanged<N>(v, std::make_index_sequence<VL>{}), v);
    if constexpr (N > 1) return largest_everywhere<N / 2>(v);
    else return v;
}

// 2 ** x for x <= 0, relative error 1.6e-7. Exactly 1 at 0, exactly 0 below -127 (also at -inf); NaN stays NaN.
SHOAL_INLINE vf exp2_negative(vf x) {
    // Adding 1.5 * 2 ** 23 rounds to an integer; with 127 more its low bits are the exponent of the result.
    const vf lowest = splat(-127.0f), magic = splat(12582912.0f + 127.0f);
    x = lowest > x ? lowest : x;
    vf shifted = x + magic;
    vf f = x - (shifted - magic);  // in [-0.5, 0.5]
    vf p = splat(1.32647273e-3f);  // minimax, 1 at 0
    p = p * f + splat(9.67151299e-3f);
    p = p * f + splat(5.55073358e-2f);
    p = p * f + splat(2.40222424e-1f);
    p = p * f + splat(6.93147004e-1f);
    p = p * f + splat(1.0f);
    return p * floats(bits(shifted) << 23);
}

// What rows know of the keys so far, in units of log2. total: the sum of 2 ** (score - peak), VL partial sums a row.
struct Running {
    float *peak, *total, *shrink;  // shrink: what sums of earlier blocks are to be multiplied by
    const std::int32_t* position;  // of each row's token
    i64 window;                    // 0: none
};

// Scores [ROWS][KEYS] of the rows from `row` on -> probabilities relative to the new peak, in place, for the vectors
// that hold [begin, end) of the block. A key that a row does not see gets an exact zero.
template <int ROWS>
SHOAL_KERNEL void softmax(const Running& run, i64 row, i64 base, i64 begin, i64 end, float* scores) {
    const int first = begin / VL, last = (end + VL - 1) / VL;
    float peaks[ROWS];
    for (int r = 0; r < ROWS; r++) {
        float* s = scores + r * KEYS;
        i64 seen = run.position[row + r] + 1 - base, hidden = run.window ? seen - run.window : 0;
        if (seen < last * VL || hidden > first * VL) {
            vf index;
            for (int i = 0; i < VL; i++) index[i] = static_cast<float>(i);
            const float hi = static_cast<float>(std::min(seen, KEYS));
            const float lo = static_cast<float>(std::max<i64>(hidden, 0));
            for (int j = first; j < last; j++) {
                vf at = index + static_cast<float>(j * VL), x = load(s + j * VL);
                x = at < hi ? x : splat(-INFINITY);
                store(s + j * VL, at >= lo ? x : splat(-INFINITY));
            }
        }
        vf top = splat(run.peak[row + r]);
        for (int j = first; j < last; j++) top = maximum(top, load(s + j * VL));
        peaks[r] = largest_everywhere(top)[0];
    }
    for (int r = 0; r < ROWS; r++) {
        float peak = peaks[r], old = run.peak[row + r];
        run.peak[row + r] = peak;
        peak = peak == -INFINITY ? 0.0f : peak;
        vf shrink = exp2_negative(splat(old - peak)), sums = load(run.total + (row + r) * VL) * shrink;
        run.shrink[row + r] = shrink[0];
        float* s = scores + r * KEYS;
        for (int j = first; j < last; j++) {
            vf x = exp2_negative(load(s + j * VL) - peak);
            sums += x;
            store(s + j * VL, x);
        }
        store(run.total + (row + r) * VL, sums);
    }
}

}  // namespace
}  // namespace shoal
