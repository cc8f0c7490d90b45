// The inner loop of the products with weights of 4 or 8 bits: sums of a few rows times a few panels.
//
// A panel holds PANEL outputs; each group of 32 K of it is
//
//     | quants | PANEL fp16 scales | PANEL fp16 minima (INT4_MIN only) |
//
// A vector of quants serves eight outputs, four neighbouring K each, which one broadcast of four activations meets. At 4
// bits its low nibbles belong to the panel's first eight outputs, its high nibbles to the last; at 8 bits two vectors
// follow one another.
#pragma once

#include "int_dot.h"

namespace shoal {

enum Format {  // what a quant q stands for, with its group's scale d and minimum m
    INT4,      // d * (q - 8), q in [0, 15]
    INT4_MIN,  // d * q + m, q in [0, 15]
    INT8,      // d * q, q in [-128, 127]
};

constexpr int PANEL = 2 * LANES;
constexpr int GROUP = 32;
constexpr int STEPS = GROUP / 4;  // of four K

constexpr i64 quant_bytes(int format) { return format == INT8 ? PANEL * GROUP : PANEL * GROUP / 2; }
constexpr i64 group_bytes(int format) { return quant_bytes(format) + PANEL * (format == INT4_MIN ? 4 : 2); }

// Rows of the largest tile: two sums a row and half a panel each, beside the weights and four activations.
constexpr int max_rows(int format) { return format == INT8 ? 4 : 6; }

// A group of a row of activations. `extra` is what the format wants beside the products of quants: INT4 starts from the
// integer -8 * sum(quants); for INT4_MIN scale * sum(quants) meets the minima.
union Extra {
    std::int32_t integer;
    float number;
};

struct Activations {
    std::int8_t quants[GROUP];
    float scale;
    Extra extra;
};

struct QuantizedRows {  // `stride` groups apart
    const Activations* data;
    i64 stride;
};

// A panel. While its groups are multiplied, what lies at `ahead` is fetched into the cache, `ahead_step` bytes a group.
struct QuantizedWeights {
    const std::uint8_t* data;
    const std::uint8_t* ahead;
    i64 ahead_step;
};

// Products of one group: totals[row][half of the panel].
template <int FORMAT, int ROWS>
SHOAL_INLINE void multiply_group(const std::uint8_t* w, const Activations* const* x, i64 stride,
                                 ints8 (&totals)[ROWS][2]) {
    if constexpr (FORMAT == INT8) {
        for (int r = 0; r < ROWS; r++) totals[r][0] = totals[r][1] = ints8{};
#pragma GCC unroll 2
        for (int s = 0; s < STEPS; s++) {
            bytes32 first = load_as<bytes32>(w + s * 64), second = load_as<bytes32>(w + s * 64 + 32);
            for (int r = 0; r < ROWS; r++) {
                bytes32 four = quad(x[r / 3][r % 3 * stride].quants + s * 4);
                totals[r][0] += add_pairs(pairs_signed(first, four));
                totals[r][1] += add_pairs(pairs_signed(second, four));
            }
        }
    } else {
        shorts16 sums[ROWS][2];
        for (int r = 0; r < ROWS; r++) {
            // In 16 bits: -8 * sum(quants) >= -32512, and no sum that begins there can overflow, for |q - 8| <= 8.
            ints8 start = ints8{} + (FORMAT == INT4 ? x[r / 3][r % 3 * stride].extra.integer : 0);
            sums[r][0] = sums[r][1] = (shorts16)start;
        }
#pragma GCC unroll 8
        for (int s = 0; s < STEPS; s++) {
            bytes32 both = load_as<bytes32>(w + s * 32), first = low_nibbles(both), second = high_nibbles(both);
            for (int r = 0; r < ROWS; r++) {
                bytes32 four = quad(x[r / 3][r % 3 * stride].quants + s * 4);
                sums[r][0] = pinned(sums[r][0] + pairs_unsigned(first, four));
                sums[r][1] = pinned(sums[r][1] + pairs_unsigned(second, four));
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int half = 0; half < 2; half++) totals[r][half] = add_pairs(sums[r][half]);
    }
}

// sums [ROWS][PANEL] += x * w over `groups` groups, in ascending order.
//
// One function each, never inlined: the sums of a group stay in registers, and those of all groups in memory
// (tests/kernels/test_cpu_codegen.py looks at what the compiler made).
template <int FORMAT, int ROWS>
__attribute__((noinline)) void multiply_quantized(QuantizedRows rows, const QuantizedWeights& weights, i64 groups,
                                                  float* sums) {
    constexpr int BASES = (ROWS + 2) / 3;  // rows r, r + 1, r + 2 share a base register
    const Activations* x[BASES];
    for (int i = 0; i < BASES; i++) x[i] = rows.data + 3 * i * rows.stride;
    const std::uint8_t *w = weights.data, *ahead = weights.ahead;
    const i64 stride = rows.stride, ahead_step = weights.ahead_step;
    for (i64 g = 0; g < groups; g++) {
        for (i64 line = 0; line < ahead_step; line += 64) __builtin_prefetch(ahead + line);
        ints8 totals[ROWS][2];
        multiply_group<FORMAT, ROWS>(w, x, stride, totals);
        auto scales = reinterpret_cast<const std::uint16_t*>(w + quant_bytes(FORMAT));
        asm("" : "+r"(sums));  // or the compiler keeps copies of them on the stack
        for (int half = 0; half < 2; half++) {
            floats8 d = widen(scales + half * LANES), m{};
            if constexpr (FORMAT == INT4_MIN) m = widen(scales + PANEL + half * LANES);
            for (int r = 0; r < ROWS; r++) {
                const Activations& a = x[r / 3][r % 3 * stride];
                float* at = sums + r * PANEL + half * LANES;
                floats8 sum = load_as<floats8>(at);
                sum += d * a.scale * __builtin_convertvector(totals[r][half], floats8);
                if constexpr (FORMAT == INT4_MIN) sum += m * a.extra.number;
                store_as(at, sum);
            }
        }
        w += group_bytes(FORMAT), ahead += ahead_step;
        for (int i = 0; i < BASES; i++) x[i]++;
    }
}

}  // namespace shoal
