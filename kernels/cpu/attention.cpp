// Causal attention over packed pages, online softmax (Milakov & Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022,
// arXiv:2205.14135). One routine for decode, chunked prefill and prefill.
//
// A tile is TILE_ROWS or fewer (query token, head) pairs that share one key-value head, so that every key and value
// loaded serves them all. Keys go by in blocks of KEYS positions; every SEGMENT positions the partial result (maximum,
// sum, accumulator) is merged into the tile's. Few rows read the pages directly (direct.h), many widen a block first
// (widened.h), with the same order of additions. Blocks and segments lie at fixed positions and a key that a row may
// not see contributes exact zeros, so a query's result has the same bits in any batch, in any chunk, and whether its
// segments were computed one after another or by several threads.
//
// Latent attention (DeepSeek-AI 2024, arXiv:2405.04434, with the keys' projection absorbed into the queries) is the same
// with one key a token for all heads, of which the first channels are the value: rows are many, and always widened.

#include <vector>

#include "direct.h"
#include "parallel.h"
#include "replay.h"

namespace shoal {
namespace {

constexpr i64 SEGMENT = 256;
constexpr i64 TILE_ROWS = 96;
constexpr float LN2 = 0.693147181f, LOG2E = 1.44269504f;
constexpr i64 WAKE_WORK = 64 << 10;  // row * key * channel, as `worthwhile` counts

struct Shape {
    i64 seqs, heads, kv_heads, dim, value_dim, block_size, table_stride, q_stride, window;  // window 0: none
};

struct Tile {
    i64 seq, head, first_row, tokens, position;  // first_row of q; position: of the first query token
    i64 seen;                                    // the first position that its first token sees
    i64 partial;                                 // of its first segment, when segments are computed apart

    i64 end() const { return position + tokens; }
    i64 first_segment() const { return seen / SEGMENT; }
    i64 end_segment() const { return (end() + SEGMENT - 1) / SEGMENT; }
    i64 segments() const { return end_segment() - first_segment(); }
};

// What a tile knows of its rows after some keys. `acc` is [rows][width], with first_channels before second_channels.
struct Partial {
    float *peak, *total, *acc;  // peak: largest score in units of log2; total: sum of 2 ** (score - peak)

    static i64 floats(i64 rows, i64 width) { return (rows + 15) / 16 * 32 + rows * width; }
    Partial(float* memory, i64 rows)
        : peak(memory), total(memory + (rows + 15) / 16 * 16), acc(memory + (rows + 15) / 16 * 32) {}

    void clear(i64 rows, i64 width) {
        std::fill(peak, peak + rows, -INFINITY);
        std::fill(total, total + rows, 0.0f);
        std::fill(acc, acc + rows * width, 0.0f);
    }

    void merge(const Partial& later, i64 rows, i64 width) {
        for (i64 r = 0; r < rows; r++) {
            if (later.total[r] == 0.0f) continue;  // it saw no key
            float top = later.peak[r] > peak[r] ? later.peak[r] : peak[r];
            float mine = exp2_negative(splat(peak[r] - top))[0], theirs = exp2_negative(splat(later.peak[r] - top))[0];
            peak[r] = top;
            total[r] = total[r] * mine + later.total[r] * theirs;
            float *a = acc + r * width, *b = later.acc + r * width;
            for (i64 c = 0; c < width; c++) a[c] = a[c] * mine + b[c] * theirs;
        }
    }
};

// What a thread needs beside the partials while it computes a tile.
struct Workspace {
    float *queries, *totals, *shrink, *scores, *panels;
    std::int32_t* position;

    static i64 floats(i64 rows, i64 dim, i64 width) {
        return rows * (dim + VL) + (rows + 15) / 16 * 32 + ROW_BLOCK * KEYS + widened::Panels::floats(dim, width);
    }
    Workspace(float* memory, i64 rows, i64 dim, i64 width) {
        panels = memory, scores = panels + widened::Panels::floats(dim, width), shrink = scores + ROW_BLOCK * KEYS;
        position = reinterpret_cast<std::int32_t*>(shrink + (rows + 15) / 16 * 16);
        totals = shrink + (rows + 15) / 16 * 32, queries = totals + rows * VL;
    }
};

// Queries of latent attention come in two parts: [tokens, heads, value_dim], and the rotated rest of `dim`.
struct RotatedQueries {
    const float* data;
    i64 stride;  // from token to token
};

template <class E, bool LATENT>
struct Attention {
    Shape s;
    const float* q;
    RotatedQueries rotated;  // LATENT only
    const E *k, *v;
    const std::int32_t *query_start, *seq_lens, *tables;
    float scale;
    float *out, *lse;

