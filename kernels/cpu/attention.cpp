// Causal attention over packed pages, online softmax (Milakov & Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022,
// arXiv:2205.14135). One routine for decode, chunked prefill and prefill.
//
// A tile is TILE_ROWS or fewer (query token, head) pairs that share one key-value head, so that every key and value
// loaded serves them all. Keys go by in blocks of KEYS positions; every SEGMENT positions the partial result (maximum,
// sum, accumulator) is merged into the tile's. Blocks and segments lie at fixed positions and a key that a row may not
// see contributes exact zeros, so a query's result has the same bits in any batch, in any chunk, and whether its
// segments were computed one after another or by several threads.

#include <algorithm>
#include <cmath>
#include <vector>

#include "parallel.h"
#include "replay.h"
#include "scores.h"

namespace shoal {
namespace {

constexpr i64 SEGMENT = 256;
constexpr i64 TILE_ROWS = 32;
constexpr float LN2 = 0.693147181f, LOG2E = 1.44269504f;
constexpr i64 WAKE_WORK = 64 << 10;                     // row * key * channel, as `worthwhile` counts

// Two vectors of a value row: for bfloat16 the even and the odd channels, for fp32 the first and the second half.
SHOAL_INLINE void channels(const std::uint16_t* v, vf& first, vf& second) {
    vu both = load(reinterpret_cast<const std::uint32_t*>(v));
    first = low_half(both), second = high_half(both);
}
SHOAL_INLINE void channels(const float* v, vf& first, vf& second) { first = load(v), second = load(v + VL); }

struct Shape {
    i64 seqs, heads, kv_heads, dim, block_size, table_stride, q_stride, window;  // window 0: none
};

struct Tile {
    i64 seq, head, first_row, tokens, position;  // first_row of q; position: of the first query token
    i64 first_segment, end_segment, partial;     // partial: of its first segment, when segments are computed apart
};

// What a tile knows of its rows after some keys. `acc` is [rows][dim], in the order of `channels`.
struct Partial {
    float *peak, *total, *acc;  // peak: largest score in units of log2; total: sum of 2 ** (score - peak)

    static i64 floats(i64 rows, i64 dim) { return rows * (dim + 2); }
    Partial(float* memory, i64 rows) : peak(memory), total(memory + rows), acc(memory + 2 * rows) {}

    void clear(i64 rows, i64 dim) {
        std::fill(peak, peak + rows, -INFINITY);
        std::fill(total, total + rows * (dim + 1), 0.0f);
    }

    void merge(const Partial& later, i64 rows, i64 dim) {
        for (i64 r = 0; r < rows; r++) {
            if (later.total[r] == 0.0f) continue;  // it saw no key
            float top = later.peak[r] > peak[r] ? later.peak[r] : peak[r];
            float mine = exp2(splat(peak[r] - top))[0], theirs = exp2(splat(later.peak[r] - top))[0];
            peak[r] = top;
            total[r] = total[r] * mine + later.total[r] * theirs;
            float *a = acc + r * dim, *b = later.acc + r * dim;
            for (i64 d = 0; d < dim; d++) a[d] = a[d] * mine + b[d] * theirs;
        }
    }
};

template <class E>
struct Attention {
    Shape s;
    const float* q;
    const E *k, *v;
    const std::int32_t *query_start, *seq_lens, *tables;
    float scale;
    float *out, *lse;

    i64 group() const { return s.heads / s.kv_heads; }
    i64 rows(const Tile& t) const { return t.tokens * group(); }

    const E* page(const E* pages, const Tile& t, i64 position) const {
        i64 block = tables[t.seq * s.table_stride + position / s.block_size];
        return pages + (block * s.kv_heads + t.head) * s.block_size * s.dim;
    }

    void load_queries(const Tile& t, float* queries) const {
        for (i64 i = 0; i < t.tokens; i++) {
            const float* from = q + (t.first_row + i) * s.q_stride + t.head * group() * s.dim;
            for (i64 j = 0; j < group() * s.dim; j++) *queries++ = from[j] * (scale * LOG2E);
        }
    }

