// out = x * weight^T + bias, with the weight packed once into panels (tile.h), side by side in memory.
//
// Every output is one lane that starts from its bias and adds its K products in ascending order, whether it is computed
// alone or in a tile, and a partial sum stored between blocks of K is exact. So a row's result is the same bits
// whatever else is in the batch.

#include <array>
#include <utility>

#include "groups.h"
#include "parallel.h"
#include "replay.h"
#include "tile.h"
#include "tiles.h"

namespace shoal {
namespace {

constexpr i64 KC = 1536;                     // K of a block, at most: its weights stay in L2
constexpr i64 MC = 96;                       // rows of a block, at most: their sums with one panel fit L1
constexpr i64 L2_FLOATS = 96 << 10;          // activations of a block, at most: they stay in L2 for all panels
constexpr i64 AHEAD = 2 << 10;               // bytes of a panel fetched before they are needed
constexpr i64 WAKE_BYTES = 64 << 10;         // weights one thread reads in the time another needs to wake up

template <class W>
using Multiply = void (*)(Rows, const Weights<W>&, i64, float*);

// Tiles of 1 to MR rows: with one panel, and with as many as suit so few rows.
template <class W, std::size_t... R>
constexpr std::array<Multiply<W>, MR> with_one_panel(std::index_sequence<R...>) {
    return {multiply<W, R + 1, 1>...};
}
template <class W, std::size_t... R>
constexpr std::array<Multiply<W>, MR> with_panels_together(std::index_sequence<R...>) {
    return {multiply<W, R + 1, panels_together(R + 1)>...};
}
template <class W>
constexpr std::array<Multiply<W>, MR> ONE_PANEL = with_one_panel<W>(std::make_index_sequence<MR>());
template <class W>
constexpr std::array<Multiply<W>, MR> PANELS_TOGETHER = with_panels_together<W>(std::make_index_sequence<MR>());

struct Output {
    float* data;
    i64 stride, columns;  // columns: outputs of the weight; the last panel may reach beyond

    void fetch(i64 row, i64 rows, i64 column) const {
        for (i64 r = 0; r < rows; r++) __builtin_prefetch(data + (row + r) * stride + column, 1);
    }

    // sums [rows][width] to column and those that follow, as far as there are any.
    void write(const float* sums, i64 width, i64 row, i64 rows, i64 column) const {
        for (i64 r = 0; r < rows; r++) {
            float* to = data + (row + r) * stride + column;
            if (width > columns - column) {
                std::memcpy(to, sums + r * width, (columns - column) * sizeof(float));
            } else {
                for (i64 j = 0; j < width; j += VL) store(to + j, load(sums + r * width + j));
            }
        }
    }
};

template <class W>
struct Linear {
    Rows x;
    const W* w;
    const float* bias;
    Output out;
    i64 rows, depth, panels;

    // Pieces of work, which threads share out: few rows are one tile, for as many panels as suit it; many are blocks of
    // tiles, whose activations stay in L2 for one panel after the other.
    i64 units() const {
        if (rows <= MR) return rows == 0 ? 0 : ceil_div(panels, panels_together(static_cast<int>(rows)));
        return blocks() * panels;
    }

    i64 blocks() const {
        i64 most = std::max<i64>(1, std::min(MC, L2_FLOATS / depth) / MR);
        return ceil_div(Tiles(rows, MR).count, most);
    }

    void compute(i64 begin, i64 end) const {
        if (rows <= MR) one_tile(begin, end);
        else many_tiles(begin, end);
    }

    // The weight streams through once, bound by memory.
    void one_tile(i64 begin, i64 end) const {
        i64 together = panels_together(static_cast<int>(rows));
        i64 panel = begin * together, last = std::min(panels, end * together);
        for (; panel + together <= last; panel += together) tile(PANELS_TOGETHER<W>[rows - 1], panel, together);
        for (; panel < last; panel++) tile(ONE_PANEL<W>[rows - 1], panel, 1);
    }

