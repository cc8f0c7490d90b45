// Vectors of floats by the compiler's vector extension: one source for AVX-512, AVX2, NEON and SSE.
//
// Results do not depend on the width: where order matters (dot products over K or over keys), each lane is one output
// and adds its terms in the same order on every machine.
#pragma once

#include <cstdint>
#include <cstring>

#ifndef SHOAL_VL  // floats in a vector; set by tests to run every width on one machine
#if defined(__AVX512F__)
#define SHOAL_VL 16
#elif defined(__AVX2__)
#define SHOAL_VL 8
#else
#define SHOAL_VL 4
#endif
#endif

namespace shoal {

using i64 = std::int64_t;

constexpr int VL = SHOAL_VL;

// Vector registers that the tiles of the products may count on: AVX-512 and NEON have 32, AVX2 and SSE 16.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif

typedef float vf __attribute__((vector_size(VL * 4)));
typedef std::int32_t vi __attribute__((vector_size(VL * 4)));
typedef std::uint32_t vu __attribute__((vector_size(VL * 4)));
typedef float vf_mem __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef std::uint32_t vu_mem __attribute__((vector_size(VL * 4), aligned(4), may_alias));

#define SHOAL_INLINE inline __attribute__((always_inline))

SHOAL_INLINE vf load(const float* p) { return *reinterpret_cast<const vf_mem*>(p); }
SHOAL_INLINE vu load(const std::uint32_t* p) { return *reinterpret_cast<const vu_mem*>(p); }
SHOAL_INLINE void store(float* p, vf v) { *reinterpret_cast<vf_mem*>(p) = v; }
SHOAL_INLINE vf splat(float x) { return x - vf{}; }

// v in a register of its own: the compiler forgets where it was loaded from, and cannot load it again for every use.
SHOAL_INLINE vf pinned(vf v) {
#if defined(__AVX512F__) && SHOAL_VL == 16
    asm("" : "+v"(v));
#elif (defined(__AVX2__) && SHOAL_VL == 8) || (defined(__SSE2__) && SHOAL_VL == 4)
    asm("" : "+x"(v));
#elif defined(__aarch64__) && SHOAL_VL == 4
    asm("" : "+w"(v));
#endif
    return v;
}

SHOAL_INLINE vu bits(vf v) { return (vu)v; }
SHOAL_INLINE vf floats(vu v) { return (vf)v; }

// Two bfloat16 share 32 bits: the low half widened, and the high half widened.
SHOAL_INLINE vf low_half(vu v) { return floats(v << 16); }
SHOAL_INLINE vf high_half(vu v) { return floats(v & 0xffff0000u); }

SHOAL_INLINE vf maximum(vf a, vf b) { return a > b ? a : b; }

SHOAL_INLINE float sum(vf v) {
    float total = 0;
    for (int i = 0; i < VL; i++) total += v[i];
    return total;
}

SHOAL_INLINE float largest(vf v) {
    float m = v[0];
    for (int i = 1; i < VL; i++) m = v[i] > m ? v[i] : m;
    return m;
}

// 2 ** x for x <= 127, relative error 1e-7. Exactly 1 at 0, exactly 0 below -126 (also at -inf); NaN stays NaN.
SHOAL_INLINE vf exp2(vf x) {
    const vf tiny = splat(-126.0f), magic = splat(12582912.0f);  // 1.5 * 2 ** 23: adding it rounds to an integer
    vf clamped = x < tiny ? tiny : x;
    vf shifted = clamped + magic;
    vu integer = bits(shifted) - bits(magic);
    vf f = clamped - (shifted - magic);  // in [-0.5, 0.5]; Taylor series of 2 ** f
    vf p = splat(1.5252734e-5f);
    p = p * f + splat(1.5403530e-4f);
    p = p * f + splat(1.3333558e-3f);
    p = p * f + splat(9.6181291e-3f);
    p = p * f + splat(5.5504109e-2f);
    p = p * f + splat(2.4022651e-1f);
    p = p * f + splat(6.9314718e-1f);
    p = p * f + splat(1.0f);
    vf result = p * floats((integer + 127u) << 23);
    return x <= tiny ? vf{} : result;
}

// e ** x, saturating at 2 ** 127.
SHOAL_INLINE vf exp(vf x) {
    vf y = x * 1.44269504f;
    return exp2(y > 127.0f ? splat(127.0f) : y);
}

SHOAL_INLINE std::uint16_t to_bf16(float x) {  // round to nearest even; NaN stays NaN
    std::uint32_t u;
    std::memcpy(&u, &x, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

SHOAL_INLINE float to_float(std::uint16_t h) {
    std::uint32_t u = static_cast<std::uint32_t>(h) << 16;
    float x;
    std::memcpy(&x, &u, 4);
    return x;
}

SHOAL_INLINE float to_float(float x) { return x; }

}  // namespace shoal
