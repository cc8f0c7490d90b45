// Many rows against a block of keys: its keys and values are widened once into panels that stay in the first cache, and
// both products run as tiles of registers over them.
#pragma once

#include "softmax.h"

namespace shoal {
namespace {

// Vectors of the even and of the odd places of two vectors, and back.
template <std::size_t... I>
SHOAL_INLINE void apart(vf a, vf b, vf& even, vf& odd, std::index_sequence<I...>) {
    even = vf{(I < VL / 2 ? a[2 * I % VL] : b[2 * I % VL])...};
    odd = vf{(I < VL / 2 ? a[2 * I % VL + 1] : b[2 * I % VL + 1])...};
}
template <std::size_t... I>
SHOAL_INLINE void together(vf even, vf odd, vf& a, vf& b, std::index_sequence<I...>) {
    a = vf{(I % 2 ? odd[I / 2] : even[I / 2])...};
    b = vf{(I % 2 ? odd[VL / 2 + I / 2] : even[VL / 2 + I / 2])...};
}

// Row i, column j becomes row j, column i, by as many perfect shuffles as VL has bits.
SHOAL_INLINE void transpose(vf (&rows)[VL]) {
    for (int n = 1; n < VL; n *= 2) {
        vf shuffled[VL];
        for (int i = 0; i < VL / 2; i++)
            together(rows[i], rows[i + VL / 2], shuffled[2 * i], shuffled[2 * i + 1], std::make_index_sequence<VL>{});
        for (int i = 0; i < VL; i++) rows[i] = shuffled[i];
    }
}

// A pair of channels of VL keys.
SHOAL_INLINE void key_pair(const std::uint16_t* k, vf& even, vf& odd) {
    vu both = load(reinterpret_cast<const std::uint32_t*>(k));
    even = low_half(both), odd = high_half(both);
}
SHOAL_INLINE void key_pair(const float* k, vf& even, vf& odd) {
    apart(load(k), load(k + VL), even, odd, std::make_index_sequence<VL>{});
}

// Two vectors of a value row: for bfloat16 the even and the odd channels, for fp32 the first and the second half.
SHOAL_INLINE vf first_channels(const std::uint16_t* v) {
    return low_half(load(reinterpret_cast<const std::uint32_t*>(v)));
}
SHOAL_INLINE vf second_channels(const std::uint16_t* v) {
    return high_half(load(reinterpret_cast<const std::uint32_t*>(v)));
}
SHOAL_INLINE vf first_channels(const float* v) { return load(v); }
SHOAL_INLINE vf second_channels(const float* v) { return load(v + VL); }

// Which channel lane i of either holds.
SHOAL_INLINE i64 first_channel(int i, const std::uint16_t*) { return 2 * i; }
SHOAL_INLINE i64 second_channel(int i, const std::uint16_t*) { return 2 * i + 1; }
SHOAL_INLINE i64 first_channel(int i, const float*) { return i; }
SHOAL_INLINE i64 second_channel(int i, const float*) { return VL + i; }

// The same channels in their order again.
SHOAL_INLINE void in_order(vf first, vf second, vf& a, vf& b, const std::uint16_t*) {
    together(first, second, a, b, std::make_index_sequence<VL>{});
}
SHOAL_INLINE void in_order(vf first, vf second, vf& a, vf& b, const float*) { a = first, b = second; }

namespace widened {

struct Panels {
    float* keys;    // [KEYS / PANEL][dim][PANEL]
    float* values;  // [width / PANEL][KEYS][PANEL], first_channels before second_channels
    i64 dim, value_dim, width;  // channels of a key and of a value; width: value_dim, rounded up to PANEL

