/* The two inner products, a few rows by two vectors at a time, all sums in registers. */
#ifndef HEART_MICRO_H
#define HEART_MICRO_H

#include "simd.h"

/* Lists of rows go on for so many entries after their end, with what is wanted next, which is prefetched. */
#define AHEAD 24

/* How many of n remaining rows to take: sixes, then fours and fives, because fewer sums than eight leave the
 * multipliers waiting. */
INLINE int take_rows(int64_t n) {
    if (n >= 14 || n == 12 || n == 11 || n == 6) return 6;
    if (n == 13 || n == 10 || n == 9) return 5;
    if (n == 8 || n == 7) return 4;
    return (int)n;
}

/* Adds key row r . query lane to scores[r][lane] for dimensions [first, last); rows begin at keys + at[r]. */
INLINE void scores_rows_part(int rows, int vectors, const float *queries, const float *keys, const int32_t *at,
                             int64_t dim, int64_t first, int64_t last, float *scores, vec *top) {
    vec sum[6][2];
    const float *key[6];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        key[r] = keys + at[r];
        sum[r][0] = sum[r][1] = (vec){0};
    }
    for (int64_t line = first; line < last; line += 16) {
        int64_t end = line + 16 < last ? line + 16 : last;
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) __builtin_prefetch(keys + at[rows + r] + line); /* the rows that come next */
#pragma GCC unroll 2
        for (int64_t d = line; d < end; d++) {
            vec q[2];
#pragma GCC unroll 2
            for (int j = 0; j < vectors; j++) q[j] = load(queries + d * 2 * VL + j * VL);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                vec k = splat(key[r][d]);
#pragma GCC unroll 2
                for (int j = 0; j < vectors; j++) sum[r][j] += k * q[j];
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int j = 0; j < vectors; j++) {
            float *to = scores + (r * vectors + j) * VL;
            if (first) sum[r][j] += load(to);
            store(to, sum[r][j]);
            if (last == dim) top[j] = vmax(sum[r][j], top[j]);
        }
}

/* Long rows in parts, because the rounding error of one long sum grows with its length. */
INLINE void scores_rows(int rows, int vectors, const float *queries, const float *keys, const int32_t *at, int64_t dim,
                        float *scores, vec *top) {
    int64_t first = 0;
    do {
        int64_t last = first + 64 < dim ? first + 64 : dim;
        scores_rows_part(rows, vectors, queries, keys, at, dim, first, last, scores, top);
        first = last;
    } while (first < dim);
}

/* Scores of n keys for one panel of queries, [n][vectors VL], and their maximum in each lane. */
INLINE void scores_tile(int vectors, const float *queries, const float *keys, const int32_t *at, int64_t n,
                        int64_t dim, float *scores, vec *top) {
    for (int64_t i = 0; i < n;) {
        int rows = take_rows(n - i);
        float *to = scores + i * vectors * VL;
        switch (rows) {
        case 6: scores_rows(6, vectors, queries, keys, at + i, dim, to, top); break;
        case 5: scores_rows(5, vectors, queries, keys, at + i, dim, to, top); break;
        case 4: scores_rows(4, vectors, queries, keys, at + i, dim, to, top); break;
        case 3: scores_rows(3, vectors, queries, keys, at + i, dim, to, top); break;
        case 2: scores_rows(2, vectors, queries, keys, at + i, dim, to, top); break;
        default: scores_rows(1, vectors, queries, keys, at + i, dim, to, top);
        }
        i += rows;
    }
}

/* out[r] = out[r] * factor[r] + sum over keys i of weight[i][r] * values[at[i] ...], `columns` vectors wide; without
 * factors nothing is there yet. */
INLINE void values_rows(int rows, int vectors, int columns, const float *weights, const float *values,
                        const int32_t *at, int64_t n, float *out, int64_t stride, const float *factors) {
    vec sum[6][2];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = (vec){0};
#pragma GCC unroll 2
    for (int64_t i = 0; i < n; i++) {
        const float *value = values + at[i];
        __builtin_prefetch(values + at[i + AHEAD]);
        const float *weight = weights + i * vectors * VL;
        vec v[2];
#pragma GCC unroll 2
        for (int j = 0; j < columns; j++) v[j] = load(value + j * VL);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            vec w = splat(weight[r]);
#pragma GCC unroll 2
            for (int j = 0; j < columns; j++) sum[r][j] += w * v[j];
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        vec factor = splat(factors ? factors[r] : 0);
#pragma GCC unroll 2
        for (int j = 0; j < columns; j++) {
            float *at = out + r * stride + j * VL;
            store(at, factors ? load(at) * factor + sum[r][j] : sum[r][j]);
        }
    }
}

/* Adds the weighted values of a tile to the first `lanes` rows of out. */
INLINE void values_tile(int vectors, int columns, const float *weights, const float *values, const int32_t *at,
                        int64_t n, int64_t lanes, float *out, int64_t stride, const float *factors) {
    for (int64_t r = 0; r < lanes;) {
        int rows = take_rows(lanes - r);
        float *to = out + r * stride;
        const float *w = weights + r, *f = factors ? factors + r : NULL;
        switch (rows) {
        case 6: values_rows(6, vectors, columns, w, values, at, n, to, stride, f); break;
        case 5: values_rows(5, vectors, columns, w, values, at, n, to, stride, f); break;
        case 4: values_rows(4, vectors, columns, w, values, at, n, to, stride, f); break;
        case 3: values_rows(3, vectors, columns, w, values, at, n, to, stride, f); break;
        case 2: values_rows(2, vectors, columns, w, values, at, n, to, stride, f); break;
        default: values_rows(1, vectors, columns, w, values, at, n, to, stride, f);
        }
        r += rows;
    }
}

#endif
