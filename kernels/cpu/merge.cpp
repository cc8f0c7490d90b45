// The exact merge of attention over disjoint sets of keys.

#include "parallel.h"
#include "softmax.h"

namespace shoal {
namespace {

constexpr i64 WAKE_FLOATS = 16 << 10;
constexpr i64 ROWS_A_TASK = 16;
constexpr float LN2 = 0.693147181f, LOG2E = 1.44269504f;

// Of e ** lse and e ** other, each in proportion to the larger: the share of each in their sum, and its logarithm.
// Without any key (both -inf) the shares are 0 and the logarithm is -inf; NaN stays NaN.
SHOAL_INLINE void shares(float& lse, float other, float& mine, float& theirs) {
    float top = lse > other ? lse : other;  // NaN in `lse` gives `other` here, and NaN below
    top = top == -INFINITY ? 0.0f : top;
    mine = exp2_negative(splat((lse - top) * LOG2E))[0], theirs = exp2_negative(splat((other - top) * LOG2E))[0];
    const float total = mine + theirs, inverse = total == 0.0f ? 0.0f : 1.0f / total;
    mine *= inverse, theirs *= inverse;
    lse = top + std::log2(total) * LN2;
}

}  // namespace
}  // namespace shoal

using namespace shoal;

// Rows of out and other are `*_stride` floats apart, their log-sum-exps `*_lse_stride`. Into out and lse.
extern "C" void shoal_merge_attention(float* out, i64 out_stride, float* lse, i64 lse_stride, const float* other,
                                      i64 other_stride, const float* other_lse, i64 other_lse_stride, i64 rows, i64 dim,
                                      int threads) {
    threads = worthwhile(threads, rows * dim, WAKE_FLOATS);
    const i64 share = threads == 1 ? rows : ROWS_A_TASK;
    parallel_for(share ? (rows + share - 1) / share : 0, threads, [&](i64 task) {
        for (i64 row = task * share; row < rows && row < (task + 1) * share; row++) {
            float mine, theirs, *to = out + row * out_stride;
            const float* from = other + row * other_stride;
            shares(lse[row * lse_stride], other_lse[row * other_lse_stride], mine, theirs);
            for (i64 i = 0; i < dim; i++) to[i] = to[i] * mine + from[i] * theirs;
        }
    });
}
