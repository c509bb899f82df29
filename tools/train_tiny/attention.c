/* Attention of the embedded models in training, forward and backward: heads of 32, in bfloat16 with sums in float.
 *
 * Lanes are queries, so that maxima, sums and exponentials need no step across lanes. A bfloat16 row of 32 is one vector
 * of 16 pairs, and vdpbf16ps multiplies and adds pairs: every product here is one micro-kernel, eight rows of pairs that
 * are broadcast, times two vectors. Needs AVX-512 with bfloat16 and a length that 64 divides.
 */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { D = 32, PAIRS = D / 2, QUERIES = 32, KEYS = 64, ROWS = 8 };
typedef uint16_t bf16;
#define INLINE static inline __attribute__((always_inline))

/* c[rows][32] (+)= a b: a's pair p of row r stands at a[r * row + p * step], b has 32 pairs a row. */
INLINE void multiply(float *c, const uint32_t *a, long row, long step, const uint32_t *b, int pairs, int rows, int add) {
  for (int begin = 0; begin < rows; begin += ROWS) {
    __m512 left[ROWS], right[ROWS];
    float *out = c + begin * 32;
    const uint32_t *from = a + begin * row;
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      left[r] = add ? _mm512_loadu_ps(out + r * 32) : _mm512_setzero_ps();
      right[r] = add ? _mm512_loadu_ps(out + r * 32 + 16) : _mm512_setzero_ps();
    }
    for (int p = 0; p < pairs; p++) {
      __m512bh b0 = (__m512bh)_mm512_loadu_si512(b + p * 32), b1 = (__m512bh)_mm512_loadu_si512(b + p * 32 + 16);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        __m512bh x = (__m512bh)_mm512_set1_epi32((int)from[r * row + p * step]);
        left[r] = _mm512_dpbf16_ps(left[r], x, b0);
        right[r] = _mm512_dpbf16_ps(right[r], x, b1);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      _mm512_storeu_ps(out + r * 32, left[r]);
      _mm512_storeu_ps(out + r * 32 + 16, right[r]);
    }
  }
}

INLINE __m512 exp2_of(__m512 x) {
  __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = _mm512_sub_ps(x, whole);
  __m512 y = _mm512_set1_ps(9.6181291e-3f);
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.5504109e-2f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4022651e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9314718e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(y, whole);
}

INLINE __m512i rounded(__m512 x) { return _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000)); }

/* Pairs of two rows: (low, high) in each of 16 lanes. */
INLINE __m512i paired(__m512 low, __m512 high) {
  return _mm512_mask_blend_epi16(0xAAAAAAAAu, _mm512_srli_epi32(rounded(low), 16), rounded(high));
}

/* 32 numbers in a row. */
INLINE __m512i in_a_row(__m512 first, __m512 second) { return (__m512i)_mm512_cvtne2ps_pbh(second, first); }

/* Rows of one head, one after the other [N][32]. */
static void gather(bf16 *to, const bf16 *from, int n, long stride) {
  for (int i = 0; i < n; i++) memcpy(to + i * D, from + i * stride, D * sizeof(bf16));
}

/* [N][16 pairs] -> [N/32][16 pairs][32]: the queries of a block side by side. */
static void side_by_side(uint32_t *to, const uint32_t *rows, int n) {
  const __m512i at = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                        _mm512_set1_epi32(PAIRS));
  for (int block = 0; block < n; block += 32)
    for (int p = 0; p < PAIRS; p++)
      for (int half = 0; half < 2; half++)
        _mm512_storeu_si512(to + block * PAIRS + p * 32 + half * 16,
                            _mm512_i32gather_epi32(at, rows + (block + half * 16) * PAIRS + p, 4));
}

