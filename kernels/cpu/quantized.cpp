// out = x * weight^T + bias for weights of 4 or 8 bits in groups of 32 along K, multiplied as integers.
//
// An activation row is quantized to signed bytes, one fp32 scale a group (its largest magnitude / 127). The products of
// a group are summed exactly in integers; groups are added in ascending order by fp32 multiply-adds in the lane of
// their output. That is the arithmetic for every number of rows: a row's result is the same bits whatever else is in
// the batch.
//
// A panel holds PANEL outputs; each group of it is
//
//     | quants | PANEL fp16 scales | PANEL fp16 minima (INT4_MIN only) |
//
// A vector of quants serves eight outputs, four neighbouring K each, which one broadcast of four activations meets. At 4
// bits its low nibbles belong to the panel's first eight outputs, its high nibbles to the last; at 8 bits two vectors
// follow one another.

#include <algorithm>
#include <cmath>

#include "int_dot.h"
#include "parallel.h"
#include "replay.h"

namespace shoal {
namespace {

enum Format {  // what a quant q stands for, with its group's scale d and minimum m
    INT4,      // d * (q - 8), q in [0, 15]
    INT4_MIN,  // d * q + m, q in [0, 15]
    INT8,      // d * q, q in [-128, 127]
};

constexpr int PANEL = 2 * LANES;
constexpr int GROUP = 32;
constexpr int STEPS = GROUP / 4;                   // of four K
constexpr int MAX_ROWS = REGISTERS == 32 ? 6 : 4;  // of a register tile
constexpr i64 ROW_BLOCK = 96;                      // rows that one task multiplies: their quants stay in L2
constexpr i64 AHEAD = 2 << 10;                     // bytes that weights are fetched in advance
constexpr i64 WAKE_BYTES = 64 << 10;               // weights one thread reads in the time another needs to wake up
constexpr i64 WAKE_FLOATS = 16 << 10;              // activations, likewise, to be quantized

constexpr i64 quant_bytes(int format) { return format == INT8 ? PANEL * GROUP : PANEL * GROUP / 2; }
constexpr i64 group_bytes(int format) { return quant_bytes(format) + PANEL * (format == INT4_MIN ? 4 : 2); }

// Rows of quantized activations. `extra` is what the format multiplies beside the products of quants: for INT4 the
// integer 8 * sum(quants), to be taken off; for INT4_MIN scale * sum(quants), which meets the minima.
union Extra {
    std::int32_t integer;
    float number;
};

struct Activations {
    std::int8_t* quants;
    float* scales;
    Extra* extras;
    i64 groups;  // a row

