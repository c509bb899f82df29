/* Vectors of floats as wide as the machine's: GCC and Clang vector extensions, so that one text serves all CPUs. */
#ifndef HEART_SIMD_H
#define HEART_SIMD_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX__)
#include <immintrin.h>
#endif

/* Floats in a vector. A width that the machine does not have works too, in pieces; the tests use that. */
#ifndef VL
#if defined(__AVX512F__)
#define VL 16
#elif defined(__AVX__)
#define VL 8
#else
#define VL 4
#endif
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(VL * 4)));
typedef float vec_loose __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(VL * 4)));

INLINE vec load(const float *p) { return *(const vec_loose *)p; }
INLINE void store(float *p, vec x) { *(vec_loose *)p = x; }
/* Compilers turn x - 0 into one broadcast; neither a loop over elements nor x + 0 (which changes -0). */
INLINE vec splat(float x) { return x - (vec){0}; }

/* The second operand where either is NaN: the running maximum then ignores NaN, which reaches the sum anyway. */
INLINE vec vmax(vec a, vec b) {
#if VL == 16 && defined(__AVX512F__)
    return _mm512_max_ps(a, b);
#elif VL == 8 && defined(__AVX__)
    return _mm256_max_ps(a, b);
#else
    ivec larger = a > b;
    return (vec)((larger & (ivec)a) | (~larger & (ivec)b));
#endif
}

INLINE vec vsqrt(vec x) {
#if VL == 16 && defined(__AVX512F__)
    return _mm512_sqrt_ps(x);
#elif VL == 8 && defined(__AVX__)
    return _mm256_sqrt_ps(x);
#else
    for (int i = 0; i < VL; i++) x[i] = __builtin_sqrtf(x[i]);
    return x;
#endif
}

INLINE vec choose(ivec where, vec a, vec b) { return (vec)((where & (ivec)a) | (~where & (ivec)b)); }

/* 2^x for x <= 0 or a little above, in place; relative error 2e-7; 0 far below -126; NaN stays NaN. Several vectors go
 * in step, because each result is waited for by the next operation on it. */
INLINE void vexp2_each(int count, vec *x) {
    const float magic = 12582912.0f + 127.0f; /* 1.5 * 2^23: adding it rounds to an integer in the low bits */
    vec shifted[8], p[8];
#define EACH _Pragma("GCC unroll 8") for (int j = 0; j < count; j++)
    EACH x[j] = vmax(splat(-127.0f), x[j]);
    EACH shifted[j] = x[j] + magic;
    EACH x[j] = x[j] - (shifted[j] - magic); /* in [-0.5, 0.5] */
    EACH p[j] = x[j] * 1.326472725e-03f + 9.671512688e-03f;
    EACH p[j] = p[j] * x[j] + 5.550733744e-02f;
    EACH p[j] = p[j] * x[j] + 2.402224208e-01f;
    EACH p[j] = p[j] * x[j] + 6.931469776e-01f;
    EACH p[j] = p[j] * x[j] + 1.0f;
    EACH x[j] = p[j] * (vec)((ivec)shifted[j] << 23);
#undef EACH
}

INLINE vec vexp2(vec x) {
    vexp2_each(1, &x);
    return x;
}

/* The sum of a vector's numbers, halves added to halves. */
INLINE float add_up(vec x) {
    float part[VL];
    store(part, x);
#pragma GCC unroll 4
    for (int half = VL / 2; half; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}

INLINE float from_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

INLINE vec load_bf16(const uint16_t *p) {
#if VL == 16 && defined(__AVX512F__)
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif VL == 8 && defined(__AVX2__)
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    vec x = {0};
    for (int i = 0; i < VL; i++) x[i] = from_bf16(p[i]);
    return x;
#endif
}

/* A square of VL x VL numbers. */
INLINE void transpose(vec *rows) {
#if VL == 16 && defined(__AVX512F__)
    vec a[16], b[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) { /* pairs of numbers, then fours, inside each quarter of a vector */
        a[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            b[i + 2 * j] = _mm512_shuffle_ps(a[i + j], a[i + j + 2], 0x44);
            b[i + 2 * j + 1] = _mm512_shuffle_ps(a[i + j], a[i + j + 2], 0xee);
        }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) { /* then the quarters */
        vec low = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88), low2 = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88);
        vec high = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd), high2 = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xdd);
        rows[i] = _mm512_shuffle_f32x4(low, low2, 0x88);
        rows[i + 8] = _mm512_shuffle_f32x4(low, low2, 0xdd);
        rows[i + 4] = _mm512_shuffle_f32x4(high, high2, 0x88);
        rows[i + 12] = _mm512_shuffle_f32x4(high, high2, 0xdd);
    }
#elif VL == 8 && defined(__AVX__)
    __m256 a[8], b[8];
    for (int i = 0; i < 4; i++) {
        a[2 * i] = _mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
        a[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++) {
            b[4 * i + 2 * j] = _mm256_shuffle_ps(a[4 * i + j], a[4 * i + j + 2], 0x44);
            b[4 * i + 2 * j + 1] = _mm256_shuffle_ps(a[4 * i + j], a[4 * i + j + 2], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        rows[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
        rows[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
    }
#else
    float square[VL][VL];
    for (int i = 0; i < VL; i++) store(square[i], rows[i]);
    for (int i = 0; i < VL; i++)
        for (int j = 0; j < VL; j++) ((float *)&rows[i])[j] = square[j][i];
#endif
}

/* Round to nearest even; a NaN stays one. */
INLINE uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}

#endif
