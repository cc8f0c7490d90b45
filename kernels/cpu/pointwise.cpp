// What lies between the products: norms, rotary embedding, gated activations, and the store into packed pages.

#include <cmath>

#include "parallel.h"
#include "replay.h"

namespace shoal {
namespace {

constexpr i64 WAKE_FLOATS = 16 << 10;
constexpr i64 ROWS_A_TASK = 4;

// body(row) for all rows, a few at a time.
template <class Body>
void for_rows(i64 rows, i64 floats_a_row, int threads, const Body& body) {
    threads = worthwhile(threads, rows * floats_a_row, WAKE_FLOATS);
    i64 share = threads == 1 ? rows : ROWS_A_TASK;
    parallel_for(share ? (rows + share - 1) / share : 0, threads, [&](i64 task) {
        for (i64 row = task * share; row < rows && row < (task + 1) * share; row++) body(row);
    });
}

float sum_of_squares(const float* x, i64 n) {
    vf a{}, b{};
    i64 i = 0;
    for (; i + 2 * VL <= n; i += 2 * VL) {
        vf u = load(x + i), w = load(x + i + VL);
        a += u * u, b += w * w;
    }
    float total = sum(a + b);
    for (; i < n; i++) total += x[i] * x[i];
    return total;
}

void normalise(const float* x, const float* weight, float eps, float* out, i64 n) {
    float inverse = 1.0f / std::sqrt(sum_of_squares(x, n) / static_cast<float>(n) + eps);
    for (i64 i = 0; i < n; i++) out[i] = x[i] * inverse * weight[i];
}

void rotate(float* x, const float* cos, const float* sin, i64 half) {
    for (i64 i = 0; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * cos[i] - b * sin[i];
        x[half + i] = b * cos[i] + a * sin[i];
    }
}

SHOAL_INLINE vf silu(vf x) { return x / (1.0f + exp(-x)); }

SHOAL_INLINE vf gelu_tanh(vf x) {  // x * (1 + tanh(u)) / 2 = x * sigmoid(2 u)
    vf u = (x + x * x * x * 0.044715f) * 0.79788456f;
    return x / (1.0f + exp(-2.0f * u));
}

template <class Activation>
SHOAL_INLINE void gate(const float* x, float* out, i64 n, Activation activation) {
    i64 i = 0;
    for (; i + VL <= n; i += VL) store(out + i, activation(load(x + i)) * load(x + n + i));
    if (i == n) return;
    float gates[VL] = {}, result[VL];
    std::memcpy(gates, x + i, (n - i) * sizeof(float));
    store(result, activation(load(gates)));
    for (i64 j = 0; i < n; i++, j++) out[i] = result[j] * x[n + i];
}

SHOAL_INLINE void narrow(float x, float& to) { to = x; }
SHOAL_INLINE void narrow(float x, std::uint16_t& to) { to = to_bf16(x); }

template <class E>
void store_token(const float* k, const float* v, E* k_pages, E* v_pages, i64 slot, i64 kv_heads, i64 dim,
                 i64 block_size) {
    i64 block = slot / block_size, offset = slot % block_size;
    for (i64 h = 0; h < kv_heads; h++) {
        i64 head = (block * kv_heads + h) * block_size * dim;
        E *to_k = k_pages + head + offset * 2, *to_v = v_pages + head + offset * dim;
        for (i64 d = 0; d < dim; d += 2) {
            E* pair = to_k + d * block_size;
            narrow(k[h * dim + d], pair[0]), narrow(k[h * dim + d + 1], pair[1]);
        }
        for (i64 d = 0; d < dim; d++) narrow(v[h * dim + d], to_v[d]);
    }
}

}  // namespace
}  // namespace shoal

using namespace shoal;

