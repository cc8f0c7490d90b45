// out = x * weight^T + bias for weights of 4 or 8 bits in groups of 32 along K, multiplied as integers.
//
// An activation row is quantized to signed bytes, one fp32 scale a group (its largest magnitude / 127). The products of
// a group are summed exactly in integers; groups are added in ascending order by fp32 multiply-adds in the lane of
// their output. That is the arithmetic for every number of rows: a row's result is the same bits whatever else is in
// the batch.

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "groups.h"
#include "int_tile.h"
#include "parallel.h"
#include "replay.h"
#include "tiles.h"

namespace shoal {
namespace {

constexpr i64 MC = 96;                     // rows of a block, at most: their quants stay in L2, their sums in L1
constexpr i64 AHEAD = 2 << 10;             // bytes that weights are fetched in advance
constexpr i64 WAKE_BYTES = 64 << 10;       // weights one thread reads in the time another needs to wake up
constexpr i64 WAKE_FLOATS = 16 << 10;      // activations, likewise, to be quantized

// 32 floats to bytes, rounded to nearest even. A NaN or an infinity makes the scale NaN, and so all outputs of the row.
SHOAL_INLINE void quantize_group(const float* x, int format, Activations& to) {
    ints8 magnitudes{};  // as bits: in the order of the numbers, infinity and NaN above them all
    for (int i = 0; i < GROUP; i += LANES) magnitudes = maximum(magnitudes, load_as<ints8>(x + i) & 0x7fffffff);
    const std::int32_t bits = largest(magnitudes);
    float peak;
    std::memcpy(&peak, &bits, sizeof peak);
    const bool finite = bits < 0x7f800000;
    const float inverse = peak > 1e-30f && finite ? 127.0f / peak : 0.0f;  // below: 127 / peak may overflow
    const floats8 magic = splat8(12582912.0f);  // 1.5 * 2 ** 23: adding it rounds to an integer
    ints8 q[GROUP / LANES], totals{};
    for (int i = 0; i < GROUP / LANES; i++) {
        q[i] = (ints8)(load_as<floats8>(x + i * LANES) * inverse + magic) - (ints8)magic;
        totals += q[i];
    }
    store_as(to.quants, narrowed(q));
    to.scale = finite ? peak / 127.0f : NAN;
    const std::int32_t total = sum(totals);
    if (format == INT4) to.extra.integer = (-8 * total) & 0xffff;  // begins one of the two sums of 16 bits
    else to.extra.number = to.scale * static_cast<float>(total);
}

void quantize_row(const float* x, i64 depth, int format, Activations* to) {
    i64 whole = depth / GROUP, rest = depth % GROUP;
    for (i64 g = 0; g < whole; g++) quantize_group(x + g * GROUP, format, to[g]);
    if (rest == 0) return;
    float padded[GROUP] = {};
    std::memcpy(padded, x + whole * GROUP, rest * sizeof(float));
    quantize_group(padded, format, to[whole]);
}

using Multiply = void (*)(QuantizedRows, const QuantizedWeights&, i64, float*);

template <int FORMAT, std::size_t... R>
constexpr std::array<Multiply, sizeof...(R)> tiles_of(std::index_sequence<R...>) {
    return {multiply_quantized<FORMAT, R + 1>...};
}
template <int FORMAT>
constexpr auto TILES = tiles_of<FORMAT>(std::make_index_sequence<max_rows(FORMAT)>());  // of 1, 2, ... rows

struct Output {
    float* data;
    i64 stride, columns;  // columns: outputs of the weight; the last panel may reach beyond

    // sums [rows][PANEL] to column and those that follow, as far as there are any.
    void write(const float* sums, i64 row, i64 rows, i64 column) const {
        for (i64 r = 0; r < rows; r++, sums += PANEL) {
            float* to = data + (row + r) * stride + column;
            if (columns - column < PANEL) std::memcpy(to, sums, (columns - column) * sizeof(float));
            else std::memcpy(to, sums, PANEL * sizeof(float));
        }
    }
};

template <int FORMAT>
struct Linear {
    static constexpr i64 MR = max_rows(FORMAT);

    QuantizedRows x;
    const std::uint8_t* w;
    const float* bias;
    Output out;
    i64 rows, panels;

    i64 panel_bytes() const { return x.stride * group_bytes(FORMAT); }

    // Rows [row, row + count), of one tile, times one panel.
    void tile(i64 row, i64 count, i64 panel, const std::uint8_t* ahead, i64 ahead_step) const {
        alignas(64) float sums[MR * PANEL];
        for (i64 r = 0; r < count; r++)
            if (bias) std::memcpy(sums + r * PANEL, bias + panel * PANEL, PANEL * sizeof(float));
            else std::memset(sums + r * PANEL, 0, PANEL * sizeof(float));
        QuantizedWeights weights{w + panel * panel_bytes(), ahead, ahead_step};
        TILES<FORMAT>[count - 1]({x.data + row * x.stride, x.stride}, weights, x.stride, sums);
        out.write(sums, row, count, panel * PANEL);
    }

