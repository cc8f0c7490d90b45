// out = x * weight^T + bias, with the weight packed once into panels.
//
// A panel holds NR = 2 * VL outputs as [K][NR], so that one step of K is two vectors, side by side in memory for the
// whole panel. bfloat16 panels interleave output j with output j + VL: 32 bits hold both, and widening them costs a
// shift and a mask instead of shuffles.
//
// Every output is one lane that starts from its bias and adds its K products in ascending order, whether it is computed
// alone or in a tile, and a partial sum stored between blocks of K is exact. So a row's result is the same bits
// whatever else is in the batch.

#include <algorithm>

#include "parallel.h"
#include "replay.h"

namespace shoal {
namespace {

constexpr int NR = 2 * VL;                        // outputs of a panel
constexpr int MR = REGISTERS == 32 ? 12 : 6;      // rows of a register tile: MR * 2 accumulators
constexpr i64 KC = 192;                           // K of a block: its weights, the next block's and a tile fit L1
constexpr i64 MC = 96;                            // rows of a block: MC * KC activations stay in L2
constexpr i64 AHEAD = 2 << 10;                    // bytes of a panel fetched before they are needed
constexpr i64 L2_FLOATS = 64 << 10;               // activations that stay in L2 beside the weights
constexpr int LINE = 64;                          // bytes of a cache line
constexpr i64 WAKE_BYTES = 64 << 10;              // weights one thread reads in the time another needs to wake up

struct Panel {  // one step of K of one panel, widened
    vf first, second;
};

SHOAL_INLINE Panel weights(const float* w) { return {load(w), load(w + VL)}; }
SHOAL_INLINE Panel weights(const std::uint16_t* w) {
    vu both = load(reinterpret_cast<const std::uint32_t*>(w));
    return {low_half(both), high_half(both)};
}

struct Output {
    float* data;
    i64 stride, columns;  // columns: outputs of the weight; the last panel may reach beyond
};

template <int ROWS, int PANELS>
struct Tile {
    vf acc[ROWS][PANELS][2];

    SHOAL_INLINE void from_bias(const float* bias, i64 column) {
        for (int p = 0; p < PANELS; p++)
            for (int half = 0; half < 2; half++) {
                vf b = bias ? load(bias + column + p * NR + half * VL) : vf{};
                for (int r = 0; r < ROWS; r++) acc[r][p][half] = b;
            }
    }

    template <class W>
    SHOAL_INLINE void add(const float* a, i64 row_step, const W* w, i64 panel_size) {
        Panel b[PANELS];
        for (int p = 0; p < PANELS; p++) b[p] = weights(w + p * panel_size);
        for (int r = 0; r < ROWS; r++) {
            vf x = splat(a[r * row_step]);
            for (int p = 0; p < PANELS; p++) {
                acc[r][p][0] += x * b[p].first;
                acc[r][p][1] += x * b[p].second;
            }
        }
    }

    // Activation (row r, step k) is at a[r * row_step + k * k_step]. Meanwhile `ahead` (one a panel, panel_size apart) is
    // fetched into the cache, `ahead_step` bytes a step of K.
    template <class W>
    SHOAL_INLINE void accumulate(const float* a, i64 row_step, i64 k_step, const W* w, i64 panel_size, i64 depth,
                                 const W* ahead, i64 ahead_step) {
        constexpr int STEPS = LINE / (NR * sizeof(W)) < 1 ? 1 : LINE / (NR * sizeof(W));  // of K in a line of weights
        const char* fetch = reinterpret_cast<const char*>(ahead);
        i64 k = 0;
        for (; k + STEPS <= depth; k += STEPS, fetch += STEPS * ahead_step) {
            if constexpr (ROWS > 1)  // one row leaves the hardware's own prefetching time enough
                for (int p = 0; p < PANELS; p++) __builtin_prefetch(fetch + p * panel_size * sizeof(W));
            for (int i = 0; i < STEPS; i++) add(a + (k + i) * k_step, row_step, w + (k + i) * NR, panel_size);
        }
        for (; k < depth; k++) add(a + k * k_step, row_step, w + k * NR, panel_size);
    }

    template <class Move>
    SHOAL_INLINE void each(const Output& out, i64 row, i64 rows, i64 column, Move move) {
        for (int r = 0; r < ROWS && r < rows; r++)
            for (int p = 0; p < PANELS; p++) {
                i64 c = column + p * NR;
                move(out.data + (row + r) * out.stride + c, acc[r][p], std::min<i64>(NR, out.columns - c));
            }
    }

    SHOAL_INLINE void load_from(const Output& out, i64 row, i64 rows, i64 column) {
        each(out, row, rows, column, [](float* at, vf* v, i64 width) {
            if (width == NR) {
                v[0] = load(at), v[1] = load(at + VL);
            } else {
                float whole[NR] = {};
                std::memcpy(whole, at, width * sizeof(float));
                v[0] = load(whole), v[1] = load(whole + VL);
            }
        });
    }

    SHOAL_INLINE void store_to(const Output& out, i64 row, i64 rows, i64 column) {
        each(out, row, rows, column, [](float* at, vf* v, i64 width) {
            if (width == NR) {
                store(at, v[0]), store(at + VL, v[1]);
            } else {
                float whole[NR];
                store(whole, v[0]), store(whole + VL, v[1]);
                std::memcpy(at, whole, width * sizeof(float));
            }
        });
    }
};

template <class W>
struct Linear {
    const float* x;
    i64 x_stride;
    const W* w;
    const float* bias;
    Output out;
    i64 rows, depth, panels;
    int threads;