extern "C" {

// Rows of x (and of residual, unless null) are so many floats apart; out and total are contiguous. total: x + residual.
void shoal_rms_norm(const float* x, i64 x_stride, const float* residual, i64 residual_stride, const float* weight,
                    float eps, float* out, float* total, i64 rows, i64 hidden, int threads) {
    for_rows(rows, hidden, threads, [&](i64 row) {
        const float* from = x + row * x_stride;
        if (residual) {
            const float* add = residual + row * residual_stride;
            float* to = total + row * hidden;
            for (i64 i = 0; i < hidden; i++) to[i] = from[i] + add[i];
            from = to;
        }
        normalise(from, weight, eps, out + row * hidden, hidden);
    });
}

// x [tokens, heads, dim], tokens x_stride floats apart -> out, contiguous.
void shoal_head_rms_norm(const float* x, i64 x_stride, const float* weight, float eps, float* out, i64 tokens,
                         i64 heads, i64 dim, int threads) {
    for_rows(tokens, heads * dim, threads, [&](i64 token) {
        for (i64 h = 0; h < heads; h++)
            normalise(x + token * x_stride + h * dim, weight, eps, out + (token * heads + h) * dim, dim);
    });
}

void shoal_rotary(float* q, i64 q_stride, i64 heads, float* k, i64 k_stride, i64 kv_heads, const i64* positions,
                  const float* cos_sin, i64 tokens, i64 dim, int threads) {
    for_rows(tokens, (heads + kv_heads) * dim, threads, [&](i64 token) {
        const float* cos = cos_sin + positions[token] * dim;
        for (i64 h = 0; h < heads; h++) rotate(q + token * q_stride + h * dim, cos, cos + dim / 2, dim / 2);
        for (i64 h = 0; h < kv_heads; h++) rotate(k + token * k_stride + h * dim, cos, cos + dim / 2, dim / 2);
    });
}

// x [rows, 2 n], rows x_stride floats apart -> out [rows, n], contiguous.
void shoal_gated(const float* x, i64 x_stride, int gelu, float* out, i64 rows, i64 n, int threads) {
    for_rows(rows, 2 * n, threads, [&](i64 row) {
        if (gelu) gate(x + row * x_stride, out + row * n, n, gelu_tanh);
        else gate(x + row * x_stride, out + row * n, n, silu);
    });
}

// k, v [tokens, kv_heads, dim] to their slots in packed pages of 2 (bfloat16) or 4 bytes an element; slot < 0: nowhere.
void shoal_store_kv(const float* k, i64 k_stride, const float* v, i64 v_stride, void* k_pages, void* v_pages, int bytes,
                    const i64* slots, i64 tokens, i64 kv_heads, i64 dim, i64 block_size, int threads) {
    for_rows(tokens, 2 * kv_heads * dim, threads, [&](i64 t) {
        if (slots[t] < 0) return;
        const float *from_k = k + t * k_stride, *from_v = v + t * v_stride;
        auto to = [&](auto* k_to, auto* v_to) {
            store_token(from_k, from_v, k_to, v_to, slots[t], kv_heads, dim, block_size);
        };
        if (bytes == 2) to((std::uint16_t*)k_pages, (std::uint16_t*)v_pages);
        else to((float*)k_pages, (float*)v_pages);
    });
}

// Between the projections and latent attention. q [tokens, heads, rope] is rotated in place (tokens q_stride floats
// apart); of kv [tokens, latent + rope] (kv_stride apart) the latent is normed and the rest rotated, into their slots of
// pages [slots, latent + rope] of 2 (bfloat16) or 4 bytes an element; slot < 0: nowhere. shape: heads, latent, rope.
void shoal_rotary_store_latent(float* q, i64 q_stride, const float* kv, i64 kv_stride, const float* weight, float eps,
                               const i64* positions, const float* cos_sin, void* pages, int bytes, const i64* slots,
                               i64 tokens, const i64* shape, int threads) {
    const i64 heads = shape[0], latent = shape[1], rope = shape[2], width = latent + rope;
    for_rows(tokens, heads * rope + width, threads, [&](i64 t) {
        const float *cos = cos_sin + positions[t] * rope, *sin = cos + rope / 2;
        for (i64 h = 0; h < heads; h++) rotate(q + t * q_stride + h * rope, cos, sin, rope / 2);
        if (slots[t] < 0) return;
        static thread_local Scratch scratch;
        float* row = scratch.get(width);
        normalise(kv + t * kv_stride, weight, eps, row, latent);
        std::copy(kv + t * kv_stride + latent, kv + t * kv_stride + width, row + latent);
        rotate(row + latent, cos, sin, rope / 2);
        auto to = [&](auto* page) {
            for (i64 i = 0; i < width; i++) narrow(row[i], page[slots[t] * width + i]);
        };
        if (bytes == 2) to((std::uint16_t*)pages);
        else to((float*)pages);
    });
}
}

SHOAL_REPLAYABLE(rms_norm)
SHOAL_REPLAYABLE(head_rms_norm)
SHOAL_REPLAYABLE(rotary)
SHOAL_REPLAYABLE(gated)
SHOAL_REPLAYABLE(store_kv)
SHOAL_REPLAYABLE(rotary_store_latent)
