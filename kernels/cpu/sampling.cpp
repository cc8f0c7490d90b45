// Tokens from rows of logits: temperature, top-k, top-p, min-p and the draw, as `Ops.sample` defines them. A row is
// worked on by one thread, in an order that depends on the size of the vocabulary only.
//
// A row is seen as a matrix of COLUMN_LENGTH lines: column j holds the ids j, j + columns, j + 2 * columns, ... A draw
// without filters takes a column by its sum of weights, then an id inside it. Filters keep a prefix of the order
// (larger first, the lower id among equals): the n-th largest column maximum bounds the n-th largest value from below,
// so what reaches it holds the first n.

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "parallel.h"
#include "softmax.h"

namespace shoal {
namespace {

constexpr i64 WAKE_LOGITS = 64 << 10;
constexpr i64 COLUMN_LENGTH = 32;
constexpr i64 STRETCH = 1024;             // of a row, in which the largest is looked for again
constexpr i64 HEADS[] = {64, 1024};       // candidates to try with before all of the vocabulary is sorted
constexpr double LEAST_WEIGHT = 1e-300;   // a token of less weight is never drawn by a filter
constexpr double LOG2E = 1.4426950408889634;

struct Draw {  // a row of `draws.pack_draws`
    std::uint64_t seed, sample_index, position;
    i64 top_k;
    double temperature, top_p, min_p;
    std::uint64_t padding;

    bool filters() const { return top_k > 0 || top_p < 1.0 || min_p > 0.0; }
};

struct Uniforms {
    double first, second;
};

// Philox4x32-10 (Salmon et al., SC 2011) of the draw's counter under its seed: two uniforms of 53 bits in [0, 1).
Uniforms uniforms(const Draw& draw) {
    std::uint32_t c0 = draw.position, c1 = draw.position >> 32, c2 = draw.sample_index, c3 = 0;
    std::uint32_t k0 = draw.seed, k1 = draw.seed >> 32;
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9, k1 += 0xBB67AE85) {
        const std::uint64_t first = std::uint64_t{0xD2511F53} * c0, second = std::uint64_t{0xCD9E8D57} * c2;
        c0 = static_cast<std::uint32_t>(second >> 32) ^ c1 ^ k0, c1 = second;
        c2 = static_cast<std::uint32_t>(first >> 32) ^ c3 ^ k1, c3 = first;
    }
    auto uniform = [](std::uint32_t high, std::uint32_t low) {
        return static_cast<double>((std::uint64_t{high} << 32 | low) >> 11) * 0x1p-53;
    };
    return {uniform(c0, c1), uniform(c2, c3)};
}

struct Candidate {
    float value;
    std::int32_t id;

    bool operator<(const Candidate& other) const {  // the order that filters keep a prefix of
        return value > other.value || (value == other.value && id < other.id);
    }
};

// sums[j] += 2 ** ((line[j] - largest) * factor)
SHOAL_KERNEL void add_weights(const float* line, i64 count, float largest, float factor, float* sums) {
    i64 j = 0;
    for (; j + VL <= count; j += VL)
        store(sums + j, load(sums + j) + exp2_negative((load(line + j) - largest) * factor));
    for (; j < count; j++) sums[j] += exp2_negative(splat((line[j] - largest) * factor))[0];
}

class Row {
public:
    Row(const float* values, i64 vocab) : values_(values), vocab_(vocab) {
        columns_ = (vocab + std::min(COLUMN_LENGTH, vocab) - 1) / std::min(COLUMN_LENGTH, vocab);
        find_largest();
    }

    bool has_distribution() const { return std::isfinite(largest_); }
    i64 first_largest() const {
        i64 id = stretch_;
        while (values_[id] != largest_) id++;
        return id;
    }

    i64 draw(const Draw& draw) {
        temperature_ = draw.temperature;
        const Uniforms uniform = uniforms(draw);
        return draw.filters() ? draw_filtered(draw, uniform.first) : draw_plain(uniform);
    }

private:
    double weight(float value) const { return std::exp((static_cast<double>(value) - largest_) / temperature_); }

    // NaN if any of the row is.
    void find_largest() {
        float nan = 0.0f;
        largest_ = -INFINITY, stretch_ = 0;
        for (i64 from = 0; from < vocab_; from += STRETCH) {
            const i64 to = std::min(from + STRETCH, vocab_);
            vf top = splat(-INFINITY);
            vi unordered{};
            i64 i = from;
            for (; i + VL <= to; i += VL) {
                vf x = load(values_ + i);
                top = maximum(x, top);
                unordered |= x != x;
            }
            float here = largest_everywhere(top)[0];
            for (; i < to; i++) here = std::max(here, values_[i]), nan = values_[i] != values_[i] ? values_[i] : nan;
            for (int lane = 0; lane < VL; lane++) nan = unordered[lane] ? std::numeric_limits<float>::quiet_NaN() : nan;
            if (here > largest_) largest_ = here, stretch_ = from;
        }
        if (nan != nan) largest_ = nan;
    }

    // body(line, count) for the lines of the matrix; the last may be short.
    template <class Body>
    void lines(const Body& body) const {
        for (i64 from = 0; from < vocab_; from += columns_) body(values_ + from, std::min(columns_, vocab_ - from));
    }