    // Pieces of work, which threads share out: one panel and a tile, or a block of them.
    i64 units() const { return rows == 0 ? 0 : rows <= MR ? panels : blocks() * panels; }
    i64 blocks() const { return ceil_div(Tiles(rows, MR).count, MC / MR); }

    void compute(i64 begin, i64 end) const {
        if (rows <= MR) one_tile(begin, end);
        else many_tiles(begin, end);
    }

    // The weight streams through once, bound by memory.
    void one_tile(i64 begin, i64 end) const {
        for (i64 panel = begin; panel < end; panel++)
            tile(0, rows, panel, w + panel * panel_bytes() + AHEAD, group_bytes(FORMAT));
    }

    // Blocks of rows for one panel after the other, which stays in the cache for their tiles. Each tile fetches a part
    // of the panel that follows.
    void many_tiles(i64 begin, i64 end) const {
        Tiles tiles(rows, MR);
        for (i64 i = begin; i < end; i++) {
            i64 block = i / panels, panel = i % panels;
            i64 first = block * tiles.count / blocks(), last = (block + 1) * tiles.count / blocks();
            const std::uint8_t* next = w + (panel + 1) * panel_bytes();
            for (i64 t = first; t < last; t++) {
                i64 row = tiles.first_row(t), part = (t - first) * panel_bytes() / (last - first);
                i64 count = tiles.first_row(t + 1) - row, step = ceil_div(group_bytes(FORMAT), last - first);
                tile(row, count, panel, next + part, step);
            }
        }
    }

    void run(int threads) const {
        parallel_ranges(units(), threads, [&](i64 begin, i64 end) { compute(begin, end); });
    }
};

// x [rows, depth] as bytes, in memory of the calling thread that the next call reuses.
template <int FORMAT>
QuantizedRows quantized(const float* x, i64 x_stride, i64 rows, i64 depth, int threads) {
    static thread_local Scratch scratch;
    i64 groups = ceil_div(depth, GROUP);
    auto to = reinterpret_cast<Activations*>(scratch.get(rows * groups * (sizeof(Activations) / sizeof(float))));
    parallel_for(rows, worthwhile(threads, rows * depth, WAKE_FLOATS),
                 [&](i64 row) { quantize_row(x + row * x_stride, depth, FORMAT, to + row * groups); });
    return {to, groups};
}

template <int FORMAT>
void linear(const float* x, i64 x_stride, const std::uint8_t* packed, const float* bias, Output out, i64 rows, i64 depth,
            int threads) {
    QuantizedRows in = quantized<FORMAT>(x, x_stride, rows, depth, threads);
    i64 panels = ceil_div(out.columns, PANEL);
    i64 bytes = panels * in.stride * group_bytes(FORMAT) * ceil_div(rows, max_rows(FORMAT));
    Linear<FORMAT>{in, packed, bias, out, rows, panels}.run(worthwhile(threads, bytes, WAKE_BYTES));
}

template <int FORMAT>
void grouped(const float* x, i64 x_stride, const void* const* packed, const std::int32_t* starts, i64 groups, Output out,
             i64 depth, int threads) {
    QuantizedRows in = quantized<FORMAT>(x, x_stride, starts[groups], depth, threads);
    i64 panels = ceil_div(out.columns, PANEL), tiles = grouped_tiles(starts, groups, max_rows(FORMAT));
    auto group = [&](i64 g) {
        const i64 first = starts[g];
        return Linear<FORMAT>{{in.data + first * in.stride, in.stride}, static_cast<const std::uint8_t*>(packed[g]),
                              nullptr, {out.data + first * out.stride, out.stride, out.columns}, starts[g + 1] - first,
                              panels};
    };
    share_out_groups(groups, worthwhile(threads, panels * in.stride * group_bytes(FORMAT) * tiles, WAKE_BYTES), group);
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

// Rows starts[g] : starts[g + 1] of x (x_stride floats apart) times the weight packed[g], for each group, into the same
// rows of out [any, outputs], contiguous. All weights are [outputs, depth], of one format.
void shoal_grouped_quantized_linear(int format, const float* x, i64 x_stride, const void* const* packed,
                                    const std::int32_t* starts, i64 groups, float* out, i64 outputs, i64 depth,
                                    int threads) {
    Output output{out, outputs, outputs};
    if (format == INT4) grouped<INT4>(x, x_stride, packed, starts, groups, output, depth, threads);
    else if (format == INT4_MIN) grouped<INT4_MIN>(x, x_stride, packed, starts, groups, output, depth, threads);
    else grouped<INT8>(x, x_stride, packed, starts, groups, output, depth, threads);
}
}

SHOAL_REPLAYABLE(quantized_rows)
SHOAL_REPLAYABLE(quantized_linear)
SHOAL_REPLAYABLE(grouped_quantized_linear)