/* [N][32] -> [N/2][32] pairs: two rows interleaved. */
static void interleave(uint32_t *to, const bf16 *rows, int n) {
  for (int i = 0; i < n; i += 2)
    for (int half = 0; half < 2; half++) {
      __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(rows + i * D + half * 16)));
      __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(rows + (i + 1) * D + half * 16)));
      _mm512_storeu_si512(to + i * (D / 2) + half * 16, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
}

static void *room(size_t bytes) { return aligned_alloc(64, (bytes + 63) / 64 * 64); }

/* Keys from `valid` on are not there: their scores [KEYS][32] of a block that begins at key j are left out. */
INLINE void leave_out(float *s, int j, int valid) {
  for (int r = valid > j ? valid - j : 0; r < KEYS; r++)
    for (int x = 0; x < 32; x++) s[r * 32 + x] = -INFINITY;
}

static void forward_head(int n, int valid, long stride, const bf16 *q, const bf16 *k, const bf16 *v, bf16 *o, float *lse, float c) {
  bf16 *rows = room((size_t)n * D * 2), *keys = room((size_t)n * D * 2);
  uint32_t *queries = room((size_t)n * PAIRS * 4), *values = room((size_t)n / 2 * D * 4);
  gather(rows, q, n, stride), side_by_side(queries, (uint32_t *)rows, n);
  gather(rows, v, n, stride), interleave(values, rows, n);
  gather(keys, k, n, stride);
  float s[KEYS * QUERIES] __attribute__((aligned(64))), out[D * QUERIES] __attribute__((aligned(64)));
  uint32_t p[KEYS / 2 * QUERIES] __attribute__((aligned(64)));
  const __m512 scale = _mm512_set1_ps(c);
  for (int i = 0; i < n; i += QUERIES) {
    __m512 most[2], sum[2];
    for (int h = 0; h < 2; h++) most[h] = _mm512_set1_ps(-INFINITY), sum[h] = _mm512_setzero_ps();
    memset(out, 0, sizeof out);
    for (int j = 0; j < valid; j += KEYS) {
      multiply(s, (uint32_t *)(keys + j * D), PAIRS, 1, queries + i * PAIRS, PAIRS, KEYS, 0);
      if (j + KEYS > valid) leave_out(s, j, valid);
      for (int h = 0; h < 2; h++) {
        float *at = s + h * 16;
        __m512 m0 = _mm512_loadu_ps(at), m1 = _mm512_loadu_ps(at + 32);
        for (int r = 2; r < KEYS; r += 2) {
          m0 = _mm512_max_ps(m0, _mm512_loadu_ps(at + r * 32));
          m1 = _mm512_max_ps(m1, _mm512_loadu_ps(at + r * 32 + 32));
        }
        __m512 m = _mm512_max_ps(most[h], _mm512_mul_ps(_mm512_max_ps(m0, m1), scale));
        __m512 keep = exp2_of(_mm512_sub_ps(most[h], m));
        most[h] = m;
        __m512 s0 = _mm512_setzero_ps(), s1 = _mm512_setzero_ps();
#pragma GCC unroll 4
        for (int r = 0; r < KEYS; r += 2) {
          __m512 a = exp2_of(_mm512_fmsub_ps(_mm512_loadu_ps(at + r * 32), scale, m));
          __m512 b = exp2_of(_mm512_fmsub_ps(_mm512_loadu_ps(at + r * 32 + 32), scale, m));
          s0 = _mm512_add_ps(s0, a), s1 = _mm512_add_ps(s1, b);
          _mm512_storeu_si512(p + r / 2 * 32 + h * 16, paired(a, b));
        }
        sum[h] = _mm512_fmadd_ps(sum[h], keep, _mm512_add_ps(s0, s1));
        if (j && _mm512_cmp_ps_mask(keep, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ))
          for (int d = 0; d < D; d++) {
            float *to = out + d * 32 + h * 16;
            _mm512_storeu_ps(to, _mm512_mul_ps(_mm512_loadu_ps(to), keep));
          }
      }
      multiply(out, values + j / 2 * D, 1, D, p, KEYS / 2, D, 1);
    }
    for (int h = 0; h < 2; h++) {
      float inverse[16], logs[16], m[16], z[16];
      _mm512_storeu_ps(m, most[h]), _mm512_storeu_ps(z, sum[h]);
      for (int x = 0; x < 16; x++) inverse[x] = 1 / z[x], logs[x] = m[x] + log2f(z[x]);
      memcpy(lse + i + h * 16, logs, sizeof logs);
      for (int x = 0; x < 16; x++)
        for (int d = 0; d < D; d++) {
          float y = out[d * 32 + h * 16 + x] * inverse[x];
          uint32_t bits;
          memcpy(&bits, &y, 4);
          o[(i + h * 16 + x) * stride + d] = (bf16)((bits + 0x8000) >> 16);
        }
    }
  }
  free(rows), free(keys), free(queries), free(values);
}