    // Calls fn(row, N) for blocks of N <= ROW_BLOCK rows, N a constant: full blocks, then one of what is left.
    template <int N = ROW_BLOCK, class Fn>
    SHOAL_INLINE static void by_rows(i64 count, const Fn& fn, i64 row = 0) {
        for (; row + N <= count; row += N) fn(row, std::integral_constant<int, N>{});
        if constexpr (N > 1) by_rows<N - 1>(count, fn, row);
    }

    // Where the keys (values) of the granule with this position lie.
    const E* keys_at(const Tile& t, i64 position) const { return page(k, t, position) + position % s.block_size * 2; }
    const E* values_at(const Tile& t, i64 position) const {
        return page(v, t, position) + position % s.block_size * s.dim;
    }

    // Scores of the keys [begin, end) of the block at `base`, of `to` keys in all, and where the block's values lie.
    // What else of the block is computed is masked later.
    void scores_of(const Tile& t, const float* queries, i64 base, i64 begin, i64 end, i64 to, float* scores,
                   const E** values) const {
        constexpr int GROUPS = KEYS / VL, A_GRANULE = GRANULE / VL;
        const E *keys[GROUPS], *next[KEYS / GRANULE];
        for (i64 g = 0; g < KEYS / GRANULE; g++) {
            // A granule that is not wanted may share a register tile with others: one that exists is read instead.
            i64 at = std::clamp(base / GRANULE + g, begin / GRANULE, (end - 1) / GRANULE) * GRANULE;
            for (int i = 0; i < A_GRANULE; i++) keys[g * A_GRANULE + i] = keys_at(t, at) + i * VL * 2;
            values[g] = values_at(t, at);
            next[g] = keys_at(t, std::min(base + KEYS + g * GRANULE, (to - 1) / GRANULE * GRANULE));
        }
        int first = (begin - base) / VL, last = (end - base + VL - 1) / VL;
        by_rows(rows(t), [&](i64 r, auto n) {
            constexpr int U = fitting(n * int(sizeof(E) / 2), GROUPS);
            const float* q_rows = queries + r * s.dim;
            for (int g = first / U * U; g < last; g += U) {
                float* to_scores = scores + r * KEYS + g * VL;
                Ahead<U, E> ahead{values + g / A_GRANULE, next + g / A_GRANULE};
                if (r == 0) score<n, U, true>(q_rows, s.dim, keys + g, s.block_size, to_scores, ahead);
                else score<n, U, false>(q_rows, s.dim, keys + g, s.block_size, to_scores, ahead);
            }
        });
    }

    // Scores -> probabilities relative to the new peak, in place; `shrink` is what earlier sums are multiplied by.
    void softmax(const Tile& t, i64 base, Partial& p, float* scores, float* shrink) const {
        vf index;
        for (int i = 0; i < VL; i++) index[i] = static_cast<float>(i);
        for (i64 r = 0; r < rows(t); r++) {
            i64 position = t.position + r / group();
            i64 hi = std::clamp<i64>(position + 1 - base, 0, KEYS);
            i64 lo = s.window ? std::clamp<i64>(position + 1 - s.window - base, 0, KEYS) : 0;
            float* row = scores + r * KEYS;
            if (lo > 0 || hi < KEYS)  // not all of the block is visible
                for (int j = 0; j < KEYS / VL; j++) {
                    vf at = index + static_cast<float>(j * VL), x = load(row + j * VL);
                    x = at < static_cast<float>(hi) ? x : splat(-INFINITY);
                    store(row + j * VL, at >= static_cast<float>(lo) ? x : splat(-INFINITY));
                }
            vf top = splat(p.peak[r]);
            for (int j = 0; j < KEYS / VL; j++) top = maximum(top, load(row + j * VL));
            float peak = largest(top), from = peak == -INFINITY ? 0.0f : peak;
            vf sums{};
            for (int j = 0; j < KEYS / VL; j++) {
                vf x = exp2(load(row + j * VL) - from);
                sums += x;
                store(row + j * VL, x);
            }
            shrink[r] = exp2(splat(p.peak[r] - from))[0];
            p.peak[r] = peak;
            p.total[r] = p.total[r] * shrink[r] + sum(sums);
        }
    }