    static i64 floats(i64 rows, i64 groups) { return rows * groups * (GROUP / 4 + 2); }
    Activations(float* memory, i64 rows, i64 groups)
        : quants(reinterpret_cast<std::int8_t*>(memory)),
          scales(memory + rows * groups * (GROUP / 4)),
          extras(reinterpret_cast<Extra*>(scales + rows * groups)),
          groups(groups) {}
};

typedef std::int8_t chars8 __attribute__((vector_size(8)));

// 32 floats to bytes, rounded to nearest even. A NaN or an infinity makes the scale NaN, and so every output of the row.
void quantize_group(const float* x, std::int8_t* quants, float& scale, std::int32_t& total) {
    floats8 peaks{}, poison{};
    for (int i = 0; i < GROUP; i += LANES) {
        floats8 v = load_as<floats8>(x + i), magnitude = (floats8)((uints8)v & 0x7fffffffu);
        peaks = magnitude > peaks ? magnitude : peaks;
        poison += v * 0.0f;
    }
    float peak = 0.0f, poisoned = 0.0f;
    for (int i = 0; i < LANES; i++) peak = std::max(peak, peaks[i]), poisoned += poison[i];
    float inverse = peak > 1e-30f && peak < INFINITY ? 127.0f / peak : 0.0f;  // below: 127 / peak may overflow
    scale = peak / 127.0f + poisoned;
    const floats8 magic = splat8(12582912.0f);  // 1.5 * 2 ** 23: adding it rounds to an integer
    ints8 sums{};
    for (int i = 0; i < GROUP; i += LANES) {
        ints8 q = (ints8)(load_as<floats8>(x + i) * inverse + magic) - (ints8)magic;
        sums += q;
        store_as(quants + i, __builtin_convertvector(q, chars8));
    }
    total = 0;
    for (int i = 0; i < LANES; i++) total += sums[i];
}

void quantize_row(const float* x, i64 depth, int format, const Activations& to, i64 row) {
    for (i64 g = 0; g < to.groups; g++) {
        float padded[GROUP];
        const float* from = x + g * GROUP;
        if (i64 width = depth - g * GROUP; width < GROUP) {
            std::fill(std::copy(from, from + width, padded), padded + GROUP, 0.0f);
            from = padded;
        }
        i64 at = row * to.groups + g;
        std::int32_t total;
        quantize_group(from, to.quants + at * GROUP, to.scales[at], total);
        if (format == INT4) to.extras[at].integer = 8 * total;
        else to.extras[at].number = to.scales[at] * static_cast<float>(total);
    }
}

// Products of one group, quants of ROWS activation rows that lie row_bytes apart: totals[row][half of the panel].
template <int FORMAT, int ROWS>
SHOAL_INLINE void multiply(const std::uint8_t* w, const std::int8_t* x, i64 row_bytes, ints8 (&totals)[ROWS][2]) {
    // Unrolled further, GCC sums all products at the end, out of memory.
    if constexpr (FORMAT == INT8) {
        for (int r = 0; r < ROWS; r++) totals[r][0] = totals[r][1] = ints8{};
#pragma GCC unroll 2
        for (int s = 0; s < STEPS; s++) {
            bytes32 first = load_as<bytes32>(w + s * 64), second = load_as<bytes32>(w + s * 64 + 32);
            for (int r = 0; r < ROWS; r++) {
                bytes32 four = quad(x + r * row_bytes + s * 4);
                totals[r][0] += add_pairs(pairs_signed(first, four));
                totals[r][1] += add_pairs(pairs_signed(second, four));
            }
        }
    } else {
        shorts16 sums[ROWS][2] = {};
#pragma GCC unroll 2
        for (int s = 0; s < STEPS; s++) {
            bytes32 both = load_as<bytes32>(w + s * 32), first = low_nibbles(both), second = high_nibbles(both);
            for (int r = 0; r < ROWS; r++) {
                bytes32 four = quad(x + r * row_bytes + s * 4);
                sums[r][0] += pairs_unsigned(first, four);
                sums[r][1] += pairs_unsigned(second, four);
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int half = 0; half < 2; half++) totals[r][half] = add_pairs(sums[r][half]);
    }
}

struct Output {
    float* data;
    i64 stride, columns;  // columns: outputs of the weight; the last panel may reach beyond
};

template <int FORMAT>
struct Linear {
    Activations x;
    const std::uint8_t* w;
    const float* bias;
    Output out;
    i64 rows, panels;
    int threads;

    template <int ROWS>
    void tile(i64 panel, i64 row) const {
        floats8 acc[ROWS][2];
        for (int half = 0; half < 2; half++) {
            floats8 start = bias ? load_as<floats8>(bias + panel * PANEL + half * LANES) : floats8{};
            for (int r = 0; r < ROWS; r++) acc[r][half] = start;
        }
        const std::uint8_t* group = w + panel * x.groups * group_bytes(FORMAT);
        for (i64 g = 0; g < x.groups; g++, group += group_bytes(FORMAT)) {
            for (i64 line = 0; line < group_bytes(FORMAT); line += 64) __builtin_prefetch(group + AHEAD + line);
            i64 at = row * x.groups + g;
            ints8 totals[ROWS][2];
            multiply<FORMAT, ROWS>(group, x.quants + at * GROUP, x.groups * GROUP, totals);
            auto scales = reinterpret_cast<const std::uint16_t*>(group + quant_bytes(FORMAT));
            for (int half = 0; half < 2; half++) {
                floats8 d = widen(scales + half * LANES);
                for (int r = 0; r < ROWS; r++) {
                    Extra extra = x.extras[at + r * x.groups];
                    ints8 total = totals[r][half];
                    if constexpr (FORMAT == INT4) total -= extra.integer;
                    acc[r][half] += d * x.scales[at + r * x.groups] * __builtin_convertvector(total, floats8);
                    if constexpr (FORMAT == INT4_MIN) acc[r][half] += widen(scales + PANEL + half * LANES) * extra.number;
                }
            }
        }
        for (int r = 0; r < ROWS; r++) write(acc[r], row + r, panel * PANEL);
    }

    SHOAL_INLINE void write(const floats8 (&values)[2], i64 row, i64 column) const {
        float* to = out.data + row * out.stride + column;
        if (i64 width = out.columns - column; width < PANEL) std::memcpy(to, values, width * sizeof(float));
        else std::memcpy(to, values, sizeof(values));
    }

    // A panel's weights, once read, stay in L1 for the rows that follow.
    template <int ROWS>
    void rows_of(i64 panel, i64 row, i64 end) const {
        for (; row + ROWS <= end; row += ROWS) tile<ROWS>(panel, row);
        if constexpr (ROWS > 1)
            if (row < end) rows_of<ROWS - 1>(panel, row, end);
    }

    void run() const {
        i64 tiles = (std::min(rows, ROW_BLOCK) + MAX_ROWS - 1) / MAX_ROWS;
        i64 row_blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
        i64 wanted = threads * (tiles == 1 ? 8 : 4);  // tasks, so that a thread that came late finds some
        i64 share = std::max<i64>(1, panels * row_blocks / wanted);
        parallel_for((panels + share - 1) / share * row_blocks, threads, [&](i64 task) {
            i64 row = task % row_blocks * ROW_BLOCK, end = std::min(rows, row + ROW_BLOCK);
            i64 panel = task / row_blocks * share, panel_end = std::min(panels, panel + share);
            for (; panel < panel_end; panel++) rows_of<MAX_ROWS>(panel, row, end);
        });
    }
};

template <int FORMAT>
void linear(const float* x, i64 x_stride, const std::uint8_t* packed, const float* bias, Output out, i64 rows, i64 depth,
            int threads) {
    static thread_local Scratch scratch;
    i64 groups = (depth + GROUP - 1) / GROUP, panels = (out.columns + PANEL - 1) / PANEL;
    Activations quantized(scratch.get(Activations::floats(rows, groups)), rows, groups);
    parallel_for(rows, worthwhile(threads, rows * depth, WAKE_FLOATS),
                 [&](i64 row) { quantize_row(x + row * x_stride, depth, FORMAT, quantized, row); });
    i64 bytes = panels * groups * group_bytes(FORMAT) * ((rows + MAX_ROWS - 1) / MAX_ROWS);
    Linear<FORMAT>{quantized, packed, bias, out, rows, panels, worthwhile(threads, bytes, WAKE_BYTES)}.run();
}

// Where quant k of output j of a panel lies in its group, and, at 4 bits, which nibble it is.
struct Place {
    i64 byte;
    int shift;
};

SHOAL_INLINE Place place(int format, int j, int k) {
    i64 byte = j % LANES * 4 + k % 4;
    if (format == INT8) return {k / 4 * 64 + j / LANES * 32 + byte, 0};
    return {k / 4 * 32 + byte, j / LANES * 4};
}

void pack_panel(int format, const std::uint8_t* quants, const std::uint16_t* scales, const std::uint16_t* minima,
                i64 outputs, i64 groups, std::uint8_t* to) {
    i64 row_bytes = format == INT8 ? GROUP : GROUP / 2;
    for (i64 g = 0; g < groups; g++, to += group_bytes(format)) {
        std::memset(to, 0, group_bytes(format));
        auto* numbers = reinterpret_cast<std::uint16_t*>(to + quant_bytes(format));
        for (int j = 0; j < outputs; j++) {
            const std::uint8_t* from = quants + (j * groups + g) * row_bytes;
            for (int k = 0; k < GROUP; k++) {
                Place at = place(format, j, k);
                std::uint8_t q = format == INT8 ? from[k] : k < 16 ? from[k] & 15 : from[k - 16] >> 4;
                to[at.byte] |= q << at.shift;
            }
            numbers[j] = scales[j * groups + g];
            if (format == INT4_MIN) numbers[PANEL + j] = minima[j * groups + g];
        }
    }
}

void unpack_row(int format, const std::uint8_t* panel, int j, i64 depth, float* out) {
    for (i64 k = 0; k < depth; k++) {
        const std::uint8_t* group = panel + k / GROUP * group_bytes(format);
        auto* numbers = reinterpret_cast<const std::uint16_t*>(group + quant_bytes(format));
        float scale = widen_one(numbers[j]);
        Place at = place(format, j, static_cast<int>(k % GROUP));
        int q = format == INT8 ? static_cast<std::int8_t>(group[at.byte]) : group[at.byte] >> at.shift & 15;
        if (format == INT4) q -= 8;
        out[k] = scale * static_cast<float>(q);
        if (format == INT4_MIN) out[k] += widen_one(numbers[PANEL + j]);
    }
}

}  // namespace
}  // namespace shoal

using namespace shoal;

extern "C" {

int shoal_quantized_panel() { return PANEL; }

// Bytes of one group of one panel.
i64 shoal_quantized_group_bytes(int format) { return group_bytes(format); }

// quants [outputs][groups][16 or 32 bytes], scales and (INT4_MIN only) minima [outputs][groups] in fp16 -> packed. At 4
// bits byte i of a group holds quant i in its low and quant 16 + i in its high nibble, as in GGUF files.
void shoal_pack_quantized(int format, const std::uint8_t* quants, const std::uint16_t* scales,
                          const std::uint16_t* minima, i64 outputs, i64 groups, std::uint8_t* packed, int threads) {
    i64 row_bytes = groups * (format == INT8 ? GROUP : GROUP / 2);
    parallel_for((outputs + PANEL - 1) / PANEL, threads, [&](i64 panel) {
        i64 first = panel * PANEL;
        pack_panel(format, quants + first * row_bytes, scales + first * groups, minima ? minima + first * groups : nullptr,
                   std::min<i64>(PANEL, outputs - first), groups, packed + panel * groups * group_bytes(format));
    });
}

// Rows `index` of a packed weight, as numbers: out [count, depth].
void shoal_quantized_rows(int format, const std::uint8_t* packed, i64 depth, const i64* index, i64 count, float* out,
                          int threads) {
    i64 panel_bytes = (depth + GROUP - 1) / GROUP * group_bytes(format);
    parallel_for(count, worthwhile(threads, count * depth, WAKE_FLOATS), [&](i64 i) {
        unpack_row(format, packed + index[i] / PANEL * panel_bytes, index[i] % PANEL, depth, out + i * depth);
    });
}

// x [rows, depth] (rows x_stride floats apart) -> `outputs` columns of out (rows out_stride floats apart). bias: null, or
// padded to whole panels.
void shoal_quantized_linear(int format, const float* x, i64 x_stride, const std::uint8_t* packed, const float* bias,
                            float* out, i64 out_stride, i64 rows, i64 outputs, i64 depth, int threads) {
    Output output{out, out_stride, outputs};
    if (rows == 0) return;
    if (format == INT4) linear<INT4>(x, x_stride, packed, bias, output, rows, depth, threads);
    else if (format == INT4_MIN) linear<INT4_MIN>(x, x_stride, packed, bias, output, rows, depth, threads);
    else linear<INT8>(x, x_stride, packed, bias, output, rows, depth, threads);
}
}

SHOAL_REPLAYABLE(quantized_rows)
SHOAL_REPLAYABLE(quantized_linear)
