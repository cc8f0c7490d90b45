// What lies around the products of experts: rows on their way to the experts that they chose, and what comes back.

#include <cmath>
#include <vector>

#include "parallel.h"
#include "replay.h"
#include "simd.h"

namespace shoal {
namespace {

constexpr i64 WAKE_FLOATS = 32 << 10;  // moved by one thread in the time another needs to wake up
constexpr i64 WAKE_SCORES = 1 << 10;   // likewise, computed
constexpr float EPSILON = 1e-20f;      // added to the sum of sigmoid scores, as DeepSeek's models were trained

struct Routing {
    i64 experts, choices, groups, chosen_groups;
    bool sigmoid, normalize;
    float scale;
};

void score(const float* logits, const Routing& routing, float* scores) {
    if (routing.sigmoid) {
        for (i64 e = 0; e < routing.experts; e++)
            scores[e] = static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(logits[e]))));
        return;
    }
    float top = logits[0], total = 0;
    for (i64 e = 1; e < routing.experts; e++) top = std::max(top, logits[e]);
    for (i64 e = 0; e < routing.experts; e++) total += scores[e] = std::exp(logits[e] - top);
    for (i64 e = 0; e < routing.experts; e++) scores[e] /= total;
}

// The first of the largest that are not taken yet; it is from then on. Whatever the values are, also NaN.
i64 take_best(const float* values, i64 count, std::vector<char>& taken) {
    i64 best = -1;
    for (i64 i = 0; i < count; i++)
        if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
    taken[best] = 1;
    return best;
}

// -inf outside of the groups whose two best have the largest sums.
void keep_best_groups(const Routing& routing, std::vector<float>& ranking, std::vector<char>& taken) {
    const i64 size = routing.experts / routing.groups;
    std::vector<float> sums(routing.groups);
    for (i64 g = 0; g < routing.groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (i64 e = g * size; e < (g + 1) * size; e++)
            if (ranking[e] > first) second = first, first = ranking[e];
            else second = std::max(second, ranking[e]);
        sums[g] = size > 1 ? first + second : first;
    }
    taken.assign(routing.groups, 0);
    for (i64 c = 0; c < routing.chosen_groups; c++) take_best(sums.data(), routing.groups, taken);
    for (i64 e = 0; e < routing.experts; e++)
        if (!taken[e / size]) ranking[e] = -INFINITY;
}

void choose(const float* logits, const float* bias, const Routing& routing, i64* ids, float* weights) {
    static thread_local std::vector<float> scores, ranking;
    static thread_local std::vector<char> taken;
    scores.resize(routing.experts);
    score(logits, routing, scores.data());
    ranking = scores;
    for (i64 e = 0; bias && e < routing.experts; e++) ranking[e] += bias[e];
    if (routing.groups > 1) keep_best_groups(routing, ranking, taken);
    taken.assign(routing.experts, 0);
    float total = 0;
    for (i64 c = 0; c < routing.choices; c++) {
        ids[c] = take_best(ranking.data(), routing.experts, taken);
        total += weights[c] = scores[ids[c]];
    }
    if (routing.sigmoid) total += EPSILON;
    for (i64 c = 0; c < routing.choices; c++) {
        if (routing.normalize) weights[c] /= total;
        weights[c] *= routing.scale;
    }
}

}  // namespace
}  // namespace shoal

using namespace shoal;

extern "C" {

// The `choices` experts that each row of logits [rows, experts] chooses, the best first, and how much each counts: ids and
// weights [rows, choices]. bias [experts] or null: added to the scores for the choice alone. With groups > 1, of the
// experts in the best `chosen_groups` groups of neighbours.
void shoal_choose_experts(const float* logits, const float* bias, i64 rows, i64 experts, i64 choices, i64 groups,
                          i64 chosen_groups, int sigmoid, int normalize, float scale, i64* ids, float* weights,
                          int threads) {
    Routing routing{experts, choices, groups, chosen_groups, sigmoid != 0, normalize != 0, scale};
    parallel_for(rows, worthwhile(threads, rows * experts, WAKE_SCORES), [&](i64 row) {
        choose(logits + row * experts, bias, routing, ids + row * choices, weights + row * choices);
    });
}

// Row r of x [rows, width] (x_stride floats apart) goes to the groups ids[r][0], ids[r][1], ... of `groups`: once for each
// of its choices, group by group and in the order of the rows within one. out [rows * choices, width] are the rows,
// starts[g] : starts[g + 1] those of group g, places [rows][choices] where each went.
void shoal_group_rows(const float* x, i64 x_stride, i64 width, const i64* ids, i64 rows, i64 choices, i64 groups,
                      float* out, i64* places, std::int32_t* starts, int threads) {
    static thread_local std::vector<i64> next;
    next.assign(groups, 0);
    for (i64 i = 0; i < rows * choices; i++) next[ids[i]]++;
    i64 sum = 0;
    for (i64 g = 0; g < groups; g++) {
        starts[g] = static_cast<std::int32_t>(sum);
        sum += next[g];
        next[g] = starts[g];
    }
    starts[groups] = static_cast<std::int32_t>(sum);
    for (i64 i = 0; i < rows * choices; i++) places[i] = next[ids[i]]++;
    parallel_for(rows, worthwhile(threads, rows * choices * width, WAKE_FLOATS), [&](i64 row) {
        for (i64 c = 0; c < choices; c++)
            std::memcpy(out + places[row * choices + c] * width, x + row * x_stride, width * sizeof(float));
    });
}

// out [rows, width], row r the sum of weights[r][c] * results[places[r][c]] over the choices c, in their order. All are
// contiguous.
void shoal_combine_experts(const float* results, i64 width, const i64* places, const float* weights, i64 rows,
                           i64 choices, float* out, int threads) {
    parallel_for(rows, worthwhile(threads, rows * choices * width, WAKE_FLOATS), [&](i64 row) {
        const i64* from = places + row * choices;
        const float* weight = weights + row * choices;
        float* to = out + row * width;
        i64 j = 0;
        for (; j + VL <= width; j += VL) {
            vf total{};
            for (i64 c = 0; c < choices; c++) total += splat(weight[c]) * load(results + from[c] * width + j);
            store(to + j, total);
        }
        for (; j < width; j++) {
            float total = 0;
            for (i64 c = 0; c < choices; c++) total += weight[c] * results[from[c] * width + j];
            to[j] = total;
        }
    });
}
}

SHOAL_REPLAYABLE(choose_experts)
SHOAL_REPLAYABLE(group_rows)
SHOAL_REPLAYABLE(combine_experts)
