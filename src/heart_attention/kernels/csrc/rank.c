/* Ranking clusters anew at every call: sums and sums of squares of the tokens of each cluster, and which clusters to keep.
 * The definitions are in kernels/ops/rank.py. */
#include <math.h>
#include <stdlib.h>

#include "simd.h"

struct heart_moments {
    int64_t heads;
    const void *const *x;            /* of each head: n tokens of `width` numbers, `stride` apart */
    const int16_t *const *labels;    /* of each head: [n]; what is not below `count` belongs to no cluster */
    int64_t n, width, stride, count;
    float *sums, *squares; /* [heads][count][width] */
    int64_t *sizes;        /* [heads][count] */
    int64_t bf16, threads;
};

/* One token into the sums of its cluster. */
INLINE void add_token(const void *x, int bf16, int64_t at, int64_t width, float *sums, float *squares) {
    int64_t d = 0;
    for (; d + VL <= width; d += VL) {
        vec one = bf16 ? load_bf16((const uint16_t *)x + at + d) : load((const float *)x + at + d);
        store(sums + d, load(sums + d) + one);
        store(squares + d, load(squares + d) + one * one);
    }
    for (; d < width; d++) {
        float one = bf16 ? from_bf16(((const uint16_t *)x)[at + d]) : ((const float *)x)[at + d];
        sums[d] += one, squares[d] += one * one;
    }
}

/* Sums, sums of squares and sizes of the tokens of each label. Returns 0. */
int heart_cluster_moments(const struct heart_moments *a) {
    int64_t table = a->count * a->width;
#pragma omp parallel for num_threads((int)a->threads) schedule(dynamic) if (a->threads > 1)
    for (int64_t h = 0; h < a->heads; h++) {
        float *sums = a->sums + h * table, *squares = a->squares + h * table;
        int64_t *sizes = a->sizes + h * a->count;
        memset(sums, 0, (size_t)table * 4);
        memset(squares, 0, (size_t)table * 4);
        memset(sizes, 0, (size_t)a->count * 8);
        for (int64_t t = 0; t < a->n; t++) {
            int64_t label = a->labels[h][t];
            if (label < 0 || label >= a->count) continue;
            sizes[label]++;
            int64_t to = label * a->width;
            if (a->bf16) add_token(a->x[h], 1, t * a->stride, a->width, sums + to, squares + to);
            else add_token(a->x[h], 0, t * a->stride, a->width, sums + to, squares + to);
        }
    }
    return 0;
}

struct heart_ranked {
    int64_t heads, rows, columns;
    const float *scores;  /* [heads][rows][columns] */
    const int64_t *sizes; /* [heads][columns] */
    const double *shares; /* [heads]: of all keys, that a row keeps */
    int64_t at_least;     /* columns that it keeps in any case */
    uint8_t *kept;        /* [heads][rows][columns] */
    int64_t threads;
};

/* A number that ascends where scores descend and, among equal ones, with the column. */
INLINE uint64_t rank_of(float score, int64_t column) {
    float x = score + 0.0f; /* -0 is 0 */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u; /* ascends with the score */
    return (uint64_t)~bits << 32 | (uint64_t)column;
}

INLINE void swap(uint64_t *a, uint64_t *b) {
    uint64_t c = *a;
    *a = *b, *b = c;
}

/* Moves the middle one of three ranks to the end of [lo, hi). */
static void choose_pivot(uint64_t *ranks, int64_t lo, int64_t hi) {
    uint64_t *a = ranks + lo, *b = ranks + (lo + hi) / 2, *c = ranks + hi - 1;
    if (*b < *a) swap(a, b);
    if (*c < *b) swap(b, c);
    if (*b < *a) swap(a, b);
    swap(b, c);
}

/* One row: the first columns by rank, as long as those before hold less than `need` keys. Not sorted: only the side of
 * each pivot is looked into that the boundary lies in. */
static void keep_row(const float *scores, const int64_t *sizes, int64_t columns, double need, int64_t at_least,
                     uint64_t *ranks, uint8_t *kept) {
    int broken = 0;
    for (int64_t j = 0; j < columns; j++) broken |= scores[j] != scores[j], ranks[j] = rank_of(scores[j], j);
    for (int64_t j = 0; j < columns; j++) kept[j] = (uint8_t)broken; /* nothing can be said about a row with NaN */
    double before = 0;
    for (int64_t lo = 0, hi = broken ? 0 : columns; lo < hi;) {
        choose_pivot(ranks, lo, hi);
        uint64_t pivot = ranks[hi - 1];
        int64_t mid = lo, keys = 0;
        for (int64_t i = lo; i < hi - 1; i++) { /* no branch: nobody could foresee it */
            uint64_t one = ranks[i];
            int64_t smaller = one < pivot;
            ranks[i] = ranks[mid], ranks[mid] = one;
            keys += smaller * sizes[(uint32_t)one];
            mid += smaller;
        }
        swap(ranks + mid, ranks + hi - 1);
        if (before + (double)keys < need || mid < at_least) {
            for (int64_t i = lo; i <= mid; i++) kept[(uint32_t)ranks[i]] = 1;
            before += (double)(keys + sizes[(uint32_t)pivot]);
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
}

/* Which columns each row keeps. Returns 0, or 1 without memory. */
int heart_rank_keep(const struct heart_ranked *a) {
    int failed = 0;
#pragma omp parallel num_threads((int)a->threads) if (a->threads > 1)
    {
        uint64_t *ranks = malloc((size_t)(a->columns + 1) * sizeof *ranks);
        if (!ranks) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static)
        for (int64_t row = 0; row < a->heads * a->rows; row++) {
            const int64_t *sizes = a->sizes + row / a->rows * a->columns;
            double all = 0;
            for (int64_t j = 0; j < a->columns; j++) all += (double)sizes[j];
            if (ranks)
                keep_row(a->scores + row * a->columns, sizes, a->columns, a->shares[row / a->rows] * all, a->at_least,
                         ranks, a->kept + row * a->columns);
        }
        free(ranks);
    }
    return failed;
}