    static i64 floats(i64 dim, i64 width) { return KEYS * (dim + width); }
    Panels(float* memory, i64 dim, i64 value_dim, i64 width)
        : keys(memory), values(memory + KEYS * dim), dim(dim), value_dim(value_dim), width(width) {}
};

template <class E>
SHOAL_KERNEL void keys(const Block<E>& block, const Panels& to) {
    const i64 step = block.block_size * 2;  // elements from a pair of channels to the next
    for (i64 j = block.begin / VL; j * VL < block.end; j++) {
        const i64 granule = j * VL / GRANULE, offset = j * VL % GRANULE * 2;
        const E *from = block.keys[granule] + offset, *ahead = block.keys_ahead[granule] + offset;
        float* out = to.keys + j / 2 * to.dim * PANEL + j % 2 * VL;
        for (i64 d = 0; d < to.dim; d += 2, from += step, ahead += step, out += 2 * PANEL) {
            __builtin_prefetch(ahead);
            vf even, odd;
            key_pair(from, even, odd);
            store(out, even), store(out + PANEL, odd);
        }
    }
}

// Keys that lie one channel after the other, `dim` apart, as values do.
template <class E>
SHOAL_KERNEL void key_rows(const Block<E>& block, const Panels& to) {
    for (i64 j = block.begin / VL; j * VL < block.end; j++) {
        const i64 granule = j * VL / GRANULE, offset = j * VL % GRANULE * to.dim;
        const E *from = block.keys[granule] + offset, *ahead = block.keys_ahead[granule] + offset;
        float* out = to.keys + j / 2 * to.dim * PANEL + j % 2 * VL;
        i64 d = 0;
        for (; d + PANEL <= to.dim; d += PANEL) {
            vf first[VL], second[VL];
            for (int i = 0; i < VL; i++) {
                __builtin_prefetch(ahead + i * to.dim + d);
                first[i] = first_channels(from + i * to.dim + d);
                second[i] = second_channels(from + i * to.dim + d);
            }
            transpose(first), transpose(second);
            for (int c = 0; c < VL; c++) {
                store(out + (d + first_channel(c, from)) * PANEL, first[c]);
                store(out + (d + second_channel(c, from)) * PANEL, second[c]);
            }
        }
        for (; d < to.dim; d++)
            for (int i = 0; i < VL; i++) out[d * PANEL + i] = to_float(from[i * to.dim + d]);
    }
}

// `stride`: elements from a value to the next.
template <class E>
SHOAL_KERNEL void values(const Block<E>& block, i64 stride, const Panels& to) {
    for (i64 key = block.begin; key < block.end; key++) {
        const i64 at = key % GRANULE * stride;
        const E *from = block.values[key / GRANULE] + at, *ahead = block.values_ahead[key / GRANULE] + at;
        float* out = to.values + key * PANEL;
        i64 c = 0;
        for (; c + PANEL <= to.value_dim; c += PANEL, out += KEYS * PANEL) {
            __builtin_prefetch(ahead + c);
            store(out, first_channels(from + c)), store(out + VL, second_channels(from + c));
        }
        for (int i = 0; c < to.width; c++, i++) out[i] = c < to.value_dim ? to_float(from[c]) : 0.0f;
    }
}

// scores [ROWS][KEYS] of queries [ROWS][dim] with the panels that hold [begin, end). Every score is one chain of
// multiply-adds over the channels in ascending order.
template <int ROWS>
SHOAL_KERNEL void score(const float* queries, const Panels& panels, i64 begin, i64 end, float* scores) {
    const i64 dim = panels.dim;
    for (i64 panel = begin / PANEL; panel * PANEL < end; panel++) {
        const float* k = panels.keys + panel * dim * PANEL;
        vf acc[ROWS][2] = {};
        for (i64 d = 0; d < dim; d++, k += PANEL) {
            vf first = load(k), second = load(k + VL);
            for (int r = 0; r < ROWS; r++) {
                vf x = splat(queries[r * dim + d]);
                acc[r][0] += first * x, acc[r][1] += second * x;
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int h = 0; h < 2; h++) store(scores + r * KEYS + panel * PANEL + h * VL, acc[r][h]);
    }
}

// acc [ROWS][width] = acc * shrink + probabilities [ROWS][KEYS] * values, keys [begin, end) in ascending order.
template <int ROWS>
SHOAL_KERNEL void accumulate(const float* probabilities, const Panels& panels, i64 begin, i64 end,
                             const float* shrink, float* acc) {
    for (i64 c = 0; c < panels.width; c += PANEL) {
        vf a[ROWS][2];
        for (int r = 0; r < ROWS; r++)
            for (int h = 0; h < 2; h++) a[r][h] = load(acc + r * panels.width + c + h * VL) * shrink[r];
        const float *v = panels.values + c * KEYS + begin * PANEL, *p = probabilities + begin;
        for (const float* stop = probabilities + end; p < stop; p++, v += PANEL) {
            vf first = load(v), second = load(v + VL);
            for (int r = 0; r < ROWS; r++) {
                vf x = splat(p[r * KEYS]);
                a[r][0] += first * x, a[r][1] += second * x;
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int h = 0; h < 2; h++) store(acc + r * panels.width + c + h * VL, a[r][h]);
    }
}

}  // namespace widened
}  // namespace
}  // namespace shoal