    void tile(Multiply<W> multiply, i64 panel, i64 together) const {
        alignas(64) float sums[MR * NR * 2];
        start(sums, together * NR, rows, panel);
        const W* from = w + panel * depth * NR;
        multiply(x, {from, depth * NR, from + AHEAD / sizeof(W), NR * sizeof(W)}, depth, sums);
        out.write(sums, together * NR, 0, rows, panel * NR);
    }

    void start(float* sums, i64 width, i64 count, i64 panel) const {
        for (i64 r = 0; r < count; r++)
            for (i64 j = 0; j < width; j += VL) store(sums + r * width + j, bias ? load(bias + panel * NR + j) : vf{});
    }

    void many_tiles(i64 begin, i64 end) const {
        Tiles tiles(rows, MR);
        i64 count = blocks();
        for (i64 i = begin; i < end; i++) {
            i64 block = i / panels;
            block_of_rows(tiles, block * tiles.count / count, (block + 1) * tiles.count / count, i % panels);
        }
    }

    // A block of a panel's K stays in the cache for tiles [first, last), of which each fetches a part of the block that
    // follows in memory, and the lines of the output that it will write.
    void block_of_rows(const Tiles& tiles, i64 first, i64 last, i64 panel) const {
        alignas(64) float sums[MC * NR];
        i64 row = tiles.first_row(first), count = tiles.first_row(last) - row;
        i64 kc = ceil_div(depth, ceil_div(depth, KC));
        start(sums, NR, count, panel);
        for (i64 k = 0; k < depth; k += kc) {
            i64 steps = std::min(kc, depth - k), fetched = ceil_div(NR * sizeof(W), last - first);
            const W *now = w + (panel * depth + k) * NR, *next = now + steps * NR;
            for (i64 t = first; t < last; t++) {
                i64 at = tiles.first_row(t), size = tiles.first_row(t + 1) - at;
                Weights<W> block{now, 0, next + (t - first) * steps * NR / (last - first), fetched};
                if (k + steps == depth) out.fetch(at, size, panel * NR);
                ONE_PANEL<W>[size - 1]({x.data + at * x.stride + k, x.stride}, block, steps, sums + (at - row) * NR);
                if (k + steps == depth) out.write(sums + (at - row) * NR, NR, at, size, panel * NR);
            }
        }
    }

    void run(int threads) const {
        parallel_ranges(units(), threads, [&](i64 begin, i64 end) { compute(begin, end); });
    }
};

template <class W>
void grouped(Rows x, const void* const* packed, const std::int32_t* starts, i64 groups, Output out, i64 depth,
             int threads) {
    const i64 panels = ceil_div(out.columns, NR);
    auto group = [&](i64 g) {
        const i64 first = starts[g];
        return Linear<W>{{x.data + first * x.stride, x.stride}, static_cast<const W*>(packed[g]), nullptr,
                         {out.data + first * out.stride, out.stride, out.columns}, starts[g + 1] - first, depth, panels};
    };
    share_out_groups(groups, threads, group);
}

template <class W>
void pack(const W* weight, i64 outputs, i64 depth, W* packed, int threads) {
    parallel_for(ceil_div(outputs, NR), threads, [&](i64 panel) {
        W* to = packed + panel * NR * depth;
        for (int j = 0; j < NR; j++) {
            i64 row = panel * NR + j;
            int at = sizeof(W) == 4 ? j : j % VL * 2 + j / VL;
            for (i64 k = 0; k < depth; k++) to[k * NR + at] = row < outputs ? weight[row * depth + k] : W{};
        }
    });
}

template <class W>
void gather(const W* packed, i64 depth, const i64* index, i64 count, float* out, int threads) {
    parallel_for(count, worthwhile(threads, count * depth, 32 << 10), [&](i64 i) {
        i64 panel = index[i] / NR;
        int j = index[i] % NR, at = sizeof(W) == 4 ? j : j % VL * 2 + j / VL;
        const W* from = packed + panel * NR * depth + at;
        for (i64 k = 0; k < depth; k++) out[i * depth + k] = to_float(from[k * NR]);
    });
}

}  // namespace
}  // namespace shoal