    void sum_columns(float* sums) const {
        std::fill(sums, sums + columns_, 0.0f);
        const float factor = static_cast<float>(LOG2E / temperature_);
        lines([&](const float* line, i64 count) { add_weights(line, count, largest_, factor, sums); });
    }

    i64 draw_plain(Uniforms uniform) {
        float* sums = scratch().get(columns_);
        sum_columns(sums);
        const i64 column = invert(columns_, uniform.first, [&](i64 j) -> double { return sums[j]; });
        const i64 length = (vocab_ - column + columns_ - 1) / columns_;
        return column + columns_ * invert(length, uniform.second,
                                          [&](i64 line) { return weight(values_[column + columns_ * line]); });
    }

    i64 draw_filtered(const Draw& draw, double uniform) {
        float* maxima = scratch().get(2 * columns_);
        double mass = 0.0;
        if (draw.top_k == 0 && draw.top_p < 1.0) {
            sum_columns(maxima);
            for (i64 j = 0; j < columns_; j++) mass += maxima[j];
        }
        std::fill(maxima, maxima + columns_, -INFINITY);
        lines([&](const float* line, i64 count) {
            for (i64 j = 0; j < count; j++) maxima[j] = line[j] > maxima[j] ? line[j] : maxima[j];
        });
        for (i64 size : HEADS)
            if (2 * size <= columns_ && draw.top_k <= size) {
                float* sorted = maxima + columns_;
                std::copy(maxima, maxima + columns_, sorted);
                std::nth_element(sorted, sorted + size - 1, sorted + columns_, std::greater<float>());
                if (sorted[size - 1] == -INFINITY) break;
                gather(maxima, sorted[size - 1]);
                const i64 id = from_head(draw, uniform, mass, false);
                if (id >= 0) return id;
            }
        gather(maxima, std::numeric_limits<float>::lowest());
        return from_head(draw, uniform, mass, true);
    }

    // The candidates >= threshold, in order. Only columns that reach it are read.
    void gather(const float* maxima, float threshold) {
        std::vector<Candidate>& head = candidates();
        head.clear();
        for (i64 j = 0; j < columns_; j++)
            if (maxima[j] >= threshold)
                for (i64 id = j; id < vocab_; id += columns_)
                    if (values_[id] >= threshold) head.push_back({values_[id], static_cast<std::int32_t>(id)});
        std::sort(head.begin(), head.end());
    }

    // The token that the uniform takes from what the filters leave of the head, or -1: they may leave more than it
    // holds. `whole`: it holds all. `mass`: of the whole row, where top_p comes without top_k.
    i64 from_head(const Draw& draw, double uniform, double mass, bool whole) const {
        const std::vector<Candidate>& head = candidates();
        std::vector<double>& weights = head_weights();
        i64 kept = head.size();
        if (draw.top_k > 0) kept = std::min(kept, draw.top_k);
        weights.resize(kept);
        double total = 0.0;
        for (i64 i = 0; i < kept; i++) total += weights[i] = weight(head[i].value);
        bool settled = draw.top_k > 0 || whole;
        if (draw.top_p < 1.0) {
            const double goal = draw.top_p * (draw.top_k > 0 ? total : mass);
            double running = 0.0;
            i64 reached = 0;
            while (reached < kept && running < goal) running += weights[reached++];
            settled |= running >= goal;
            kept = std::max<i64>(reached, 1);
        }
        const double least = std::max(draw.min_p, LEAST_WEIGHT);
        settled |= weights[kept - 1] < least;
        if (!settled) return -1;
        while (kept > 1 && weights[kept - 1] < least) kept--;
        return head[invert(kept, uniform, [&](i64 i) { return weights[i]; })].id;
    }

    // The first index whose running sum exceeds uniform * sum; never one of weight 0.
    template <class Weight>
    static i64 invert(i64 count, double uniform, const Weight& weight) {
        double total = 0.0, running = 0.0;
        for (i64 i = 0; i < count; i++) total += weight(i);
        i64 last = 0;
        for (i64 i = 0; i < count; i++) {
            const double w = weight(i);
            running += w;
            if (w > 0.0) last = i;
            if (running > uniform * total) return i;
        }
        return last;
    }

    static Scratch& scratch() {
        static thread_local Scratch own;
        return own;
    }
    static std::vector<Candidate>& candidates() {
        static thread_local std::vector<Candidate> own;
        return own;
    }
    static std::vector<double>& head_weights() {
        static thread_local std::vector<double> own;
        return own;
    }

    const float* values_;
    i64 vocab_, columns_, stretch_;
    float largest_;
    double temperature_ = 1.0;
};

}  // namespace
}  // namespace shoal

using namespace shoal;

// logits [rows, vocab], rows stride floats apart; draws as in draws.py -> ids and flags [rows] (see `Ops.sample`).
extern "C" void shoal_sample(const float* logits, i64 stride, const void* draws, i64 rows, i64 vocab, i64* ids,
                             i64* flags, int threads) {
    parallel_for(rows, worthwhile(threads, rows * vocab, WAKE_LOGITS), [&](i64 i) {
        Draw draw;
        std::memcpy(&draw, static_cast<const Draw*>(draws) + i, sizeof draw);
        if (draw.top_k >= vocab) draw.top_k = 0;
        Row row(logits + i * stride, vocab);
        flags[i] = row.has_distribution() ? 0 : 1;
        ids[i] = flags[i] ? 0 : draw.temperature == 0.0 ? row.first_largest() : row.draw(draw);
    });
}
