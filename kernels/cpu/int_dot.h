// Exact dot products of bytes, four terms to a lane of 32 bits: AVX2 instructions where there are any, the compiler's
// vector extension elsewhere. All sums are integers and none can overflow, so every version gives the same.
#pragma once

#if defined(__AVX2__) && !defined(SHOAL_NO_INTRINSICS)  // the switch lets tests run the other version here
#define SHOAL_AVX2
#include <immintrin.h>
#endif

#include "simd.h"

namespace shoal {

constexpr int LANES = 8;  // of a vector of 32 bits, whatever VL is: packed weights look the same on every machine

typedef std::uint8_t bytes32 __attribute__((vector_size(32)));
typedef std::int16_t shorts16 __attribute__((vector_size(32)));
typedef std::uint16_t ushorts16 __attribute__((vector_size(32)));
typedef std::int32_t ints8 __attribute__((vector_size(32)));
typedef std::uint32_t uints8 __attribute__((vector_size(32)));
typedef float floats8 __attribute__((vector_size(32)));
typedef std::uint16_t halves8 __attribute__((vector_size(16)));

template <class V>
SHOAL_INLINE V load_as(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof(V));
    return v;
}

template <class V>
SHOAL_INLINE void store_as(void* p, V v) {
    std::memcpy(p, &v, sizeof(V));
}

// v in a register, computed here: the compiler can neither move the sum to another place nor regroup its terms.
SHOAL_INLINE shorts16 pinned(shorts16 v) {
#if defined(__AVX2__)
    asm("" : "+x"(v));
#endif
    return v;
}

SHOAL_INLINE floats8 splat8(float x) { return x - floats8{}; }

SHOAL_INLINE ints8 maximum(ints8 a, ints8 b) { return a > b ? a : b; }

// Lanes 4, 2 and 1 places away, exchanged.
SHOAL_INLINE ints8 swapped4(ints8 v) { return ints8{v[4], v[5], v[6], v[7], v[0], v[1], v[2], v[3]}; }
SHOAL_INLINE ints8 swapped2(ints8 v) { return ints8{v[2], v[3], v[0], v[1], v[6], v[7], v[4], v[5]}; }
SHOAL_INLINE ints8 swapped1(ints8 v) { return ints8{v[1], v[0], v[3], v[2], v[5], v[4], v[7], v[6]}; }

SHOAL_INLINE std::int32_t largest(ints8 v) {
    v = maximum(v, swapped4(v)), v = maximum(v, swapped2(v));
    return maximum(v, swapped1(v))[0];
}

SHOAL_INLINE std::int32_t sum(ints8 v) {
    v += swapped4(v), v += swapped2(v);
    return (v + swapped1(v))[0];
}

// The four bytes at p in every lane.
SHOAL_INLINE bytes32 quad(const std::int8_t* p) {
    std::uint32_t four;
    std::memcpy(&four, p, 4);
    return (bytes32)(uints8{} + four);
}

// Low and high nibble of each byte.
SHOAL_INLINE bytes32 low_nibbles(bytes32 v) { return v & 15; }
SHOAL_INLINE bytes32 high_nibbles(bytes32 v) { return (bytes32)((ushorts16)v >> 4) & 15; }

#if defined(SHOAL_AVX2)

// Sums of two neighbouring products, w in [0, 15] and x in [-128, 127]: at most 3840, so that eight add up in 16 bits.
SHOAL_INLINE shorts16 pairs_unsigned(bytes32 w, bytes32 x) {
    return (shorts16)_mm256_maddubs_epi16((__m256i)w, (__m256i)x);
}

// The same for w in [-128, 127] and x in [-127, 127]: at most 32512.
SHOAL_INLINE shorts16 pairs_signed(bytes32 w, bytes32 x) {
    __m256i signed_x = _mm256_sign_epi8((__m256i)x, (__m256i)w);
    return (shorts16)_mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)w), signed_x);
}

SHOAL_INLINE ints8 add_pairs(shorts16 v) { return (ints8)_mm256_madd_epi16((__m256i)v, _mm256_set1_epi16(1)); }

// 32 integers in [-128, 127] as bytes.
SHOAL_INLINE bytes32 narrowed(const ints8 (&q)[4]) {
    __m256i low = _mm256_packs_epi32((__m256i)q[0], (__m256i)q[1]);
    __m256i high = _mm256_packs_epi32((__m256i)q[2], (__m256i)q[3]);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing works in halves of 128 bits
    return (bytes32)_mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
}

#else

SHOAL_INLINE shorts16 even(bytes32 v) { return (shorts16)((ushorts16)v << 8) >> 8; }
SHOAL_INLINE shorts16 odd(bytes32 v) { return (shorts16)v >> 8; }

SHOAL_INLINE shorts16 pairs_signed(bytes32 w, bytes32 x) { return even(w) * even(x) + odd(w) * odd(x); }
SHOAL_INLINE shorts16 pairs_unsigned(bytes32 w, bytes32 x) { return pairs_signed(w, x); }  // 15 has no sign bit

SHOAL_INLINE bytes32 narrowed(const ints8 (&q)[4]) {
    typedef std::uint8_t bytes8 __attribute__((vector_size(8)));
    std::uint8_t bytes[32];
    for (int i = 0; i < 4; i++) store_as(bytes + i * LANES, __builtin_convertvector(q[i], bytes8));
    return load_as<bytes32>(bytes);
}

SHOAL_INLINE ints8 add_pairs(shorts16 v) {
    return ((ints8)((uints8)v << 16) >> 16) + ((ints8)v >> 16);
}

#endif

// Eight fp16 numbers, exactly. Infinities and NaNs do not occur: they are refused when a weight is packed.
SHOAL_INLINE floats8 widen(const std::uint16_t* p) {
#if defined(SHOAL_AVX2) && defined(__F16C__)
    return (floats8)_mm256_cvtph_ps(load_as<__m128i>(p));
#else
    uints8 h = __builtin_convertvector(load_as<halves8>(p), uints8);
    floats8 magnitude = (floats8)((h & 0x7fffu) << 13) * 0x1p112f;  // the exponents' bias is 15, not 127
    return (floats8)((uints8)magnitude | (h & 0x8000u) << 16);
#endif
}

SHOAL_INLINE float widen_one(std::uint16_t h) {
    std::uint16_t eight[LANES] = {h};
    return widen(eight)[0];
}

}  // namespace shoal