    i64 group() const { return s.heads / s.kv_heads; }
    i64 width() const { return (s.value_dim + PANEL - 1) / PANEL * PANEL; }
    i64 rows(const Tile& t) const { return t.tokens * group(); }
    i64 cost(const Tile& t) const { return rows(t) * t.segments() * SEGMENT; }

    // Queries [rows][dim], scaled so that scores are in units of log2.
    void load_queries(const Tile& t, const Workspace& w) const {
        float* to = w.queries;
        for (i64 i = 0, row = 0; i < t.tokens; i++) {
            const float* from = q + (t.first_row + i) * s.q_stride + t.head * group() * s.dim;
            for (i64 j = 0; j < group(); j++) w.position[row++] = static_cast<std::int32_t>(t.position + i);
            for (i64 j = 0; j < group() * s.dim; j++) *to++ = from[j] * (scale * LOG2E);
        }
    }
    void load_latent_queries(const Tile& t, const Workspace& w) const {
        const i64 rest = s.dim - s.value_dim;
        float* to = w.queries;
        for (i64 i = 0, row = 0; i < t.tokens; i++) {
            const float *from = q + (t.first_row + i) * s.q_stride;
            const float *second = rotated.data + (t.first_row + i) * rotated.stride;
            for (i64 j = 0; j < s.heads; j++, from += s.value_dim, second += rest) {
                w.position[row++] = static_cast<std::int32_t>(t.position + i);
                for (i64 c = 0; c < s.value_dim; c++) *to++ = from[c] * (scale * LOG2E);
                for (i64 c = 0; c < rest; c++) *to++ = second[c] * (scale * LOG2E);
            }
        }
    }

    // Where the granule of this number lies, in elements of either kind of pages, from the start of its head's part.
    struct Place {
        i64 head, offset;
    };
    Place place(const Tile& t, i64 granule) const {
        const std::uint32_t a_block = s.block_size / GRANULE, number = granule;
        const std::uint32_t index = a_block == 1 ? number : number / a_block;  // a division takes as long as a score
        const i64 block = tables[t.seq * s.table_stride + index];
        return {(block * s.kv_heads + t.head) * s.block_size * s.dim, (number - index * a_block) * GRANULE};
    }
    const E* keys(Place p) const { return k + p.head + p.offset * (LATENT ? s.dim : 2); }
    const E* values(Place p) const { return LATENT ? keys(p) : v + p.head + p.offset * s.dim; }

    // The block at `base` with the keys [from, to) of tile t; granules beyond the tile's own are those of `next`.
    Block<E> block(const Tile& t, const Tile* next, i64 base, i64 from, i64 to) const {
        Block<E> b;
        b.base = base, b.begin = std::max(from - base, i64{0}), b.end = std::min(to - base, KEYS);
        b.block_size = s.block_size;
        const i64 granules = (t.end() + GRANULE - 1) / GRANULE;
        for (i64 g = b.begin / GRANULE; g * GRANULE < b.end; g++) {
            const i64 number = base / GRANULE + g, ahead = number + GRANULES;
            const Place here = place(t, number);
            Place there = here;
            if (ahead < granules) {
                there = place(t, ahead);
            } else if (next) {
                const i64 first = next->seen / GRANULE + ahead - granules;
                if (first * GRANULE < next->end()) there = place(*next, first);
            }
            b.keys[g] = keys(here), b.values[g] = values(here);
            b.keys_ahead[g] = keys(there), b.values_ahead[g] = values(there);
        }
        return b;
    }

    void few_rows(const Tile& t, const Workspace& w, const Block<E>& b, const Running& run, float* acc) const {
        constexpr int MOST = direct::ROWS_AT_ONCE<E>;
        by_rows(rows(t), MOST, [&](i64 row, i64 size) {
            with_constant<MOST>(size, [&](auto n) {
                direct::score<n>(w.queries + row * s.dim, s.dim, b, w.scores);
                softmax<n>(run, row, b.base, b.begin, b.end, w.scores);
                direct::accumulate<n>(w.scores, b, s.dim, width(), w.shrink + row, acc + row * width());
            });
        });
    }