    // acc = acc * shrink + probabilities * values of C chunks (2 * VL channels each), keys [begin, end) ascending.
    template <int ROWS, int C>
    SHOAL_INLINE void chunks(const E* const* values, i64 begin, i64 end, const float* p, const float* shrink,
                             float* acc, i64 channel) const {
        vf a[ROWS][C][2];
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < C; c++)
                for (int h = 0; h < 2; h++) a[r][c][h] = load(acc + r * s.dim + channel + (2 * c + h) * VL) * shrink[r];
        for (i64 granule = begin / GRANULE * GRANULE; granule < end; granule += GRANULE) {
            const E* v_row = values[granule / GRANULE] + channel;
            i64 last = std::min(end, granule + GRANULE);
            for (i64 key = std::max(begin, granule); key < last; key++)
                for (int c = 0; c < C; c++) {
                    vf first, second;
                    channels(v_row + (key - granule) * s.dim + c * 2 * VL, first, second);
                    for (int r = 0; r < ROWS; r++) {
                        a[r][c][0] += first * p[r * KEYS + key];
                        a[r][c][1] += second * p[r * KEYS + key];
                    }
                }
        }
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < C; c++)
                for (int h = 0; h < 2; h++) store(acc + r * s.dim + channel + (2 * c + h) * VL, a[r][c][h]);
    }

    template <int ROWS>
    SHOAL_INLINE void accumulate(const E* const* values, i64 begin, i64 end, const float* p, const float* shrink,
                                 float* acc) const {
        constexpr int C = fitting(2 * ROWS, 4);
        i64 channel = 0;
        for (; channel + C * 2 * VL <= s.dim; channel += C * 2 * VL)
            chunks<ROWS, C>(values, begin, end, p, shrink, acc, channel);
        if constexpr (C > 1)
            for (; channel + 2 * VL <= s.dim; channel += 2 * VL)
                chunks<ROWS, 1>(values, begin, end, p, shrink, acc, channel);
        for (; channel < s.dim; channel++)  // what is left of a head_dim that two vectors do not divide
            for (int r = 0; r < ROWS; r++) {
                float a = acc[r * s.dim + channel] * shrink[r];
                for (i64 key = begin; key < end; key++)
                    a += p[r * KEYS + key] * to_float(values[key / GRANULE][key % GRANULE * s.dim + channel]);
                acc[r * s.dim + channel] = a;
            }
    }

    // The tile over one segment, into a cleared partial. `scores` has room for rows * (KEYS + 1).
    void segment(const Tile& t, const float* queries, i64 index, float* scores, Partial& p) const {
        float* shrink = scores + rows(t) * KEYS;
        i64 seen = s.window ? std::max<i64>(0, t.position + 1 - s.window) : 0;
        i64 from = std::max(index * SEGMENT, seen), to = std::min((index + 1) * SEGMENT, t.position + t.tokens);
        const E* values[KEYS / GRANULE];
        for (i64 base = from / KEYS * KEYS; base < to; base += KEYS) {
            i64 begin = std::max(base, from), end = std::min(base + KEYS, to);
            scores_of(t, queries, base, begin, end, to, scores, values);
            softmax(t, base, p, scores, shrink);
            by_rows(rows(t), [&](i64 r, auto n) {
                accumulate<n>(values, begin - base, end - base, scores + r * KEYS, shrink + r, p.acc + r * s.dim);
            });
        }
    }

    void finish(const Tile& t, const Partial& p) const {
        for (i64 r = 0; r < rows(t); r++) {
            i64 row = (t.first_row + r / group()) * s.heads + t.head * group() + r % group();
            float inverse = 1.0f / p.total[r];
            float *to = out + row * s.dim, *acc = p.acc + r * s.dim;
            i64 c = 0;
            if (sizeof(E) == 2)  // even and odd channels were kept apart
                for (; c + 2 * VL <= s.dim; c += 2 * VL)
                    for (int i = 0; i < VL; i++)
                        to[c + 2 * i] = acc[c + i] * inverse, to[c + 2 * i + 1] = acc[c + VL + i] * inverse;
            for (; c < s.dim; c++) to[c] = acc[c] * inverse;
            if (lse) lse[row] = (p.peak[r] + std::log2(p.total[r])) * LN2;
        }
    }