/* Float rows [n][32] times a factor, as bfloat16 with a stride. */
static void scatter(bf16 *to, const float *rows, int n, long stride, float factor) {
  const __m512 f = _mm512_set1_ps(factor);
  for (int i = 0; i < n; i++)
    _mm512_storeu_si512(to + i * stride, in_a_row(_mm512_mul_ps(_mm512_loadu_ps(rows + i * D), f),
                                                  _mm512_mul_ps(_mm512_loadu_ps(rows + i * D + 16), f)));
}

static float to_float(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}

static void backward_head(int n, int valid, long stride, const bf16 *q, const bf16 *k, const bf16 *v, const bf16 *o, const bf16 *g,
                          const float *lse, bf16 *dq, bf16 *dk, bf16 *dv, float c) {
  size_t bytes = (size_t)n * D * 2;
  bf16 *rows = room(bytes), *keys = room(bytes), *values = room(bytes);
  uint32_t *q_side = room(bytes), *g_side = room(bytes), *q_pairs = room(bytes), *g_pairs = room(bytes);
  uint32_t *k_pairs = room(bytes);
  float *sums = room(bytes * 2), *delta = room((size_t)n * 4);
  gather(rows, q, n, stride), side_by_side(q_side, (uint32_t *)rows, n), interleave(q_pairs, rows, n);
  gather(rows, g, n, stride), side_by_side(g_side, (uint32_t *)rows, n), interleave(g_pairs, rows, n);
  gather(keys, k, n, stride), interleave(k_pairs, keys, n), gather(values, v, n, stride);
  memset(sums, 0, bytes * 2);
  for (int i = 0; i < n; i++) {
    float sum = 0;
    for (int d = 0; d < D; d++) sum += to_float(rows[i * D + d]) * to_float(o[i * stride + d]);
    delta[i] = sum;
  }
  float s[KEYS * QUERIES] __attribute__((aligned(64))), e[KEYS * QUERIES] __attribute__((aligned(64)));
  float sk[KEYS * D] __attribute__((aligned(64))), sv[KEYS * D] __attribute__((aligned(64)));
  uint32_t p_rows[KEYS * QUERIES / 2] __attribute__((aligned(64))), e_rows[KEYS * QUERIES / 2] __attribute__((aligned(64)));
  uint32_t e_pairs[KEYS / 2 * QUERIES] __attribute__((aligned(64)));
  const __m512 scale = _mm512_set1_ps(c);
  for (int j = 0; j < n; j += KEYS) {
    memset(sk, 0, sizeof sk), memset(sv, 0, sizeof sv);
    for (int i = 0; i < n; i += QUERIES) {
      multiply(s, (uint32_t *)(keys + j * D), PAIRS, 1, q_side + i * PAIRS, PAIRS, KEYS, 0);
      multiply(e, (uint32_t *)(values + j * D), PAIRS, 1, g_side + i * PAIRS, PAIRS, KEYS, 0);
      if (j + KEYS > valid) leave_out(s, j, valid);
      const __m512 l0 = _mm512_loadu_ps(lse + i), l1 = _mm512_loadu_ps(lse + i + 16);
      const __m512 d0 = _mm512_loadu_ps(delta + i), d1 = _mm512_loadu_ps(delta + i + 16);
#pragma GCC unroll 2
      for (int r = 0; r < KEYS; r += 2) {
        __m512 p[4], x[4];
#pragma GCC unroll 4
        for (int t = 0; t < 4; t++) { /* row r, row r + 1, both halves */
          long at = (r + t / 2) * 32 + t % 2 * 16;
          p[t] = exp2_of(_mm512_fmsub_ps(_mm512_loadu_ps(s + at), scale, t % 2 ? l1 : l0));
          x[t] = _mm512_mul_ps(p[t], _mm512_sub_ps(_mm512_loadu_ps(e + at), t % 2 ? d1 : d0));
        }
        _mm512_storeu_si512(p_rows + r * 16, in_a_row(p[0], p[1]));
        _mm512_storeu_si512(p_rows + r * 16 + 16, in_a_row(p[2], p[3]));
        _mm512_storeu_si512(e_rows + r * 16, in_a_row(x[0], x[1]));
        _mm512_storeu_si512(e_rows + r * 16 + 16, in_a_row(x[2], x[3]));
        _mm512_storeu_si512(e_pairs + r / 2 * 32, paired(x[0], x[2]));
        _mm512_storeu_si512(e_pairs + r / 2 * 32 + 16, paired(x[1], x[3]));
      }
      multiply(sv, p_rows, QUERIES / 2, 1, g_pairs + i / 2 * D, QUERIES / 2, KEYS, 1);
      multiply(sk, e_rows, QUERIES / 2, 1, q_pairs + i / 2 * D, QUERIES / 2, KEYS, 1);
      multiply(sums + i * D, k_pairs + j / 2 * D, 1, D, e_pairs, KEYS / 2, D, 1); /* [D][32 queries] */
    }
    scatter(dv + j * stride, sv, KEYS, stride, 1.0f);
    scatter(dk + j * stride, sk, KEYS, stride, c * 0.69314718f);
  }
  for (int i = 0; i < n; i += QUERIES) {
    float *turned = s;
    for (int d = 0; d < D; d++)
      for (int x = 0; x < QUERIES; x++) turned[x * D + d] = sums[i * D + d * 32 + x];
    scatter(dq + i * stride, turned, QUERIES, stride, c * 0.69314718f);
  }
  free(rows), free(keys), free(values), free(q_side), free(g_side), free(q_pairs), free(g_pairs), free(k_pairs);
  free(sums), free(delta);
}

/* All tensors [B, N, H, 32], lse [B, H, N] in powers of two, the number of keys that are there [B]. */
void train_forward(int b, int n, int h, const int *valid, const bf16 *q, const bf16 *k, const bf16 *v, bf16 *o, float *lse, float scale) {
#pragma omp parallel for schedule(static)
  for (int i = 0; i < b * h; i++) {
    long at = (long)(i / h) * n * h * D + i % h * D;
    forward_head(n, valid[i / h], (long)h * D, q + at, k + at, v + at, o + at, lse + (long)i * n, scale * 1.44269504f);
  }
}

void train_backward(int b, int n, int h, const int *valid, const bf16 *q, const bf16 *k, const bf16 *v, const bf16 *o, const bf16 *g,
                    const float *lse, bf16 *dq, bf16 *dk, bf16 *dv, float scale) {
#pragma omp parallel for schedule(static)
  for (int i = 0; i < b * h; i++) {
    long at = (long)(i / h) * n * h * D + i % h * D;
    backward_head(n, valid[i / h], (long)h * D, q + at, k + at, v + at, o + at, g + at, lse + (long)i * n, dq + at, dk + at, dv + at,
                  scale * 1.44269504f);
  }
}