    void many_rows(const Tile& t, const Workspace& w, const Block<E>& b, const Running& run, float* acc) const {
        const widened::Panels panels(w.panels, s.dim, s.value_dim, width());
        if constexpr (LATENT) widened::key_rows(b, panels);
        else widened::keys(b, panels);
        widened::values(b, s.dim, panels);
        by_rows(rows(t), ROW_BLOCK, [&](i64 row, i64 size) {
            const i64 end = std::min<i64>(b.end, w.position[row + size - 1] + 1 - b.base);
            const i64 hidden = s.window ? w.position[row] + 1 - s.window - b.base : 0;
            const i64 begin = std::max(b.begin, hidden);
            if (begin >= end) return;
            with_constant<ROW_BLOCK>(size, [&](auto n) {
                widened::score<n>(w.queries + row * s.dim, panels, begin, end, w.scores);
                softmax<n>(run, row, b.base, begin, end, w.scores);
                widened::accumulate<n>(w.scores, panels, begin, end, w.shrink + row, acc + row * width());
            });
        });
    }

    // The tile over one segment, into a cleared partial.
    void segment(const Tile& t, const Tile* next, i64 index, const Workspace& w, Partial& p) const {
        const i64 from = std::max(index * SEGMENT, t.seen), to = std::min((index + 1) * SEGMENT, t.end());
        const Running run{p.peak, w.totals, w.shrink, w.position, s.window};
        std::fill(w.totals, w.totals + rows(t) * VL, 0.0f);
        for (i64 base = from / KEYS * KEYS; base < to; base += KEYS) {
            const Block<E> b = block(t, next, base, from, to);
            if constexpr (!LATENT)
                if (rows(t) <= direct::MOST_TIMES * direct::ROWS_AT_ONCE<E>) {
                    few_rows(t, w, b, run, p.acc);
                    continue;
                }
            many_rows(t, w, b, run, p.acc);
        }
        for (i64 r = 0; r < rows(t); r++) p.total[r] = sum(load(w.totals + r * VL));
    }

    void finish(const Tile& t, const Partial& p) const {
        const i64 heads = group();
        for (i64 r = 0; r < rows(t); r++) {
            const i64 row = (t.first_row + r / heads) * s.heads + t.head * heads + r % heads;
            const float inverse = t.position + r / heads < 0 ? 0.0f : 1.0f / p.total[r];  // before the first key: zeros
            float *to = out + row * s.value_dim, *acc = p.acc + r * width();
            i64 c = 0;
            for (; c + PANEL <= s.value_dim; c += PANEL) {
                vf first = load(acc + c) * inverse, second = load(acc + c + VL) * inverse, a, b;
                in_order(first, second, a, b, k);
                store(to + c, a), store(to + c + VL, b);
            }
            for (; c < s.value_dim; c++) to[c] = acc[c] * inverse;
            if (lse) lse[row] = (p.peak[r] + std::log2(p.total[r])) * LN2;
        }
    }

    std::vector<Tile> tiles() const {
        std::vector<Tile> list;
        for (i64 i = s.seqs - 1; i >= 0; i--) {
            const i64 count = query_start[i + 1] - query_start[i];
            if (count == 0) continue;
            const i64 most = std::max<i64>(1, TILE_ROWS / group()), parts = (count + most - 1) / most;
            const i64 tokens = (count + parts - 1) / parts;
            // The last tiles see the most keys: they start first.
            for (i64 at = (count - 1) / tokens * tokens; at >= 0; at -= tokens)
                for (i64 head = 0; head < s.kv_heads; head++) {
                    const i64 position = seq_lens[i] - count + at;
                    const i64 seen = s.window ? std::max<i64>(0, position + 1 - s.window) : 0;
                    list.push_back({i, head, query_start[i] + at, std::min(tokens, count - at), position, seen, -1});
                }
        }
        return list;
    }