    std::vector<Tile> tiles(i64& work) const {
        std::vector<Tile> list;
        i64 tokens = std::max<i64>(1, TILE_ROWS / group());
        for (i64 i = s.seqs - 1; i >= 0; i--) {
            i64 count = query_start[i + 1] - query_start[i];
            // The last tiles see the most keys: they start first.
            for (i64 at = (count - 1) / tokens * tokens; at >= 0 && count > 0; at -= tokens)
                for (i64 head = 0; head < s.kv_heads; head++) {
                    i64 position = seq_lens[i] - count + at;
                    Tile t{i, head, query_start[i] + at, std::min(tokens, count - at), position, 0, 0, -1};
                    i64 seen = s.window ? std::max<i64>(0, t.position + 1 - s.window) : 0;
                    t.first_segment = seen / SEGMENT;
                    t.end_segment = (t.position + t.tokens + SEGMENT - 1) / SEGMENT;
                    work += cost(t);
                    list.push_back(t);
                }
        }
        return list;
    }

    i64 cost(const Tile& t) const { return rows(t) * (t.end_segment - t.first_segment) * SEGMENT; }

    void run(i64 num_tokens, int threads) const {
        std::fill(out + query_start[s.seqs] * s.heads * s.dim, out + num_tokens * s.heads * s.dim, 0.0f);
        i64 work = 0, max_rows = std::max(group(), TILE_ROWS);
        std::vector<Tile> list = tiles(work);
        threads = worthwhile(threads, work * s.dim, WAKE_WORK);

        // A tile that is much of the whole is cut into its segments, for the threads to share.
        struct Task { Tile* tile; i64 segment; };  // segment -1: all of them, in order
        std::vector<Task> tasks;
        std::vector<Tile*> cut;
        i64 num_partials = 0, size = Partial::floats(max_rows, s.dim);
        for (Tile& t : list) {
            if (threads > 1 && t.end_segment - t.first_segment > 1 && cost(t) * threads * 4 > work) {
                t.partial = num_partials;
                num_partials += t.end_segment - t.first_segment;
                cut.push_back(&t);
                for (i64 i = t.first_segment; i < t.end_segment; i++) tasks.push_back({&t, i});
            } else {
                tasks.push_back({&t, -1});
            }
        }
        static thread_local Scratch shared;
        float* memory = shared.get(num_partials * size);
        auto partial = [&](const Tile& t, i64 segment) {
            return Partial(memory + (t.partial + segment - t.first_segment) * size, rows(t));
        };

        parallel_for(tasks.size(), threads, [&](i64 i) {
            static thread_local Scratch own;
            const Tile& t = *tasks[i].tile;
            float* queries = own.get(max_rows * (s.dim + KEYS + 1) + 2 * size);
            float *scores = queries + max_rows * s.dim, *partials = scores + max_rows * (KEYS + 1);
            load_queries(t, queries);
            if (tasks[i].segment >= 0) {
                Partial p = partial(t, tasks[i].segment);
                p.clear(rows(t), s.dim);
                return segment(t, queries, tasks[i].segment, scores, p);
            }
            Partial all(partials, rows(t)), one(partials + size, rows(t));
            all.clear(rows(t), s.dim);
            for (i64 n = t.first_segment; n < t.end_segment; n++) {
                one.clear(rows(t), s.dim);
                segment(t, queries, n, scores, one);
                all.merge(one, rows(t), s.dim);
            }
            finish(t, all);
        });
        parallel_for(cut.size(), worthwhile(threads, num_partials * size, WAKE_WORK), [&](i64 i) {
            static thread_local Scratch own;
            const Tile& t = *cut[i];
            Partial all(own.get(size), rows(t));
            all.clear(rows(t), s.dim);
            for (i64 n = t.first_segment; n < t.end_segment; n++) all.merge(partial(t, n), rows(t), s.dim);
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
    if (bytes == 2)
        Attention<std::uint16_t>{
            s, q, (const std::uint16_t*)k, (const std::uint16_t*)v, query_start, seq_lens, tables, scale, out, lse}
            .run(num_tokens, threads);
    else
        Attention<float>{s, q, (const float*)k, (const float*)v, query_start, seq_lens, tables, scale, out, lse}.run(
            num_tokens, threads);
}

SHOAL_REPLAYABLE(paged_attention)