using namespace shoal;

extern "C" {

int shoal_panel_outputs() { return NR; }

// weight [outputs, depth] -> packed [ceil(outputs / NR)][depth][NR]; elements of 2 (bfloat16) or 4 bytes (float).
void shoal_pack_weight(const void* weight, int bytes, i64 outputs, i64 depth, void* packed, int threads) {
    if (bytes == 2) pack((const std::uint16_t*)weight, outputs, depth, (std::uint16_t*)packed, threads);
    else pack((const float*)weight, outputs, depth, (float*)packed, threads);
}

// Rows `index` of a packed weight as out [count, depth].
void shoal_weight_rows(const void* packed, int bytes, i64 depth, const i64* index, i64 count, float* out, int threads) {
    if (bytes == 2) gather((const std::uint16_t*)packed, depth, index, count, out, threads);
    else gather((const float*)packed, depth, index, count, out, threads);
}

// x [rows, depth] (rows x_stride floats apart) -> out [rows, outputs], contiguous. bias: null, or padded like packed.
void shoal_linear(const float* x, i64 x_stride, const void* packed, int bytes, const float* bias, float* out, i64 rows,
                  i64 outputs, i64 depth, int threads) {
    i64 panels = ceil_div(outputs, NR);
    if (rows == 0) return;
    threads = worthwhile(threads, panels * NR * depth * bytes * ceil_div(rows, MR), WAKE_BYTES);
    Output output{out, outputs, outputs};
    Rows in{x, x_stride};
    if (bytes == 2)
        Linear<std::uint16_t>{in, (const std::uint16_t*)packed, bias, output, rows, depth, panels}.run(threads);
    else
        Linear<float>{in, (const float*)packed, bias, output, rows, depth, panels}.run(threads);
}

// Rows starts[g] : starts[g + 1] of x (x_stride floats apart) times the weight packed[g], for each group, into the same
// rows of out [any, outputs], contiguous. All weights are [outputs, depth], of elements of 2 or 4 bytes.
void shoal_grouped_linear(const float* x, i64 x_stride, const void* const* packed, int bytes, const std::int32_t* starts,
                          i64 groups, float* out, i64 outputs, i64 depth, int threads) {
    const i64 tiles = grouped_tiles(starts, groups, MR);
    threads = worthwhile(threads, tiles * ceil_div(outputs, NR) * NR * depth * bytes, WAKE_BYTES);
    Output output{out, outputs, outputs};
    Rows in{x, x_stride};
    if (bytes == 2) grouped<std::uint16_t>(in, packed, starts, groups, output, depth, threads);
    else grouped<float>(in, packed, starts, groups, output, depth, threads);
}

// x [rows, heads, depth] (rows x_stride floats apart) -> out [rows, heads, outputs], contiguous: every head meets a
// weight of its own, packed one behind the other. A product of a head is one thread's.
void shoal_head_linear(const float* x, i64 x_stride, const void* packed, int bytes, float* out, i64 rows, i64 heads,
                       i64 outputs, i64 depth, int threads) {
    i64 panels = ceil_div(outputs, NR);
    if (rows == 0) return;
    threads = worthwhile(threads, heads * panels * NR * depth * bytes * ceil_div(rows, MR), WAKE_BYTES);
    parallel_for(heads, threads, [&](i64 h) {
        Output output{out + h * outputs, heads * outputs, outputs};
        Rows in{x + h * depth, x_stride};
        const i64 at = h * panels * NR * depth;
        if (bytes == 2)
            Linear<std::uint16_t>{in, (const std::uint16_t*)packed + at, nullptr, output, rows, depth, panels}.run(1);
        else
            Linear<float>{in, (const float*)packed + at, nullptr, output, rows, depth, panels}.run(1);
    });
}
}

SHOAL_REPLAYABLE(weight_rows)
SHOAL_REPLAYABLE(linear)
SHOAL_REPLAYABLE(grouped_linear)
SHOAL_REPLAYABLE(head_linear)