    void run(i64 num_tokens, int threads) const {
        const i64 token = s.heads * s.value_dim;
        std::fill(out + query_start[s.seqs] * token, out + num_tokens * token, 0.0f);
        std::vector<Tile> list = tiles();
        i64 work = 0, max_rows = 0;
        for (const Tile& t : list) work += cost(t), max_rows = std::max(max_rows, rows(t));
        threads = worthwhile(threads, work * s.dim, WAKE_WORK);

        // A tile that is much of the whole is cut into its segments, for the threads to share.
        struct Task { Tile* tile; i64 segment; };  // segment -1: all of them, in order
        std::vector<Task> tasks;
        std::vector<Tile*> cut;
        i64 num_partials = 0, size = (Partial::floats(max_rows, width()) + 15) / 16 * 16;
        for (Tile& t : list) {
            if (threads > 1 && t.segments() > 1 && cost(t) * threads * 4 > work) {
                t.partial = num_partials;
                num_partials += t.segments();
                cut.push_back(&t);
                for (i64 i = t.first_segment(); i < t.end_segment(); i++) tasks.push_back({&t, i});
            } else {
                tasks.push_back({&t, -1});
            }
        }
        static thread_local Scratch shared;
        float* memory = shared.get(num_partials * size);
        auto partial = [&](const Tile& t, i64 segment) {
            return Partial(memory + (t.partial + segment - t.first_segment()) * size, rows(t));
        };

        parallel_for(tasks.size(), threads, [&](i64 i) {
            static thread_local Scratch own;
            const Tile& t = *tasks[i].tile;
            const Tile* next = i + threads < i64(tasks.size()) ? tasks[i + threads].tile : nullptr;
            float* partials = own.get(2 * size + Workspace::floats(max_rows, s.dim, width()));
            const Workspace w(partials + 2 * size, max_rows, s.dim, width());
            if constexpr (LATENT) load_latent_queries(t, w);
            else load_queries(t, w);
            if (tasks[i].segment >= 0) {
                Partial p = partial(t, tasks[i].segment);
                p.clear(rows(t), width());
                return segment(t, next, tasks[i].segment, w, p);
            }
            Partial all(partials, rows(t)), one(partials + size, rows(t));
            all.clear(rows(t), width());
            segment(t, next, t.first_segment(), w, all);  // merging it into nothing would give the same bits
            for (i64 n = t.first_segment() + 1; n < t.end_segment(); n++) {
                one.clear(rows(t), width());
                segment(t, next, n, w, one);
                all.merge(one, rows(t), width());
            }
            finish(t, all);
        });
        parallel_for(cut.size(), worthwhile(threads, num_partials * size, WAKE_WORK), [&](i64 i) {
            const Tile& t = *cut[i];
            Partial all = partial(t, t.first_segment());
            for (i64 n = t.first_segment() + 1; n < t.end_segment(); n++) all.merge(partial(t, n), rows(t), width());
            finish(t, all);
        });
    }
};

}  // namespace
}  // namespace shoal

using namespace shoal;

// q [num_tokens, heads, dim] (tokens q_stride floats apart); pages of 2 (bfloat16) or 4 bytes (float) an element; out
// [num_tokens, heads, dim] and lse [num_tokens, heads] (or null), contiguous. shape: the fields of Shape in order.
extern "C" void shoal_paged_attention(const float* q, const void* k, const void* v, int bytes,
                                      const std::int32_t* query_start, const std::int32_t* seq_lens,
                                      const std::int32_t* tables, const i64* shape, float scale, float* out, float* lse,
                                      i64 num_tokens, int threads) {
    Shape s;
    std::memcpy(&s, shape, sizeof s);
    auto run = [&](auto* keys, auto* values) {
        using E = std::remove_const_t<std::remove_pointer_t<decltype(keys)>>;
        Attention<E, false>{s, q, {}, keys, values, query_start, seq_lens, tables, scale, out, lse}.run(
            num_tokens, threads);
    };
    if (bytes == 2) run((const std::uint16_t*)k, (const std::uint16_t*)v);
    else run((const float*)k, (const float*)v);
}

// The same for latent pages [num_blocks, block_size, dim]: q [num_tokens, heads, value_dim] and q_rotated [num_tokens,
// heads, dim - value_dim], tokens rotated_stride floats apart -> out [num_tokens, heads, value_dim].
extern "C" void shoal_mla_attention(const float* q, const float* q_rotated, i64 rotated_stride, const void* pages,
                                    int bytes, const std::int32_t* query_start, const std::int32_t* seq_lens,
                                    const std::int32_t* tables, const i64* shape, float scale, float* out,
                                    i64 num_tokens, int threads) {
    Shape s;
    std::memcpy(&s, shape, sizeof s);
    auto run = [&](auto* rows) {
        using E = std::remove_const_t<std::remove_pointer_t<decltype(rows)>>;
        Attention<E, true>{
            s, q, {q_rotated, rotated_stride}, rows, rows, query_start, seq_lens, tables, scale, out, nullptr}
            .run(num_tokens, threads);
    };
    if (bytes == 2) run((const std::uint16_t*)pages);
    else run((const float*)pages);
}

SHOAL_REPLAYABLE(paged_attention)
SHOAL_REPLAYABLE(mla_attention)