    template <int ROWS, int PANELS>
    void few_rows_tile(i64 panel) const {
        Tile<ROWS, PANELS> tile{};
        tile.from_bias(bias, panel * NR);
        const W* from = w + panel * depth * NR;
        tile.accumulate(x, x_stride, 1, from, depth * NR, depth, from + AHEAD / sizeof(W), NR * sizeof(W));
        tile.store_to(out, 0, ROWS, panel * NR);
    }

    // All rows fit one register tile: the weight streams through once, bound by memory.
    template <int ROWS>
    void few_rows() const {
        constexpr int TOGETHER = ROWS == 1 ? 4 : ROWS <= 3 ? 2 : 1;  // enough chains to hide the latency of an FMA
        i64 share = (panels + threads * 8 - 1) / (threads * 8);
        share = std::max<i64>(TOGETHER, (share + TOGETHER - 1) / TOGETHER * TOGETHER);
        parallel_for((panels + share - 1) / share, threads, [&](i64 task) {
            i64 panel = task * share, end = std::min(panels, panel + share);
            for (; panel + TOGETHER <= end; panel += TOGETHER) few_rows_tile<ROWS, TOGETHER>(panel);
            for (; panel < end; panel++) few_rows_tile<ROWS, 1>(panel);
        });
    }

    // Activations of tile t as [K][ROWS] at packed + t * depth * ROWS; missing rows are zero.
    template <int ROWS>
    void pack_tile(i64 tile, float* packed) const {
        for (int r = 0; r < ROWS; r++) {
            i64 row = tile * ROWS + r;
            const float* from = x + row * x_stride;
            for (i64 k = 0; k < depth; k++) packed[(tile * depth + k) * ROWS + r] = row < rows ? from[k] : 0.0f;
        }
    }

    // Steps [k0, k0 + KC) of one panel for tiles [tile, tile_end). They find the weights in the cache, where the tiles of
    // the panel before fetched them; so do they, a part each, with those that come next in memory.
    template <int ROWS>
    void pass(const float* packed, i64 first_tile, i64 tile_end, i64 p, i64 k0) const {
        i64 kc = std::min(KC, depth - k0), tiles = tile_end - first_tile;
        const W *now = w + (p * depth + k0) * NR, *next = now + kc * NR;
        for (i64 t = first_tile; t < tile_end; t++) {
            Tile<ROWS, 1> tile{};
            if (k0 == 0) tile.from_bias(bias, p * NR);
            else tile.load_from(out, t * ROWS, rows - t * ROWS, p * NR);
            tile.accumulate(packed + (t * depth + k0) * ROWS, 1, ROWS, now, 0, kc,
                            next + (t - first_tile) * kc * NR / tiles, NR * sizeof(W) / tiles + 1);
            tile.store_to(out, t * ROWS, rows - t * ROWS, p * NR);
        }
    }

    // Panels [panel, panel_end) for tiles [tile, tile_end): a block of weights stays in L1 for all tiles. The weights go
    // by in the order of memory, except where so many activations would not stay in L2.
    template <int ROWS>
    void block(const float* packed, i64 first_tile, i64 tile_end, i64 panel, i64 panel_end) const {
        if ((tile_end - first_tile) * ROWS * depth <= L2_FLOATS) {
            for (i64 p = panel; p < panel_end; p++)
                for (i64 k0 = 0; k0 < depth; k0 += KC) pass<ROWS>(packed, first_tile, tile_end, p, k0);
        } else {
            for (i64 k0 = 0; k0 < depth; k0 += KC)
                for (i64 p = panel; p < panel_end; p++) pass<ROWS>(packed, first_tile, tile_end, p, k0);
        }
    }

    template <int ROWS>
    void many_rows() const {
        static thread_local Scratch scratch;
        i64 tiles = (rows + ROWS - 1) / ROWS;
        float* packed = scratch.get(tiles * ROWS * depth);
        parallel_for(tiles, threads, [&](i64 tile) { pack_tile<ROWS>(tile, packed); });
        i64 tile_share = std::max<i64>(1, MC / ROWS), row_blocks = (tiles + tile_share - 1) / tile_share;
        i64 panel_share = std::max<i64>(1, std::min<i64>(8, panels * row_blocks / (threads * 4)));
        parallel_for((panels + panel_share - 1) / panel_share * row_blocks, threads, [&](i64 task) {
            i64 tile = task % row_blocks * tile_share, panel = task / row_blocks * panel_share;
            block<ROWS>(packed, tile, std::min(tiles, tile + tile_share), panel, std::min(panels, panel + panel_share));
        });
    }

    template <int ROWS>
    void dispatch() const {
        if constexpr (ROWS <= MR) {
            i64 tiles = (rows + MR - 1) / MR;  // as even as possible: 7 rows are 4 + 3, not 6 + 1
            if ((rows + tiles - 1) / tiles != ROWS) return dispatch<ROWS + 1>();
            if (tiles == 1) few_rows<ROWS>();
            else many_rows<ROWS>();
        }
    }
};

template <class W>
void pack(const W* weight, i64 outputs, i64 depth, W* packed, int threads) {
    parallel_for((outputs + NR - 1) / NR, threads, [&](i64 panel) {
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
    i64 panels = (outputs + NR - 1) / NR;
    if (rows == 0) return;
    threads = worthwhile(threads, panels * NR * depth * bytes * ((rows + MR - 1) / MR), WAKE_BYTES);
    Output output{out, outputs, outputs};
    if (bytes == 2)
        Linear<std::uint16_t>{x, x_stride, (const std::uint16_t*)packed, bias, output, rows, depth, panels, threads}
            .dispatch<1>();
    else
        Linear<float>{x, x_stride, (const float*)packed, bias, output, rows, depth, panels, threads}.dispatch<1>();
}
}

SHOAL_REPLAYABLE(weight_rows)
SHOAL_REPLAYABLE(linear)
