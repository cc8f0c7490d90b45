// What lies around the products of experts: rows on their way to the experts that they chose, and what comes back.

#include <vector>

#include "parallel.h"
#include "replay.h"
#include "simd.h"

namespace shoal {
namespace {

constexpr i64 WAKE_FLOATS = 32 << 10;  // moved by one thread in the time another needs to wake up

}  // namespace
}  // namespace shoal

using namespace shoal;

extern "C" {

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

SHOAL_REPLAYABLE(group_rows)
SHOAL_REPLAYABLE(combine_experts)
