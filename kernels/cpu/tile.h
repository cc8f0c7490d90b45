// The inner loop of the products with dense weights: sums of a few rows times a few panels, in registers.
//
// A panel holds NR = 2 * VL outputs as [K][NR], so that one step of K is two vectors. bfloat16 panels interleave output
// j with output j + VL: 32 bits hold both, and widening them costs a shift and a mask instead of shuffles.
#pragma once

#include "simd.h"

namespace shoal {

constexpr int NR = 2 * VL;                    // outputs of a panel
constexpr int MR = REGISTERS == 32 ? 12 : 6;  // rows of the largest tile: MR * 2 sums, two vectors of weights, one of x

// Panels that a tile of so many rows takes at once: enough sums to hide the latency of a multiply-add (4 cycles, two a
// cycle), as far as they and the widened weights fit the registers.
constexpr int panels_together(int rows) {
    return rows == 1 ? 4 : rows == 2 || (rows == 3 && REGISTERS == 32) ? 2 : 1;
}

struct Rows {  // of activations, `stride` floats apart
    const float* data;
    i64 stride;
};

// Steps of K of some panels, `panel_step` elements apart. While they are multiplied, what lies at `ahead` of each is
// fetched into the cache, `ahead_step` bytes a step.
template <class W>
struct Weights {
    const W* data;
    i64 panel_step;
    const W* ahead;
    i64 ahead_step;
};

struct Panel {  // one step of K of one panel, widened
    vf first, second;
};

SHOAL_INLINE Panel widened(const float* w) { return {load(w), load(w + VL)}; }
SHOAL_INLINE Panel widened(const std::uint16_t* w) {
    vu both = load(reinterpret_cast<const std::uint32_t*>(w));
    return {low_half(both), high_half(both)};
}

// sums [ROWS][PANELS][NR] += x * w over `depth` steps of K, in ascending order.
//
// One function each, never inlined: inside a larger one the compiler spills sums to the stack, at a third of the speed
// (tests/kernels/test_cpu_codegen.py looks at what it made).
template <class W, int ROWS, int PANELS>
__attribute__((noinline)) void multiply(Rows x, const Weights<W>& weights, i64 depth, float* sums) {
    vf acc[ROWS][PANELS][2];
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++)
            for (int half = 0; half < 2; half++) acc[r][p][half] = load(sums + (r * PANELS + p) * NR + half * VL);
    constexpr int BASES = (ROWS + 2) / 3;  // rows r, r + 1, r + 2 share a base register: base, base + s, base + 2 * s
    const float* base[BASES];
    for (int i = 0; i < BASES; i++) base[i] = x.data + 3 * i * x.stride;
    const W* w = weights.data;
    const char* ahead = reinterpret_cast<const char*>(weights.ahead);
    const i64 stride = x.stride, panel_step = weights.panel_step, ahead_step = weights.ahead_step;
    for (i64 k = 0; k < depth; k++) {
        if constexpr (ROWS > 1)  // one row leaves the hardware's own prefetching time enough
            for (int p = 0; p < PANELS; p++) __builtin_prefetch(ahead + p * panel_step * static_cast<i64>(sizeof(W)));
        Panel b[PANELS];
        for (int p = 0; p < PANELS; p++) {
            b[p] = widened(w + p * panel_step);
            if constexpr (ROWS > 1) b[p] = {pinned(b[p].first), pinned(b[p].second)};  // not loaded again for every row
        }
        for (int r = 0; r < ROWS; r++) {
            vf a = splat(base[r / 3][r % 3 * stride]);
            for (int p = 0; p < PANELS; p++) {
                acc[r][p][0] += a * b[p].first;
                acc[r][p][1] += a * b[p].second;
            }
        }
        w += NR, ahead += ahead_step;
        for (int i = 0; i < BASES; i++) base[i]++;
    }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++)
            for (int half = 0; half < 2; half++) store(sums + (r * PANELS + p) * NR + half * VL, acc[r][p][half]);
}

}  // namespace shoal
